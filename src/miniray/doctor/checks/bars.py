"""Progress bars where they do harm: between two barriers. (P1)"""

from __future__ import annotations

from collections.abc import Iterator

from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding, Severity
from miniray.doctor.model import BAR, BARRIER, COLLECTIVE, Event

_BARRIERS = ("barrier", "monitored_barrier")
FIX = "make the bar on rank 0 only, after the last barrier before the loop"


def check(case: Case) -> Iterator[Finding]:
    for facts in case:
        bar = between_barriers(facts.record.events)
        if bar is None:
            continue
        yield Finding(
            code="bar-between-barriers",
            severity=Severity.NOTE,
            title=f"rank {facts.rank} makes a progress bar between two barriers ({bar.site})",
            ranks=(facts.rank,),
            cause="tqdm takes a lock and writes to the terminal; should that block, all ranks "
            "hang at the second barrier.",
            fix=FIX,
            site=bar.site,
        )
        return


def between_barriers(events: tuple[Event, ...]) -> Event | None:
    """A bar with a barrier before and after it, and no step in between."""
    before: Event | None = None
    bar: Event | None = None
    for event in events:
        if is_barrier(event):
            if before is not None and bar is not None and before.step == event.step:
                return bar
            before, bar = event, None
        elif event.kind == BAR and before is not None:
            bar = event
    return None


def is_barrier(event: Event) -> bool:
    return event.kind == BARRIER or (event.kind == COLLECTIVE and event.name in _BARRIERS)
