"""DataLoaders: how long the rank waits for data, which samples it gets, how the loader is set up.

Which samples: the indices the sampler gave, through any ``torch.utils.data.Subset``. A dataset with
a numbering of its own may have a method ``miniray_sample_ids(indices)`` that gives the ids to
record, so that ranks which each open a part of the data are not taken for ranks that read the same.
Batches of a pass begun under ``no_grad`` are counted, but their samples are not recorded: that is
evaluation.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from time import monotonic_ns
from types import FrameType
from typing import Any

from miniray.doctor import model, recorder, sites
from miniray.doctor.instrument import broken, failed, works
from miniray.doctor.layout import Cell
from miniray.doctor.reader import site_from
from miniray.doctor.recorder import Recorder

_DIGEST_BYTES = 65536
_MOST_LOADERS = 32
_MOST_SKIPS = 3


class Watched:
    """One loader of this rank."""

    def __init__(self, loader: Any, info: dict[str, Any]) -> None:
        self.info = info
        self.subsets, dataset = _unwrapped(loader.dataset)
        self.name_samples = getattr(dataset, "miniray_sample_ids", None)
        self.has_ids = _has_ids(loader)
        self.epochs = 0  # passes that are not evaluation


class Pass:
    """One pass over it, kept on torch's iterator."""

    def __init__(self, watched: Watched, site: str) -> None:
        self.watched = watched
        self.site = site
        self.places = (0, 0)  # of the phases "data" and "compute"
        self.batches = 0
        self.recording = False
        self.trains = False  # a backward was seen
        self.epoch = -1
        self.backwards = 0
        self.last_backwards = 0  # when the last batch was given
        self.skipped = 0
        self.ended = False

    def __del__(self) -> None:
        # The iterator is gone before its end: the loop was left by break, return or an exception.
        current = recorder._current
        if current is None or self.ended or not self.batches:
            return
        index = self.watched.info["index"]
        said = f"loader {index}: {self.batches} batches"
        current.event(model.LOADER, "left", said, site=self.site)
        current.set_phase("between", self.site)


_watched: weakref.WeakKeyDictionary[Any, Watched] = weakref.WeakKeyDictionary()


def change_loader(module: Any) -> None:
    """``module`` is ``torch.utils.data.dataloader``."""
    loader_class, base = module.DataLoader, module._BaseDataLoaderIter
    loader_class.__iter__ = _make_iter(loader_class.__iter__)
    base.__next__ = _make_next(base.__next__)
    base._next_index = _make_next_index(base._next_index)


def change_sampler(module: Any) -> None:
    """``module`` is ``torch.utils.data.distributed``."""
    original = module.DistributedSampler.set_epoch

    @functools.wraps(original)
    def set_epoch(self: Any, epoch: int) -> None:
        original(self, epoch)
        if recorder._current is not None:
            self._miniray_set_epoch = getattr(self, "_miniray_set_epoch", 0) + 1

    module.DistributedSampler.set_epoch = set_epoch


def _make_iter(original: Any) -> Any:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        current = recorder._current
        if current is None or not works("loaders"):
            return original(self)
        site = sites.call_site(sys._getframe(1))
        kept = getattr(self, "_iterator", None)
        if kept is not None and hasattr(kept, "_miniray_indices"):
            kept._miniray_indices.clear()  # persistent workers: what was prefetched is void
        current.set_phase("data", site)
        started = time.monotonic()
        iterator = original(self)
        waited = time.monotonic() - started
        try:
            iterator._miniray_pass = _begin_pass(current, self, site, started)
        except Exception as error:  # a loader that somebody built in a way of their own
            failed("loaders", error)
        current.data_seconds += waited
        return iterator

    return iterate


def _begin_pass(current: Recorder, loader: Any, site: str, began: float) -> Pass:
    watched = _watched.get(loader)
    if watched is None:
        index = len(current.loaders)
        watched = _watched[loader] = Watched(loader, _describe(loader, index, site))
        if index < _MOST_LOADERS:
            current.loaders.append(watched.info)
            current.write_info()
    info = watched.info
    info["passes"] += 1
    sampler = _sampler(loader)
    info["set_epoch_calls"] = getattr(sampler, "_miniray_set_epoch", 0)
    current.event(model.LOADER, "begin", f"loader {info['index']}", site=site)
    current.mark_dirty()
    one = Pass(watched, site)
    one.places = current.places_of("data", site)
    one.recording = _grad_enabled()
    one.backwards = one.last_backwards = current.box.ints[Cell.BACKWARDS]
    if one.recording:
        one.epoch, watched.epochs = watched.epochs, watched.epochs + 1
        current.box.ints[Cell.BATCHES_IN_EPOCH] = 0
        if not current.explicit_steps:
            current.begin_pass(info["index"], one.epoch)
            current.begin_steps(began)
    return one


def _make_next_index(original: Any) -> Any:
    @functools.wraps(original)
    def next_index(self: Any) -> Any:
        index = original(self)
        if recorder._current is not None:
            # With workers indices are taken ahead; batches come in the same order.
            waiting = self.__dict__.get("_miniray_indices")
            if waiting is None:
                waiting = self._miniray_indices = deque()
            waiting.append(index)
        return index

    return next_index


def _make_next(original: Any) -> Any:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        current = recorder._current
        one: Pass | None = self.__dict__.get("_miniray_pass") if current is not None else None
        if current is None or one is None:
            return original(self)
        ints = current.box.ints
        backwards = ints[9]  # Cell.BACKWARDS
        if one.batches and one.recording and backwards == one.last_backwards:
            _note_skip(current, one, sys._getframe(1))
        one.last_backwards = backwards
        during, after = one.places
        started = monotonic_ns()
        ints[2] = (started >> 10) << 16 | during  # Cell.PHASE
        try:
            batch = original(self)
        except StopIteration:
            current.set_phase("between", one.site)
            _end_pass(current, one)
            raise
        current.data_seconds += (monotonic_ns() - started) * 1e-9
        if not broken or works("batches"):
            try:
                _count_batch(current, self, one, batch)
            except Exception as error:  # a batch of a kind we do not know
                failed("batches", error)
        ints[2] = (monotonic_ns() >> 10) << 16 | after
        return batch

    return next_batch


