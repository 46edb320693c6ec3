"""Backwards that averaged no gradients: as many as the others did, and fewer exchanges.

DDP averages gradients in every backward but those inside of ``no_sync()`` and those of a model that
was called past its wrapper. A rank that does so once more than the others is one exchange behind
from there on, and they wait for it at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from miniray.doctor.facts import Facts
from miniray.doctor.findings import Finding, Severity, named, plural, position
from miniray.doctor.waiting import GRADIENTS


def explain(suspects: Sequence[Facts], waiting: Sequence[Facts]) -> Finding | None:
    """Why suspects do not come to the backward in which others wait, if that is why."""
    ahead = [f for f in waiting if f.wait_name == GRADIENTS]
    guilty = [f for f in suspects if ahead and f not in ahead and _has_done(f, ahead[0])]
    if not guilty:
        return None
    first, other = guilty[0], ahead[0]
    ranks = tuple(f.rank for f in guilty)
    step = _step(first, other)
    if step is not None:
        title = f"did a backward without averaging gradients at step {step}, rank {other.rank} not"
    else:
        title = f"averaged gradients less often than rank {other.rank}"
    return Finding(
        code="no-exchange",
        severity=Severity.STUCK,
        title=f"{named(ranks)} {title}",
        ranks=ranks,
        evidence=tuple(f"{position(f)}; {_counts(f)}" for f in [*guilty[:3], other]),
        cause="DDP averages gradients in a backward unless it is inside of no_sync(), or the model "
        "was called past its wrapper (model.module). All ranks must do so in the same backwards.",
        fix="the same accumulation steps, and the same condition for no_sync(), on all ranks",
        step=first.record.step if step is None else step,
        site=other.place,
    )


def _has_done(facts: Facts, other: Facts) -> bool:
    """Whether it has done the backward in which the other still waits, and not one of its own."""
    mine, theirs = facts.record, other.record
    as_far = mine.batches >= theirs.batches if theirs.batches else mine.step > theirs.step
    return bool(mine.models) and as_far and mine.backwards >= theirs.backwards > 0


def _exchanges(facts: Facts) -> list[int]:
    """The steps of those in the ring."""
    return [event.step for event in facts.record.events if event.name == GRADIENTS]


def _step(facts: Facts, other: Facts) -> int | None:
    """The first step in which it averaged less often than the other, where both rings tell."""
    if any(f.record.event_count > len(f.record.events) for f in (facts, other)):
        return None
    mine, theirs = Counter(_exchanges(facts)), Counter(_exchanges(other))
    done = range(facts.record.step)  # with other numbers of accumulation steps these do not meet
    return next((step + 1 for step in done if mine[step] < theirs[step]), None)


def _counts(facts: Facts) -> str:
    record = facts.record
    said = plural(record.backwards, "backward")
    if record.event_count > len(record.events):
        return said
    return f"{said}, {plural(len(_exchanges(facts)), 'exchange')}"
