"""What is known of a DataLoader of torch's: its setup, its samples' ids, its batches' size."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from miniray.doctor.model import site_from

_DIGEST_BYTES = 65536


class Watched:
    """One loader of this rank."""

    def __init__(self, loader: Any, info: dict[str, Any]) -> None:
        self.info = info
        self.subsets, dataset = unwrapped(loader.dataset)
        self.name_samples = getattr(dataset, "miniray_sample_ids", None)
        self.renames = bool(self.subsets or self.name_samples)
        self.has_ids = has_ids(loader)
        self.epochs = 0  # passes that are not evaluation


#: In place of the sampler's name for loaders of ``miniray.data``, which need no sampler.
MINIRAY_DATA = "miniray.data"


class WatchedRows(Watched):
    """One loader of ``miniray.data``, as ``miniray.data.observers.describe`` described it.

    ``first_batch`` has the fingerprint of the data if it's known.
    """

    def __init__(self, described: dict[str, Any], index: int, site: str) -> None:
        fingerprint = described["fingerprint"]
        self.info = {
            "index": index,
            "dataset": described["dataset"],
            "length": described["rows"],
            "batches": described["batches"],
            "batch_size": described["batch_size"],
            "num_workers": 0,
            "drop_last": described["drop_last"],
            "persistent_workers": False,
            "sampler": MINIRAY_DATA,
            "replicas": described["world_size"],
            "sampler_rank": described["rank"],
            "shuffle": described["is_shuffled"],
            "seed": described["seed"],
            "set_epoch_calls": 0,
            "passes": 0,
            "finished": 0,
            "last_batches": 0,
            "empty_batches": 0,
            "trained": False,
            "first_batch": [] if fingerprint is None else [fingerprint],
            "site": list(site_from(site)),
        }
        self.subsets, self.name_samples = [], None
        self.renames, self.has_ids = False, True
        self.epochs = 0


def describe(loader: Any, index: int, site: str) -> dict[str, Any]:
    sampler = sampler_of(loader)
    shuffle = getattr(sampler, "shuffle", None)
    kind = type(sampler).__name__ if sampler is not None else ""
    if shuffle is None and kind in ("RandomSampler", "SequentialSampler"):
        shuffle = kind == "RandomSampler"
    return {
        "index": index,
        "dataset": type(loader.dataset).__name__,
        "length": length_of(loader.dataset),
        "batches": length_of(loader),
        "batch_size": loader.batch_size,
        "num_workers": loader.num_workers,
        "drop_last": bool(loader.drop_last),
        "persistent_workers": bool(loader.persistent_workers),
        "sampler": kind,
        "replicas": getattr(sampler, "num_replicas", None),
        "sampler_rank": getattr(sampler, "rank", None),
        "shuffle": shuffle,
        "seed": getattr(sampler, "seed", None),
        "set_epoch_calls": 0,
        "passes": 0,
        "finished": 0,
        "last_batches": 0,
        "empty_batches": 0,
        "trained": False,
        "first_batch": [],
        "site": list(site_from(site)),
    }


def sampler_of(loader: Any) -> Any:
    """The sampler that decides which samples: that of a batch sampler of the user's, too."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(batch_sampler, "sampler", None) or batch_sampler or loader.sampler


def length_of(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):  # an iterable one has none
        return None


def has_ids(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return not isinstance(loader.dataset, IterableDataset)


def unwrapped(dataset: Any) -> tuple[list[Any], Any]:
    """(the indices of each ``Subset`` around the dataset, outermost first; the dataset)"""
    from torch.utils.data import Subset

    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    return subsets, dataset


def are_numbers(indices: Any) -> bool:
    """Whether ``ids_of`` would give them back as they are, for a loader that renames nothing."""
    return indices.__class__ is list and bool(indices) and indices[0].__class__ is int


def ids_of(watched: Watched, indices: Any) -> Sequence[int] | None:
    """The samples' own numbers; most samplers' indices are that already, and Python's own."""
    if not isinstance(indices, (list, tuple)):
        return None
    for chosen in watched.subsets:
        indices = [chosen[index] for index in indices]
    if watched.name_samples is not None:
        return list(watched.name_samples(indices))
    try:
        return [int(index) for index in indices]  # numpy's and torch's numbers
    except (TypeError, ValueError):  # a sampler of names or of pairs
        return None


def batch_size_of(batch: Any) -> int | None:
    """The length of the first tensor or list in the batch."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], (int, float, str)):
        return batch_size_of(batch[0])
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    return length_of(batch)


def digests_of(batch: Any) -> list[str]:
    """Checksums of the first few tensors of a batch, 64 KB each."""
    import torch

    if isinstance(batch, dict):
        leaves = list(batch.values())
    else:
        leaves = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    found = []
    leaf: Any
    for leaf in leaves[:4]:
        if isinstance(leaf, torch.Tensor):
            if leaf.device.type != "cpu" or not leaf.numel():
                continue
            data = leaf.detach().contiguous().reshape(-1).view(torch.uint8)[:_DIGEST_BYTES]
            found.append(f"{zlib.crc32(data.numpy().tobytes()):08x}")
        elif isinstance(leaf, (list, tuple)) and leaf and isinstance(leaf[0], str):
            found.append(f"{zlib.crc32(repr(leaf)[:_DIGEST_BYTES].encode()):08x}")
    return found