def _count_batch(current: Recorder, iterator: Any, one: Pass, batch: Any) -> None:
    one.batches += 1
    ints = current.box.ints
    ints[7] += 1  # Cell.BATCHES
    waiting = iterator.__dict__.get("_miniray_indices")
    indices = waiting.popleft() if waiting else None
    watched = one.watched
    ids = None
    if watched.has_ids and isinstance(indices, (list, tuple)):
        ids = _ids(watched, indices)
    given = _batch_size(batch)
    size = len(ids) if ids is not None and given != 0 else given
    info = watched.info
    if given == 0:  # also where the sampler gave indices and the collate function dropped them all
        info["empty_batches"] += 1
        current.event(model.LOADER, "empty batch", f"loader {info['index']}", site=one.site)
        current.mark_dirty()
    if one.batches == 1 and info["passes"] == 1 and works("first batches"):
        try:
            info["first_batch"] = _digests(batch)
        except Exception as error:  # tensors of a kind that has no plain bytes
            failed("first batches", error)
        current.mark_dirty()
    if one.recording:
        ints[8] = one.batches  # Cell.BATCHES_IN_EPOCH
        if not one.trains and ints[9] > one.backwards:
            one.trains = True
            if not info["trained"]:
                _becomes_training(current, one)
        if not current.explicit_steps:
            if one.batches == 1 and info["trained"]:
                current.set_epoch(one.epoch, one.site)
            current.add_samples(ids, size or 0)


def _becomes_training(current: Recorder, one: Pass) -> None:
    """A backward happened during the pass: its epochs are the rank's epochs."""
    info = one.watched.info
    info["trained"] = True
    if not current.explicit_steps:
        current.set_epoch(one.epoch, one.site)
    current.mark_dirty()


def _note_skip(current: Recorder, one: Pass, frame: FrameType) -> None:
    """The last batch had no backward: in DDP the other ranks may now wait for it.

    Why is seldom recorded, for no loss was given to backward. The loop's own variable tells.
    """
    one.skipped += 1
    if one.skipped > _MOST_SKIPS:  # a pass that does not train at all
        return
    said = f"loader {one.watched.info['index']}: batch {one.batches}"
    loss: Any = frame.f_locals.get("loss")
    device = getattr(getattr(loss, "device", None), "type", "")
    if isinstance(loss, float) or (device == "cpu" and getattr(loss, "ndim", 1) == 0):
        said += f", loss {loss if isinstance(loss, float) else loss.item()}"
    current.event(model.LOADER, "no backward", said, site=one.site)


def _end_pass(current: Recorder, one: Pass) -> None:
    one.ended = True
    info = one.watched.info
    if one.recording and not info["trained"] and current.box.ints[9] > one.backwards:
        _becomes_training(current, one)
    info["finished"] += 1
    info["last_batches"] = one.batches
    if one.recording and not current.explicit_steps:
        current.end_pass()
    loader = f"loader {info['index']}"
    current.event(model.LOADER, "end", loader, site=one.site, number=one.batches)
    current.write_info()


def _describe(loader: Any, index: int, site: str) -> dict[str, Any]:
    sampler = _sampler(loader)
    shuffle = getattr(sampler, "shuffle", None)
    kind = type(sampler).__name__ if sampler is not None else ""
    if shuffle is None and kind in ("RandomSampler", "SequentialSampler"):
        shuffle = kind == "RandomSampler"
    return {
        "index": index,
        "dataset": type(loader.dataset).__name__,
        "length": _length(loader.dataset),
        "batches": _length(loader),
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


def _sampler(loader: Any) -> Any:
    """The sampler that decides which samples: that of a batch sampler of the user's, too."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(batch_sampler, "sampler", None) or batch_sampler or loader.sampler


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):  # an iterable one has none
        return None


def _has_ids(loader: Any) -> bool:
    from torch.utils.data import IterableDataset

    return not isinstance(loader.dataset, IterableDataset)


def _unwrapped(dataset: Any) -> tuple[list[Any], Any]:
    """(the indices of each ``Subset`` around the dataset, outermost first; the dataset)"""
    from torch.utils.data import Subset

    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset.indices)
        dataset = dataset.dataset
    return subsets, dataset


def _ids(watched: Watched, indices: Sequence[Any]) -> Sequence[int] | None:
    for chosen in watched.subsets:
        indices = [chosen[index] for index in indices]
    if watched.name_samples is not None:
        return list(watched.name_samples(indices))
    # Most samplers give Python's own numbers; those that do not are known by their first.
    return indices if indices and type(indices[0]) is int else _as_ints(indices)


def _as_ints(indices: Sequence[Any]) -> list[int] | None:
    try:
        return [int(index) for index in indices]  # numpy's and torch's numbers
    except (TypeError, ValueError):  # a sampler of names or of pairs
        return None


def _batch_size(batch: Any) -> int | None:
    """The length of the first tensor or list in the batch."""
    if isinstance(batch, dict):
        batch = next(iter(batch.values()), None)
    elif isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], (int, float, str)):
        return _batch_size(batch[0])
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else 1
    return _length(batch)


def _digests(batch: Any) -> list[str]:
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


def _grad_enabled() -> bool:
    import torch

    return bool(torch.is_grad_enabled())
