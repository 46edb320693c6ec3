"""What is wrong with the shares the ranks will get: overlap, unevenness, samples left out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from miniray.doctor import samples
from miniray.doctor.dataset_shares import Setup, Share
from miniray.doctor.findings import Finding, Severity, named, plural


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
        padded = share * min(one.given.count, two.given.count) <= setup.world_size
        if share <= 0.10 or (padded and setup.distributed):
            continue
        title = f"ranks {one.rank} and {two.rank} share {share:.0%} of their samples"
        cause = "Ranks train on the same samples."
        fix = "DistributedSampler(dataset) takes rank and world size from the process group"
        if not setup.distributed:
            fix = "DataLoader(..., sampler=DistributedSampler(dataset)), without shuffle="
        if not setup.distributed and share > 0.99:
            title = f"the loader uses {setup.sampler}, not a DistributedSampler: every rank gets "
            title += "everything"
            cause = "Each of the ranks trains on all samples, and an epoch is as long as with one."
            if not setup.compared:
                cause += " That equal numbers are equal samples is taken for granted: not so if "
                cause += "each rank was given a dataset of its own part."
        yield Finding(
            code="same-data" if setup.distributed else "no-distributed-sampler",
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
            cause="DistributedSampler shuffles by seed + epoch; the epoch is 0 until it is told.",
            fix="call loader.sampler.set_epoch(epoch) at the beginning of each epoch",
        )
