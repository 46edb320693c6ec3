"""A run that does not move: who waits for whom, and who is to blame.

Each waiting rank waits for the ranks of its group that have not come to the same place. Those of
them that do not wait themselves hold everybody up (``absent``); if all wait, they wait crosswise,
and the first place where their ways part is the fault (``crossed``). A rank that is slow and alive
is not called hung before the limit.
"""

from __future__ import annotations

from miniray.doctor.absent import explain_absent, explain_idle
from miniray.doctor.crossed import explain_crossed
from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding
from miniray.doctor.waits import awaited_by, in_backward, is_stuck, on_gpu


def explain(case: Case) -> Finding | None:
    """What holds the run up; None for one that moves, or may still do so."""
    case = in_backward(on_gpu(case))
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
