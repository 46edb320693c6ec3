"""Losses that are not finite and batches that are empty. (P8)"""

from __future__ import annotations

from collections.abc import Iterator

from miniray.counting import format_epoch
from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding, Severity, named
from miniray.doctor.model import NonFinite, RankRecord


def check(case: Case) -> Iterator[Finding]:
    yield from _non_finite(case)
    yield from _empty(case)


def _non_finite(case: Case) -> Iterator[Finding]:
    bad = [f for f in case if f.record.first_nonfinite is not None]
    if not bad:
        return
    first = min(bad, key=lambda f: _order(f.record))
    found = first.record.first_nonfinite
    assert found is not None
    value = "NaN" if found.value != found.value else "Inf" if found.value > 0 else "-Inf"
    samples = ""
    if found.samples:
        shown = ", ".join(map(str, found.samples[:8]))
        samples = f", samples {shown}" + (" …" if len(found.samples) > 8 else "")
    evidence = [
        f"rank {f.rank}: {f.record.nonfinite} not finite, the first at "
        + _when(f.record.first_nonfinite)
        for f in [first, *[f for f in bad if f is not first][:3]]
    ]
    if len(case.world) == 1:
        cause = "Once a loss is NaN the weights are too."
    elif found.step:
        cause = "DDP averages gradients: one NaN makes the weights of all ranks NaN in that step."
    else:
        cause = "Weights are averaged over workers: one worker's NaN becomes that of all."
    yield Finding(
        code="non-finite-loss",
        severity=Severity.WRONG,
        title=f"first non-finite loss: rank {first.rank}, {_when(found)} ({value}){samples}",
        ranks=(first.rank,),
        evidence=tuple(evidence),
        cause=cause,
        fix="look at those samples; clip gradients, lower the learning rate, check divisions",
        step=found.step,
        site=found.site,
    )


def _when(found: NonFinite | None) -> str:
    """By its step; where nobody saw one (a worker without torch), by its epoch."""
    assert found is not None
    return f"step {found.step}" if found.step else format_epoch(found.epoch)


def _order(record: RankRecord) -> tuple[int, int, float]:
    """By step and epoch first: clocks of two machines may differ."""
    found = record.first_nonfinite
    assert found is not None
    return found.step, found.epoch, found.at


def _empty(case: Case) -> Iterator[Finding]:
    empty = {
        f.rank: sum(loader.empty_batches for loader in f.record.loaders)
        for f in case
        if any(loader.empty_batches for loader in f.record.loaders)
    }
    if empty:
        said = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(empty.items())[:8])
        yield Finding(
            code="empty-batches",
            severity=Severity.WRONG,
            title=f"{named(empty)} got empty batches ({said})",
            ranks=tuple(empty),
            cause="A mean over nothing is NaN, and a batch of 0 samples counts as a step.",
            fix="filter before batching; let the collate function never return an empty batch",
        )
