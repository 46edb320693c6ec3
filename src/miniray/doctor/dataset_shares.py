"""Which samples each rank gets: dealt out as the sampler would do it, with nothing loaded."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.doctor import layout, samples
from miniray.doctor.findings import plural
from miniray.doctor.model import SamplePass

#: Indices that are dealt out at most, for one rank: of a larger epoch the beginning is compared.
_MOST_IDS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank gets in one epoch. ``dropped`` samples of it are left over by ``drop_last``."""

    rank: int
    given: SamplePass
    batches: int
    last_batch: int
    dropped: int

    @property
    def samples(self) -> int:
        return self.given.count - self.dropped

    def line(self) -> str:
        """``rank 1: 3 samples, 2 batches (the last of 1): 1, 5, 9``"""
        shown = ", ".join(map(str, self.given.ids[:8]))
        last = f" (the last of {self.last_batch})" if self.batches > 1 else ""
        more = ", …" if self.given.count > 8 else ""
        counts = f"{plural(self.samples, 'sample')}, {plural(self.batches, 'batch')}{last}"
        return (
            f"rank {self.rank}: {counts}: {shown}{more}" if shown else f"rank {self.rank}: {counts}"
        )


@dataclasses.dataclass(frozen=True)
class Setup:
    """How the data is dealt out. ``sampler`` is "" where it is only assumed what it would be."""

    length: int | None
    world_size: int
    batch_size: int | None
    drop_last: bool = False
    num_workers: int = 0
    sampler: str = ""
    distributed: bool = True
    shuffle: bool | None = None
    epoch_set: bool | None = None  #: whether set_epoch was called; None where nobody can know yet
    where: str = ""


def dealt(length: int, world_size: int, rank: int) -> range | list[int]:
    """What ``DistributedSampler(shuffle=False)`` gives a rank: evenly, the first ones once more."""
    each = -(-length // world_size)
    if length == 0:
        return []
    whole = range(rank, each * world_size, world_size)
    return whole if each * world_size == length else [index % length for index in whole]


def share_of(rank: int, ids: Sequence[int], batch_size: int | None, drop_last: bool) -> Share:
    count = len(ids)
    if not batch_size:
        return Share(rank, pass_of(ids), count, 1 if count else 0, 0)
    whole, rest = divmod(count, batch_size)
    if drop_last:
        return Share(rank, pass_of(ids), whole, batch_size if whole else 0, rest)
    return Share(rank, pass_of(ids), whole + bool(rest), rest or min(count, batch_size), 0)


def pass_of(ids: Sequence[int]) -> SamplePass:
    """The samples as a rank's box would have them, so that they are compared in the same way."""
    import numpy as np

    array = np.asarray(ids, dtype=np.int64)
    sketch: tuple[int, ...] = ()
    if array.size > layout.PASS_IDS:
        sketch = tuple(np.unique(samples.hash_ids(array))[: layout.SKETCH_SIZE].tolist())
    return SamplePass(0, 0, int(array.size), tuple(array[: layout.PASS_IDS].tolist()), sketch)


def of_loader(loader: Any, world: int) -> tuple[Setup, Mapping[int, Sequence[int]]]:
    """A torch DataLoader: its sampler is copied for every rank and asked."""
    sampler = sampler_of(loader)
    replicas = getattr(sampler, "num_replicas", None)
    setup = Setup(
        length=length_of(loader.dataset),
        world_size=replicas or world,
        batch_size=loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        drop_last=bool(getattr(loader, "drop_last", False)),
        num_workers=int(getattr(loader, "num_workers", 0)),
        sampler=type(sampler).__name__ if sampler is not None else "no sampler",
        distributed=replicas is not None,
        shuffle=getattr(sampler, "shuffle", None),
    )
    if sampler is None:
        raise TypeError(
            "the loader's dataset is iterable: which samples a rank gets cannot be told"
        )
    if replicas is None:
        ids = indices_of(sampler)
        return setup, dict.fromkeys(range(world), ids)
    return setup, {r: indices_of(_for_rank(sampler, r)) for r in range(replicas)}


def sampler_of(loader: Any) -> Any:
    """The sampler that gives single samples; None for an iterable dataset."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:
        return None
    return getattr(batch_sampler, "sampler", batch_sampler)


def _for_rank(sampler: Any, rank: int) -> Any:
    other = copy.copy(sampler)
    other.rank = rank
    return other


def indices_of(sampler: Any) -> list[int]:
    return [int(index) for index in itertools.islice(iter(sampler), _MOST_IDS)]


def length_of(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
