"""Who gets which samples, and may the dataset go to loader workers? Before training. (P3, P7)

::

    print(doctor.check_dataset(dataset, world_size=4, batch_size=8).text())

Nothing is loaded: only indices are dealt out, as the sampler would do it, and the dataset's
attributes are looked at. A DataLoader may be given in place of a dataset; its own sampler is asked
then.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from miniray.doctor import layout, samples
from miniray.doctor.findings import Finding, Severity, by_weight, named, plural
from miniray.doctor.handles import find_handles
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


@dataclasses.dataclass(frozen=True)
class DataReport:
    """The answer, a share a rank, and what is wrong with it. ``exit_code`` is 1 for findings."""

    setup: Setup
    shares: tuple[Share, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        return 1 if self.findings else 0

    def text(self, width: int = 80) -> str:
        from miniray.doctor.render import finding_lines, wrapped

        setup = self.setup
        head = "an unknown number of samples" if setup.length is None else _count(setup.length)
        parts = [f"{head} for {plural(setup.world_size, 'rank')}"]
        if setup.batch_size is not None:
            parts.append(f"batch size {setup.batch_size}")
        if setup.sampler:
            parts.append(setup.sampler)
        if setup.where:
            parts.append(setup.where)
        lines = [wrapped(", ".join(parts), width)]
        lines += [wrapped(share.line(), width, "  ") for share in self.shares[:16]]
        if len(self.shares) > 16:
            lines.append(f"  … and {len(self.shares) - 16} ranks more")
        for finding in [*self.findings, *self.notes]:
            lines += ["", wrapped(f"{finding.severity.word}: {finding.title}", width)]
            lines += finding_lines(finding, width)
        if not self.findings:
            lines += ["", "nothing wrong"]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "setup": dataclasses.asdict(self.setup),
            "ranks": [
                {
                    "rank": share.rank,
                    "samples": share.samples,
                    "batches": share.batches,
                    "last_batch": share.last_batch,
                    "dropped": share.dropped,
                    "first": list(share.given.ids[:64]),
                }
                for share in self.shares
            ],
            "findings": [finding.to_json() for finding in self.findings],
            "notes": [finding.to_json() for finding in self.notes],
        }


def check_dataset(
    data: Any,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    batch_size: int | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
) -> DataReport:
    """Deal the samples of a dataset, or of a torch DataLoader, out to all ranks and look at it.

    A plain dataset is dealt out as ``DistributedSampler`` does; ``batch_size``, ``drop_last`` and
    ``num_workers`` say what the loader will be like. A DataLoader knows these itself.
    ``world_size`` is by default what the environment or the process group says. With ``rank`` only
    that rank's share is shown; all are compared. ``TypeError`` for a dataset without a length.
    """
    world = _world_size() if world_size is None else world_size
    if world < 1:
        raise ValueError(f"world_size must be at least 1, not {world}")
    if rank is not None and not 0 <= rank < world:
        raise ValueError(f"rank must be at least 0 and less than world_size {world}, not {rank}")
    if hasattr(data, "dataset") and hasattr(data, "batch_sampler"):
        setup, indices = _of_loader(data, world)
        dataset = data.dataset
    else:
        length = _length(data)
        if length is None:
            kind = type(data).__name__
            raise TypeError(f"{kind} has no length: which samples a rank gets cannot be told")
        setup = Setup(length, world, batch_size, drop_last, num_workers)
        indices = {r: dealt(length, world, r) for r in range(world)}
        dataset = data
    shares = [share_of(r, ids, setup.batch_size, setup.drop_last) for r, ids in indices.items()]
    handles = [str(handle) for handle in find_handles(dataset) if not handle.forks]
    found = by_weight(judge(setup, shares, handles))
    shown = tuple(share for share in shares if rank is None or share.rank == rank)
    return report(setup, shown, found)


def report(setup: Setup, shares: Sequence[Share], found: Iterable[Finding]) -> DataReport:
    every = tuple(found)
    notes = tuple(f for f in every if f.severity is Severity.NOTE)
    return DataReport(setup, tuple(shares), tuple(f for f in every if f not in notes), notes)


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


# -- what is wrong with it ------------------------------------------------------------------------


def judge(setup: Setup, shares: Sequence[Share], handles: Sequence[str]) -> Iterator[Finding]:
    yield from _sampler(setup)
    yield from _overlap(setup, shares)
    yield from _uneven(setup, shares)
    yield from _dropped(setup, shares)
    yield from _epoch(setup)
    if handles:
        serious = setup.num_workers > 0
        yield Finding(
            code="open-handles",
            severity=Severity.WRONG if serious else Severity.NOTE,
            title=f"the dataset holds {plural(len(handles), 'open handle')}: {handles[0]}",
            evidence=tuple(handles),
            cause="A forked loader worker shares the file position and the library's state: wrong "
            "data, crashes, hangs. " + ("" if serious else "With num_workers=0 nothing is shared."),
            fix="open it in __getitem__ on first use in each process, or in worker_init_fn",
        )


def _sampler(setup: Setup) -> Iterator[Finding]:
    if setup.world_size > 1 and not setup.distributed:
        yield Finding(
            code="no-distributed-sampler",
            severity=Severity.WRONG,
            title=f"the loader uses {setup.sampler}, not a DistributedSampler: every rank gets "
            "everything",
            cause="Each of the ranks trains on all samples; an epoch is as long as with one.",
            fix="DataLoader(..., sampler=DistributedSampler(dataset)), without shuffle=",
            explains=frozenset({"same-data"}),
        )


def _overlap(setup: Setup, shares: Sequence[Share]) -> Iterator[Finding]:
    repeated = _padding(setup, shares)
    for one, two in itertools.combinations(shares[:32], 2):
        share = samples.overlap(one.given, two.given)
        if share > 0.10 and share * min(one.given.count, two.given.count) > setup.world_size:
            yield Finding(
                code="same-data",
                severity=Severity.WRONG,
                title=f"ranks {one.rank} and {two.rank} share {share:.0%} of their samples",
                ranks=(one.rank, two.rank),
                evidence=(one.line(), two.line()),
                cause="Ranks train on the same samples.",
                fix="DistributedSampler(dataset) takes rank and world size from the process group",
            )
            return
    if repeated:
        shown = ", ".join(map(str, repeated[:8]))
        yield Finding(
            code="repeated-samples",
            severity=Severity.NOTE,
            title=f"{plural(len(repeated), 'sample')} given twice to make the shares even: {shown}",
            cause="DistributedSampler repeats the first samples. Metrics over them count double.",
            fix="drop_last=True leaves samples out instead; miniray.data does neither",
        )


def _padding(setup: Setup, shares: Sequence[Share]) -> list[int]:
    if not all(share.given.is_exact for share in shares):
        return []
    seen: set[int] = set()
    twice: set[int] = set()
    for share in shares:
        twice |= seen & set(share.given.ids)
        seen |= set(share.given.ids)
    return sorted(twice)


def _uneven(setup: Setup, shares: Sequence[Share]) -> Iterator[Finding]:
    none = [share.rank for share in shares if share.batches == 0]
    most = max(shares, key=lambda share: share.batches, default=None)
    if most is None:
        return
    if none:
        why = ""
        if setup.length is not None and setup.length < setup.world_size:
            why = f" ({plural(setup.length, 'sample')} < {setup.world_size} ranks)"
        yield Finding(
            code="no-batches",
            severity=Severity.WRONG,
            title=f"{named(none)} {'has' if len(none) == 1 else 'have'} 0 batches{why}",
            ranks=tuple(none),
            cause="A rank without a batch never calls backward, and the others wait for it there.",
            fix="more data, fewer ranks, a smaller batch, or drop_last=False",
        )
        return
    fewer = [share for share in shares if share.batches < most.batches]
    if fewer:
        yield Finding(
            code="uneven-batches",
            severity=Severity.WRONG,
            title=f"{named(s.rank for s in fewer)} {'has' if len(fewer) == 1 else 'have'} "
            f"{plural(fewer[0].batches, 'batch')}, rank {most.rank} has {most.batches}",
            ranks=tuple(share.rank for share in fewer),
            cause="The ranks with more batches will wait for the others in backward, for ever.",
            fix="an even sampler, drop_last=True, or the loop inside `with model.join():`",
        )


def _dropped(setup: Setup, shares: Sequence[Share]) -> Iterator[Finding]:
    dropped = sum(share.dropped for share in shares)
    given = sum(share.samples for share in shares)
    if dropped:
        yield Finding(
            code="dropped-samples",
            severity=Severity.NOTE,
            title=f"drop_last leaves out {plural(dropped, 'sample')} of {given + dropped} an epoch",
            ranks=tuple(share.rank for share in shares if share.dropped),
            cause="Batches that are not full are not given.",
            fix="drop_last=False, or a batch size that divides the shares",
        )


def _epoch(setup: Setup) -> Iterator[Finding]:
    if setup.shuffle and setup.distributed and setup.world_size > 1 and setup.epoch_set is False:
        yield Finding(
            code="set-epoch-forgotten",
            severity=Severity.WRONG,
            title="set_epoch was not called before the first epoch: every epoch has the same order",
            cause="DistributedSampler shuffles by seed + epoch; the epoch is 0 until it is told.",
            fix="call loader.sampler.set_epoch(epoch) at the beginning of each epoch",
        )


# -- loaders --------------------------------------------------------------------------------------


def _of_loader(loader: Any, world: int) -> tuple[Setup, Mapping[int, Sequence[int]]]:
    """A torch DataLoader: its sampler is copied for every rank and asked."""
    sampler = sampler_of(loader)
    replicas = getattr(sampler, "num_replicas", None)
    setup = Setup(
        length=_length(loader.dataset),
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


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _world_size() -> int:
    import sys

    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _count(length: int) -> str:
    return plural(length, "sample") if length < 10_000 else f"{length:,} samples"
