"""Who gets which samples, and may the dataset go to loader workers? Before training. (P3, P7)

::

    print(doctor.check_dataset(dataset, world_size=4, batch_size=8).text())

Nothing is loaded: only indices are dealt out, as the sampler would do it, and the dataset's
attributes are looked at. A DataLoader may be given in place of a dataset; its own sampler is asked
then.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from miniray.checks import check_bool
from miniray.doctor import samples
from miniray.doctor.dataset_shares import Setup, Share, Taken, dealt, of_loader, share_of
from miniray.doctor.findings import Finding, Severity, by_weight, named, plural
from miniray.doctor.handles import find_handles
from miniray.doctor.loader_facts import MINIRAY_DATA, length_of

#: What to do where ranks get the same samples, or the same order in every epoch.
EACH_ITS_SHARE = "DataLoader(..., sampler=DistributedSampler(dataset)), without shuffle="
OF_THE_GROUP = "DistributedSampler(dataset) takes rank and world size from the process group"
PASS_RANK = "Pass rank= and world_size= to the dataset"
SET_EPOCH = "call loader.sampler.set_epoch(epoch) at the beginning of each epoch"
ONE_ORDER = "DistributedSampler shuffles by seed + epoch; the epoch is 0 until it is told."


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
    that rank's share is shown; all are compared. ``TypeError`` for a dataset without a length, and
    for a loader whose sampler gives no numbers.
    """
    check_bool("drop_last", drop_last)
    world = _world_size() if world_size is None else world_size
    if world < 1:
        raise ValueError(f"world_size must be at least 1, not {world}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    if rank is not None and not 0 <= rank < world:
        raise ValueError(f"rank must be at least 0 and less than world_size {world}, not {rank}")
    if hasattr(data, "dataset") and hasattr(data, "batch_sampler"):
        setup, taken = of_loader(data, world)
        dataset = data.dataset
    else:
        length = length_of(data)
        if length is None:
            kind = type(data).__name__
            raise TypeError(f"{kind} has no length: which samples a rank gets cannot be told")
        setup = Setup(length, world, batch_size, drop_last, num_workers)
        each = {r: dealt(length, world, r) for r in range(world)}
        taken = {r: Taken(ids, len(ids)) for r, ids in each.items()}
        dataset = data
    shares = [share_of(r, given, setup.batch_size, setup.drop_last) for r, given in taken.items()]
    handles = [str(handle) for handle in find_handles(dataset) if not handle.forks]
    return report(setup, shares, handles, rank)


def report(
    setup: Setup, shares: Sequence[Share], handles: Sequence[str], rank: int | None = None
) -> DataReport:
    """What is wrong with all shares; shown is ``rank``'s, or all."""
    found = by_weight(judge(setup, shares, handles))
    notes = tuple(f for f in found if f.severity is Severity.NOTE)
    shown = tuple(share for share in shares if rank is None or share.rank == rank)
    return DataReport(setup, shown, tuple(f for f in found if f not in notes), notes)


def _world_size() -> int:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return int(os.environ.get("WORLD_SIZE", "1"))


def _count(length: int) -> str:
    return plural(length, "sample") if length < 10_000 else f"{length:,} samples"


# -- what is wrong with the shares ----------------------------------------------------------------


def judge(setup: Setup, shares: Sequence[Share], handles: Sequence[str]) -> Iterator[Finding]:
    if not shares:
        yield Finding(
            code="iterable-dataset",
            severity=Severity.NOTE,
            title="the dataset is iterable and deals its samples out itself: which rank gets which "
            "cannot be told",
            cause="Without a split of its own every rank, and every worker, gets everything.",
            fix="split by rank and get_worker_info() in __iter__; tell doctor.step(sample_ids=...)",
        )
    elif setup.own:
        yield _own_datasets(setup, shares)
    else:
        yield from _overlap(setup, shares)
    yield from _uneven(setup, shares)
    yield from _dropped(shares)
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


def _own_datasets(setup: Setup, shares: Sequence[Share]) -> Finding:
    cause = "The ranks' samples are numbered alike and are others: the script gave each rank its "
    cause += "own part. Whether these overlap cannot be told from the numbers."
    fix = "nothing, if the parts are disjoint; doctor.step(sample_ids=...) lets a run compare them"
    if setup.distributed:
        cause += f" {setup.sampler} deals each part out once more: a rank reads a share of its own."
        fix = "one or the other: the whole dataset on every rank, or a loader without that sampler"
    return Finding(
        code="own-datasets",
        severity=Severity.NOTE,
        title=f"{named(share.rank for share in shares)} have a dataset each, not one in common",
        ranks=tuple(share.rank for share in shares),
        cause=cause,
        fix=fix,
    )


def _overlap(setup: Setup, shares: Sequence[Share]) -> Iterator[Finding]:
    repeated = _padding(shares)
    for one, two in itertools.combinations(shares[:32], 2):
        share = samples.overlap(one.given, two.given)
        padded = samples.count_shared(one.given, two.given) <= setup.world_size
        if share <= 0.10 or (padded and setup.distributed):
            continue
        shared = samples.describe_overlap(one.given, two.given)
        title = f"ranks {one.rank} and {two.rank} share {shared}"
        cause = "Ranks train on the same samples."
        fix = OF_THE_GROUP
        code = "same-data"
        if setup.sampler == MINIRAY_DATA:
            fix = PASS_RANK
        elif not setup.distributed:
            code, fix = "no-distributed-sampler", EACH_ITS_SHARE
        if code == "no-distributed-sampler" and share > 0.99:
            title = f"the loader uses {setup.sampler}, not a DistributedSampler: every rank gets "
            title += "everything"
            cause = "Each of the ranks trains on all samples, and an epoch is as long as with one."
        if not setup.distributed and share > 0.99 and not setup.compared:
            cause += " That equal numbers are equal samples is taken for granted: not so if each"
            cause += " rank was given a part of the data."
        yield Finding(
            code=code,
            severity=Severity.WRONG,
            title=title,
            ranks=(one.rank, two.rank),
            evidence=(one.line(), two.line()),
            cause=cause,
            fix=fix,
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


def _padding(shares: Sequence[Share]) -> list[int]:
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


def _dropped(shares: Sequence[Share]) -> Iterator[Finding]:
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
            cause=ONE_ORDER,
            fix=SET_EPOCH,
        )
