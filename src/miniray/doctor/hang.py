"""A run that does not move: who waits for whom, and who is to blame.

Each waiting rank waits for the ranks of its group that have not come to the same place. Those of
them that do not wait themselves hold everybody up (``absent``); if all wait, they wait crosswise,
and the first place where their ways part is the fault (``crossed``). Where one of them has raised
an exception that does not get out, that is why. A rank that is slow and alive is not called hung
before the limit.

With gloo a rank waits inside of the call. With NCCL the call only hands the collective to the GPU
and returns: the rank goes on until it needs a result, and waits there, in code that looks innocent.
Then the ranks are compared by how many collectives they have handed over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from miniray.doctor import collectives, in_flight
from miniray.doctor.absent import explain_absent, explain_idle
from miniray.doctor.crossed import explain_crossed
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, positions, shortened, waiting_clause
from miniray.doctor.model import POINT_TO_POINT
from miniray.doctor.waiting import GRADIENTS, NAMED_BARRIERS, START, Wait, wait_for

#: Seconds a wait must have lasted where the records alone prove that it can never end.
_PROVEN = 1.0


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
    if not _is_stuck(case, waiting, awaited):
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
        step=facts.record.global_step,
        site=site,
    )


def on_gpu(case: Case) -> Case:
    """The case with the waits of ranks whose GPU waits; unchanged where a rank waits by itself."""
    live = case.live
    if not live or any(f.wait is not None or f.moved or f.idle < case.limit for f in live):
        return case
    if not any("nccl" in f.record.backend for f in live):
        return case
    found = dict(case.ranks)
    for group, members in case.members.items():
        calls = {
            rank: {event.sequence: event for event in case.ranks[rank].record.collectives(group)}
            for rank in members
            if rank in case.ranks
        }
        fewest = min((max(made, default=-1) for made in calls.values()), default=-1)
        for rank, made in calls.items():
            event = made.get(fewest + 1)  # the first one that not all have handed over
            if event is not None and found[rank].wait is None:
                found[rank] = dataclasses.replace(
                    found[rank], wait=wait_for(event, found[rank].record)
                )
    return dataclasses.replace(case, ranks=found)


def in_backward(case: Case) -> Case:
    """The case with the waits of ranks that a compiled DDP model keeps in backward.

    Its forward runs past the recorder, so the backward is not known to be a collective. A rank that
    sleeps in the engine of autograd itself, with none of anybody's code below, waits for the others
    there.
    """
    found = dict(case.ranks)
    for facts in case.live:
        record = facts.record
        asleep = not facts.moved and not facts.computes and facts.idle >= case.limit
        inside = bool(facts.stack) and facts.stack[0].function == "_engine_run_backward"
        if facts.wait is None and record.models and asleep and inside:
            made = [event for event in record.collectives() if event.name.startswith("DDP.")]
            group = made[-1].group if made else "default"
            number = max((event.sequence for event in record.collectives(group)), default=-1) + 1
            wait = Wait(group, number, GRADIENTS, record.phase.site, record.phase.since)
            found[facts.rank] = dataclasses.replace(facts, wait=wait)
    return dataclasses.replace(case, ranks=found)


def awaited_by(case: Case, facts: Facts) -> set[int]:
    """Ranks that have not come to where ``facts`` waits."""
    wait = facts.waits_in
    others = set(case.world) - {facts.rank}
    if wait.event is not None and wait.event.kind == POINT_TO_POINT:
        peer = "".join(c for c in wait.event.op if c.isdigit())
        return {int(peer)} if peer else others
    if wait.group in case.members:
        others &= case.members[wait.group]
    return {rank for rank in others if not _has_come(case.ranks.get(rank), wait)}


def _has_come(other: Facts | None, wait: Wait) -> bool:
    if other is None:
        return False
    record = other.record
    same = other.wait is not None and other.wait.group == wait.group
    if wait.group == START:
        return record.initialised or (same and other.wait_name == wait.name)
    if wait.group == NAMED_BARRIERS:
        barrier = record.barrier
        if barrier is None or barrier.number < wait.sequence:
            return False
        return barrier.number > wait.sequence or barrier.name == wait.name
    calls = {event.sequence: event for event in record.collectives(wait.group)}
    if wait.sequence in calls and wait.event is not None:
        there = calls[wait.sequence]
        return collectives.signature(there) == collectives.signature(wait.event)
    return max(calls, default=-1) > wait.sequence


def _is_stuck(case: Case, waiting: Sequence[Facts], awaited: Mapping[int, set[int]]) -> bool:
    for facts in waiting:
        wait = facts.waits_in
        if facts.ended and not case.interrupted:
            return True  # it gave up waiting, or was made to
        waited = facts.until - wait.since
        needed = _PROVEN if _is_proven(case, facts, awaited) else case.limit
        if waited >= needed and not any(other.moved for other in case.live):
            return True
    return False


def _is_proven(case: Case, facts: Facts, awaited: Mapping[int, set[int]]) -> bool:
    """Whether what it waits for can no longer happen."""
    if case.joined:
        return False
    for rank in awaited[facts.rank]:
        other = case.ranks.get(rank)
        if other is None:
            continue  # it may be about to start
        ended = other.ended and not case.interrupted  # Ctrl-C ended them all: that proves nothing
        if ended or (other.record.process.stopped and other.idle >= _PROVEN):
            return True  # a stopped one comes when somebody continues it, which nobody may do
        theirs = other.wait
        if theirs is not None and facts.rank in awaited[rank]:
            return True
    return False
