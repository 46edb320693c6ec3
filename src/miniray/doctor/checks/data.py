"""Does every rank get its own data, and another order every epoch? (P7)

Ranks are compared by the ids of the samples they really got. A DistributedSampler repeats a few
samples to make shards even, which is not overlap; and equal numbers with different contents (each
rank has files of its own) are not overlap either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from miniray.counting import format_epoch
from miniray.doctor import samples
from miniray.doctor.dataset_check import (
    EACH_ITS_SHARE,
    OF_THE_GROUP,
    ONE_ORDER,
    PASS_RANK,
    SET_EPOCH,
)
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named
from miniray.doctor.loader_facts import MINIRAY_DATA
from miniray.doctor.model import NOWHERE, Loader, SamplePass

#: Share of common samples from which on it is said.
_OVERLAP = 0.10
_MOST_RANKS = 32  # pairs grow with the square
#: Collectives by which gradients are averaged.
_AVERAGING = ("DDP.", "reduce_scatter")


def check(case: Case) -> Iterator[Finding]:
    if len(case.ranks) > 1:
        yield from _overlap(case)
    yield from _same_order(case)


def _overlap(case: Case) -> Iterator[Finding]:
    found: list[tuple[bool, float, Facts, Facts, SamplePass, SamplePass]] = []
    for one, two in itertools.combinations(list(case)[:_MOST_RANKS], 2):
        for mine, theirs in _comparable(one, two):
            share = samples.overlap(mine, theirs)
            if samples.count_shared(mine, theirs) <= len(case.world) or share < _OVERLAP:
                continue
            found.append((_average_together(case, one, two), share, one, two, mine, theirs))
    if not found:
        return
    together, share, one, two, mine, theirs = max(found, key=lambda pair: pair[:2])
    involved = {f.rank for pair in found if pair[0] == together for f in pair[2:4]}
    loader = _loader(one, mine)
    severity = Severity.WRONG
    sampler = loader.sampler if loader is not None else ""
    if sampler == MINIRAY_DATA:
        cause = (
            "Several ranks read the same rows: the dataset has no rank, or they passed the same."
        )
        fix = PASS_RANK
    elif loader is not None and loader.replicas is None:
        cause = f"The loader uses {sampler}, not a DistributedSampler: every rank gets everything."
        fix = EACH_ITS_SHARE
    else:
        cause = "The sampler gives several ranks the same share (same rank or num_replicas given)."
        fix = OF_THE_GROUP
    if loader is not None and _may_be_own_parts(one, two, mine, theirs):
        severity = Severity.NOTE
        cause = (
            f"The loaders use {sampler} and number their samples alike. If each rank's dataset is "
            "its own part this is as it should be; if not, every rank gets everything."
        )
    elif not together:
        severity = Severity.NOTE
        cause = (
            "Nothing is seen to average their gradients. Ranks that hold parts of one model "
            "(tensor or pipeline parallel) must read the same; those with a model each must not."
        )
    yield Finding(
        code="same-data",
        severity=severity,
        title=f"ranks {one.rank} and {two.rank} share {samples.describe_overlap(mine, theirs)}",
        ranks=tuple(sorted(involved)),
        evidence=(
            f"rank {one.rank}: {_first_ids(mine)}",
            f"rank {two.rank}: {_first_ids(theirs)}",
            *([f"{sampler} of {loader.length} samples at {loader.site}"] if loader else []),
        ),
        cause=cause,
        fix=fix,
        site=loader.site if loader is not None else NOWHERE,
    )


def _comparable(one: Facts, two: Facts) -> Iterator[tuple[SamplePass, SamplePass]]:
    """The newest pass of one epoch over each loader that is trained with, on both ranks."""
    theirs = {(p.loader, p.epoch): p for p in two.record.passes}
    done: set[int] = set()
    for mine in reversed(one.record.passes):
        other = theirs.get((mine.loader, mine.epoch))
        if other is None or mine.loader in done or not mine.count or not other.count:
            continue
        done.add(mine.loader)
        a, b = _loader(one, mine), _loader(two, other)
        if (a is None) != (b is None):
            continue
        if a is not None and b is not None and not (a.trained and b.trained):
            continue  # the same validation data on every rank is a choice
        if a is not None and b is not None and _other_contents(a, b, mine, other):
            continue
        yield mine, other


def _loader(facts: Facts, given: SamplePass) -> Loader | None:
    return next((ld for ld in facts.record.loaders if ld.index == given.loader), None)


def _other_contents(a: Loader, b: Loader, mine: SamplePass, theirs: SamplePass) -> bool:
    """Whether equal ids stood for different samples in the first batch both ranks saw."""
    if a.sampler == b.sampler == MINIRAY_DATA:
        return a.first_batch != b.first_batch
    size = max(1, a.batch_size or 1)
    if not a.first_batch or not b.first_batch or mine.ids[:size] != theirs.ids[:size]:
        return False
    return a.first_batch != b.first_batch


def _may_be_own_parts(one: Facts, two: Facts, mine: SamplePass, theirs: SamplePass) -> bool:
    """Whether only the numbers are known to be equal: no DistributedSampler, orders differ."""
    a, b = _loader(one, mine), _loader(two, theirs)
    assert a is not None
    assert b is not None
    size = max(1, a.batch_size or 1)
    proven = a.first_batch == b.first_batch != ()
    if a.sampler != MINIRAY_DATA:  # whose fingerprints are of all rows
        proven = proven and mine.ids[:size] == theirs.ids[:size]
    return a.replicas is None and b.replicas is None and not proven


def _average_together(case: Case, one: Facts, two: Facts) -> bool:
    """Whether DDP or FSDP averages gradients of the two, as far as one can see."""
    if min(one.record.group_size, two.record.group_size) <= 0:
        return True  # no process group: what is wrong with that is said, too
    averaging = [e for e in one.record.collectives() if e.name.startswith(_AVERAGING)]
    # What tensor-parallel layers scatter, by operators, are activations.
    calls = [event for event in averaging if not event.functional]
    if not calls:
        return bool(one.record.models)  # compiled ones average unseen
    return any(two.rank in case.members.get(event.group, ()) for event in calls)


def _first_ids(given: SamplePass) -> str:
    shown = ", ".join(map(str, given.ids[:8]))
    return f"{format_epoch(given.epoch)}, {given.count} samples: {shown}{', …' * (given.count > 8)}"


def _same_order(case: Case) -> Iterator[Finding]:
    """A shuffling DistributedSampler that was never told the epoch repeats its first order."""
    guilty: list[tuple[Facts, Loader, SamplePass, SamplePass]] = []
    for facts in case:
        for loader in facts.record.loaders:
            if not loader.shuffle or loader.replicas is None or not _trains(facts, loader):
                continue
            whole = _whole_passes(facts, loader)
            pairs = [pair for pair in itertools.pairwise(whole) if samples.same_order(*pair)]
            if pairs:
                guilty.append((facts, loader, *pairs[0]))
                break
    if not guilty:
        return
    _, loader, before, again = guilty[0]
    ranks = tuple(f.rank for f, *_ in guilty)
    first, second = format_epoch(before.epoch), format_epoch(again.epoch)
    title = f"{second} has {first}'s order on {named(ranks)}: set_epoch forgotten"
    cause = ONE_ORDER
    fix = SET_EPOCH
    calls = f"set_epoch called {loader.set_epoch_calls} times in {loader.passes} epochs, "
    if loader.sampler == MINIRAY_DATA:
        calls = f"{loader.passes} passes, {loader.finished} of them to the end, "
        cause = "A loop that ends early, or set_epoch with the same epoch, repeats the epoch."
        fix = "call loader.set_epoch(epoch) with a different epoch before each pass"
    if not loader.trained:
        title = f"{named(ranks)} took the first batch of {loader.passes} passes, always the same"
        cause = "next(iter(loader)) begins a new pass; without set_epoch it has the same order."
        fix = "take all batches of a pass: for batch in loader; and set_epoch before each pass"
    yield Finding(
        code="set-epoch-forgotten",
        severity=Severity.WRONG,
        title=title,
        ranks=ranks,
        evidence=(
            f"first samples in both: {', '.join(map(str, again.ids[:8]))}, …",
            f"{calls}loader at {loader.site}",
        ),
        cause=cause,
        fix=fix,
        site=loader.site,
    )


def _trains(facts: Facts, loader: Loader) -> bool:
    """That a pass trains is known with its second batch: ``next(iter(loader))`` never takes one."""
    record = facts.record
    return loader.trained or 1 < loader.passes == record.batches <= record.backwards


def _whole_passes(facts: Facts, loader: Loader) -> list[SamplePass]:
    """Its passes, oldest first; a look at the first batch is none, unless all of them are that."""
    passes = [given for given in facts.record.passes if given.loader == loader.index]
    passes.sort(key=lambda given: given.epoch)
    return [p for p in passes if p.count > (loader.batch_size or 0)] or passes
