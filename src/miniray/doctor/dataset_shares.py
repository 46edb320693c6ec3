"""Which samples each rank gets: dealt out as the sampler would do it, with nothing loaded."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.doctor import layout, loader_facts
from miniray.doctor.findings import plural
from miniray.doctor.loader_facts import length_of
from miniray.doctor.model import SamplePass

#: Indices that are dealt out at most, for one rank: of a larger epoch the beginning is compared.
MOST_IDS = 1_000_000


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank gets in one epoch. ``dropped`` samples of it are left over by ``drop_last``.

    ``last_batch`` is 0 where a batch sampler makes them as it likes.
    """

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
        last = f" (the last of {self.last_batch})" if self.batches > 1 and self.last_batch else ""
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
    #: Whether sample 0 of every rank was looked at; whether it is another one on some.
    compared: bool = False
    own: bool = False


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a sampler gives in one epoch: the first numbers, and how many there are.

    ``batches`` is their number where the sampler itself makes them.
    """

    ids: Sequence[int]
    count: int
    batches: int | None = None


def dealt(length: int, world_size: int, rank: int) -> Sequence[int]:
    """What ``DistributedSampler(shuffle=False)`` gives a rank: evenly, the first ones once more."""
    each = -(-length // world_size)
    if length == 0:
        return []
    whole = range(rank, each * world_size, world_size)
    if each * world_size == length or each > MOST_IDS:  # what is repeated then is not looked at
        return whole
    return [index % length for index in whole]


def share_of(rank: int, taken: Taken, batch_size: int | None, drop_last: bool) -> Share:
    return share(rank, pass_of(taken), batch_size, drop_last, taken.batches)


def share(
    rank: int, given: SamplePass, batch_size: int | None, drop_last: bool, batches: int | None
) -> Share:
    """``batches``: of a sampler that makes them, whatever the other two say."""
    if batches is not None:
        return Share(rank, given, batches, 0, 0)
    if not batch_size:
        return Share(rank, given, given.count, min(given.count, 1), 0)
    whole, rest = divmod(given.count, batch_size)
    if drop_last:
        return Share(rank, given, whole, batch_size if whole else 0, rest)
    return Share(rank, given, whole + bool(rest), rest or min(given.count, batch_size), 0)


def pass_of(taken: Taken) -> SamplePass:
    """Return the samples as a rank's record has them, so that they are compared alike."""
    return SamplePass(0, 0, taken.count, tuple(map(int, taken.ids[: layout.PASS_IDS])))


def of_loader(loader: Any, world: int) -> tuple[Setup, Mapping[int, Taken]]:
    """A torch DataLoader: its sampler is copied for every rank and asked."""
    sampler = sampler_of(loader)
    if sampler is None:
        raise TypeError(
            "the loader's dataset is iterable: which samples a rank gets cannot be told"
        )
    setup = setup_of(loader, sampler, world)
    if not setup.distributed:
        return setup, dict.fromkeys(range(world), taken_from(sampler))
    return setup, {r: taken_from(_for_rank(sampler, r)) for r in range(setup.world_size)}


def setup_of(loader: Any, sampler: Any, world: int) -> Setup:
    """``sampler`` None is an iterable dataset's."""
    replicas = getattr(sampler, "num_replicas", None)
    batches = loader.batch_sampler
    return Setup(
        length=length_of(loader.dataset),
        world_size=replicas or world,
        batch_size=loader.batch_size or getattr(batches, "batch_size", None),
        # A batch sampler of the user's knows it, and its loader does not.
        drop_last=bool(getattr(batches, "drop_last", loader.drop_last)),
        num_workers=int(getattr(loader, "num_workers", 0)),
        sampler=type(sampler).__name__ if sampler is not None else "",
        distributed=replicas is not None,
        shuffle=getattr(sampler, "shuffle", None),
    )


def sampler_of(loader: Any) -> Any:
    """The sampler that decides which samples; None for an iterable dataset."""
    return loader_facts.sampler_of(loader) if loader_facts.has_ids(loader) else None


def _for_rank(sampler: Any, rank: int) -> Any:
    other = copy.copy(sampler)
    other.rank = rank
    return other


def taken_from(sampler: Any) -> Taken:
    """``TypeError`` for a sampler of names, pairs or the like: these are no numbers of samples."""
    items = list(itertools.islice(iter(sampler), MOST_IDS))
    try:
        if items and isinstance(items[0], list):
            ids = [int(index) for batch in items for index in batch]
            return Taken(ids, len(ids), len(items))
        ids = [int(index) for index in items]
    except (TypeError, ValueError):
        raise TypeError(
            f"the sampler {type(sampler).__name__} gives {items[0]!r}, which is no number: which "
            "samples a rank gets cannot be told"
        ) from None
    more = length_of(sampler) if len(ids) == MOST_IDS else None
    return Taken(ids, len(ids) if more is None else more)
