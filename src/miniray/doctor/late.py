"""Ranks that came after the others had given up: a call may wait no longer than its group's limit.

What torch says of it is "timed out" on one side and "connection closed" on the other, and of where
the late one was in the meantime nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from miniray.doctor.facts import Facts
from miniray.doctor.findings import Finding, Severity, named, seconds
from miniray.doctor.waiting import NAMED_BARRIERS, in_words
from miniray.doctor.words import they, wait_of

FIX = "where it may take that long, init_process_group(timeout=timedelta(...))"
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


def explain(waiting: Sequence[Facts]) -> Finding | None:
    """All made the same call; was one of them through with it before another had begun?"""
    left = [(at, f) for f in waiting if (at := _gave_up(f)) is not None]
    if not left:
        return None
    at, first = min(left, key=lambda pair: pair[0])
    late = [f for f in waiting if wait_of([f]).since > at]
    if not late:
        return None
    wait, waited = wait_of(late), at - wait_of([first]).since
    others = [f.rank for f in waiting if f not in late]
    return Finding(
        code="came-late",
        severity=Severity.FAILED,
        title=f"{named(f.rank for f in late)} came to {wait.short()} {seconds(wait.since - at)} "
        f"after {named(others)} had given up waiting there ({seconds(waited)})",
        ranks=tuple(f.rank for f in late),
        evidence=tuple(_before(f) for f in late[:3]),
        cause="A call that waits for longer than the process group's time limit fails. The late "
        "rank was busy with something else until then: saving, validating, preparing data.",
        fix=f"do such work on all ranks, or where the others do not wait; {FIX}",
        step=late[0].record.step,
        site=wait.site,
    )


def told(waiting: Sequence[Facts]) -> tuple[str, ...]:
    """Of those that wait for another one: who has had enough of it."""
    gone = [f for f in waiting if _gave_up(f) is not None and wait_of([f]).group != NAMED_BARRIERS]
    if not gone:
        return ()
    waited = seconds(gone[0].until - wait_of(gone).since)
    return (they(f"gave up after {waited}: the process group's time limit", gone),)


def _gave_up(facts: Facts) -> float | None:
    """When a rank's call ended with a time-out."""
    ended, wait = facts.record.exit, facts.wait
    if ended is None or ended.by_launcher or not _TIMED_OUT.search(ended.message):
        return None
    return wait.event.ended if wait is not None and wait.event is not None else ended.at


def _before(facts: Facts) -> str:
    """How long the rank was at something that is not recorded, and after what."""
    since = wait_of([facts]).since
    past = [e for e in facts.record.events if (e.ended or e.at) < since]
    begun = max([facts.record.attached, *(e.ended or e.at for e in past)])
    after = f"after {in_words(past[-1])}" if past else "since its start"
    return f"rank {facts.rank}: {seconds(since - begun)} of its own {after}"
