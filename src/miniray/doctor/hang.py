"""A run that does not move: who waits for whom, and who is to blame.

Each waiting rank waits for the ranks of its group that have not come to the same place. Those of
them that do not wait themselves hold everybody up (``absent``); if all wait, they wait crosswise,
and the first place where their ways part is the fault (``crossed``). Where one of them has raised
an exception that does not get out, that is why. A rank that is slow and alive is not called hung
before the limit.
"""

from __future__ import annotations

from miniray.doctor import in_flight
from miniray.doctor.absent import explain_absent, explain_idle
from miniray.doctor.crossed import explain_crossed
from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding, Severity, shortened
from miniray.doctor.waits import awaited_by, in_backward, is_stuck, on_gpu
from miniray.doctor.words import positions, waiting_clause


def explain(case: Case) -> Finding | None:
    """What holds the run up; None for one that moves, or may still do so."""
    case = in_backward(on_gpu(case))
    found = _explain(case)
    if found is None or found.code in ("stopped", "holds-gil"):
        return found
    return _raised(case) or found


def _explain(case: Case) -> Finding | None:
    waiting = [facts for facts in case if facts.wait is not None]
    if not waiting:
        return explain_idle(case)
    awaited = {facts.rank: awaited_by(case, facts) for facts in waiting}
    if not is_stuck(case, waiting, awaited):
        return None
    held_up = {facts.rank for facts in waiting}
    guilty = sorted(set().union(*awaited.values()) - held_up)
    if guilty:
        return explain_absent(case, guilty, [f for f in waiting if awaited[f.rank] & set(guilty)])
    return explain_crossed(case, waiting)


def _raised(case: Case) -> Finding | None:
    """The exception that a rank would end by, if what it passes on its way out did not wait."""
    errors = {f.rank: error for f in case if (error := in_flight.raised(f.record)) is not None}
    if not errors:
        return None
    facts = case.ranks[min(errors)]
    said, site = errors[facts.rank]
    others = [f for f in case if f.rank not in errors and f.wait is not None]
    now = facts.doing()
    if facts.wait is not None:
        now = f"{'waited' if facts.ended else 'waits'} in {facts.wait.short()}"
    then = f"; {waiting_clause(others)}" if others else ""
    return Finding(
        code="exception",
        severity=Severity.STUCK,
        title=f"rank {facts.rank} raised {shortened(said)} at {site}, and since then {now}{then}",
        ranks=tuple(sorted(errors)),
        evidence=tuple(positions([case.ranks[rank] for rank in sorted(errors)] + others)),
        cause="The exception does not get out of the script: a `finally`, `__exit__` or `except` "
        "that it passes waits. The others wait for what the exception left out.",
        fix="fix the error at that line; and wait for no other rank where an exception may pass",
        step=facts.record.step,
        site=site,
    )
