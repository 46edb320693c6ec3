"""Ranks that all wait, for each other: where did their ways part, and which one strayed?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from miniray.doctor import collectives, loop
from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import (
    BUFFERS_STORY,
    Finding,
    Severity,
    listed,
    named,
    now_at,
    position,
    positions,
    seconds,
    spot,
    they,
)
from miniray.doctor.model import POINT_TO_POINT, Event
from miniray.doctor.waiting import BUFFERS, GRADIENTS, NAMED_BARRIERS, in_words

_Classes = Mapping[tuple[str, int, str], Sequence[Facts]]


LATE_FIX = "where it may take that long, init_process_group(timeout=timedelta(...))"
_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


def explain_crossed(case: Case, waiting: Sequence[Facts]) -> Finding:
    classes: dict[tuple[str, int, str], list[Facts]] = {}
    for facts in waiting:
        assert facts.wait is not None
        classes.setdefault((*facts.wait.key[:2], facts.wait.name), []).append(facts)
    divergence = collectives.first_divergence(case)
    if len(classes) == 1 and divergence is None:
        return _came_late(waiting) or _does_not_complete(waiting)
    story = loop.explain(waiting, [f for f in waiting if _in_step(f)])
    story = story or collectives.explain_unsynced(waiting, waiting)
    if story is not None:
        return story
    if divergence is not None and (len(classes) == 1 or _came_before(divergence, waiting)):
        return from_divergence(divergence, Severity.STUCK)
    return _parted(case, classes)


def _in_step(facts: Facts) -> bool:
    """Whether it waits in a step of its training. FSDP's calls are like any others."""
    progress = loop.progress(facts)
    inside = progress is not None and progress.inside
    return inside or facts.wait_name in (GRADIENTS, BUFFERS)


def _came_before(divergence: collectives.Divergence, waiting: Sequence[Facts]) -> bool:
    """Whether calls that do not match were made before those in which the ranks wait now."""
    open_now = {(f.rank, f.waits_in.event) for f in waiting}
    mismatch = divergence.kind == collectives.CALL
    return mismatch and not open_now.issuperset(divergence.calls.items())


def _parted(case: Case, classes: _Classes) -> Finding:
    """Ranks are in different places, each waiting for the others."""
    odd = _odd_class(case, classes)
    parties = sorted(classes.values(), key=lambda fs: (fs is not odd, len(fs), fs[0].rank))
    first, rest = parties[0], [f for party in parties[1:] for f in party]
    # Of a group of some ranks it takes its members to see who strayed; others only wait for them.
    inside = case.members.get(first[0].waits_in.group, case.world)
    members = [f for f in rest if f.rank in inside] or rest
    strayed = first if odd is not None and len(members) == len(rest) else [*first, *members]
    cause, fix = _why_parted(parties)
    return Finding(
        code="collectives-parted",
        severity=Severity.STUCK,
        title=_parted_title(parties, members),
        ranks=tuple(sorted(f.rank for f in strayed)),
        evidence=tuple(position(party[0], party) for party in parties),
        cause=cause,
        fix=fix,
        step=first[0].record.step,
        site=first[0].waits_in.site,
    )


def _parted_title(parties: Sequence[Sequence[Facts]], missing: Sequence[Facts]) -> str:
    """``missing`` are the members of the group in which the first party waits."""
    first = parties[0]
    wait = first[0].waits_in
    others = listed([now_at(party) for party in parties[1:]])
    if _in_other_groups(parties):
        theirs = parties[1][0].waits_in
        return f"{now_at(first)} of group {wait.group}, {others} of group {theirs.group}"
    if wait.group == NAMED_BARRIERS or wait.name in ("barrier", "monitored_barrier"):
        waits = they(f"is waiting in {spot(wait)}", first)
        have = "hadn't" if all(f.ended for f in missing) else "haven't"
        have = have if have == "hadn't" or len(missing) > 1 else "hasn't"
        elsewhere = others if len(parties) > 2 else now_at(missing)
        return f"{waits[0].upper()}{waits[1:]}; {elsewhere} and {have} reached it"
    if any(party[0].waits_in.name == BUFFERS for party in parties) or _is_message(parties):
        return f"{now_at(first)}, {others}"
    of = f"{len(first)} of {len(first) + len(missing)} ranks"
    if len(missing) < sum(map(len, parties[1:])):
        of += f" of group {wait.group}"
    return f"{spot(wait)} called by {of} ({named(f.rank for f in first)}); {others}"


def _is_message(parties: Sequence[Sequence[Facts]]) -> bool:
    """Whether any of them sends to, or waits for a message of, one rank."""
    events = [party[0].waits_in.event for party in parties]
    return any(event is not None and event.kind == POINT_TO_POINT for event in events)


def _in_other_groups(parties: Sequence[Sequence[Facts]]) -> bool:
    """Whether all make the same call, and differ only in the process group."""
    waits = [party[0].waits_in for party in parties]
    return len({wait.name for wait in waits}) == 1 and len({wait.group for wait in waits}) > 1


def _odd_class(case: Case, classes: _Classes) -> Sequence[Facts] | None:
    """The party that strayed: the smallest; of equal ones that whose line no other rank ran."""
    by_size = sorted(classes.values(), key=len)
    if len(by_size) == 1 or len(by_size[0]) < len(by_size[1]):
        return by_size[0]
    equals = [party for party in by_size if len(party) == len(by_size[0])]
    strangers = []
    for party in equals:
        wait = party[0].wait
        assert wait is not None
        others = [f for f in case if f not in party]
        seen = any(event.site == wait.site for f in others for event in f.record.events)
        if wait.site.file and not seen and wait.name != GRADIENTS:
            strangers.append(party)
    if len(strangers) == 1:
        return strangers[0]
    buffers = [p for p in equals if p[0].wait_name == BUFFERS]
    return buffers[0] if len(buffers) == 1 else None


def _why_parted(parties: Sequence[Sequence[Facts]]) -> tuple[str, str]:
    if any(party[0].waits_in.name == BUFFERS for party in parties):
        return BUFFERS_STORY
    if _is_message(parties):
        return (
            "A send and its recv must meet. Each of these ranks waits for one that is in another "
            "call, or that would only send after it has received.",
            "let one of two ranks send while the other receives, in one order; or isend and irecv",
        )
    if _in_other_groups(parties):
        return (
            "The same call, but in different process groups: each group waits for members that "
            "are busy in the other.",
            "pass the same group= on all of its ranks, and use groups in one order everywhere",
        )
    words = {party[0].waits_in.word for party in parties}
    calls = words - {"backward"}
    passes = {f.record.loaders and f.record.loaders[0].passes for p in parties for f in p}
    if len(calls) == 1 < len(words) and (passes == {()} or len(passes) > 1):
        return (
            "DDP runs a collective in every backward, so all ranks must make the same calls in "
            "the same order. Here the ranks run different numbers of steps, or only some ranks "
            f"reach the {(call := calls.pop())}.",
            f"Move the {call} out of the branch, or run the same number of steps on every rank.",
        )
    return (
        "Ranks took different branches: a collective or barrier runs under `if rank == 0`, or in "
        "code that only some ranks run.",
        "Move the call out of the branch, so that every rank of the group makes it in the same "
        "order.",
    )


def from_divergence(divergence: collectives.Divergence, severity: Severity) -> Finding:
    """Ranks whose n-th calls do not match, or came in swapped order."""
    parties = divergence.parties()
    ranks = divergence.odd or tuple(sorted(divergence.calls))
    said = "; ".join(f"{named(who)} {in_words(call)}" for who, call in parties)
    step = min(event.step for event in divergence.calls.values())
    if divergence.kind == collectives.ORDER:
        title = f"{named(ranks)} called collectives in another order at step {step}: {said}"
        cause = (
            "The calls match in shape, so nothing hangs and nothing complains: each rank gets the "
            "result of the other's line. Results are wrong."
        )
        fix = "make all ranks call them in one order"
    else:
        title = f"collectives do not match at step {step}: {said}"
        cause = "All ranks of a group must make the same calls with the same shapes, in one order."
        fix = _same_what(list(divergence.calls.values()))
        if any(event.name == "new_group" for event in divergence.calls.values()):
            cause = "Every rank must call new_group for every group, members or not, in one order."
            fix = "make all groups on all ranks, and let each rank keep the one it is in"
    return Finding(
        code="collectives-swapped" if divergence.kind == collectives.ORDER else "mismatch",
        severity=severity,
        title=title,
        ranks=ranks,
        evidence=(_divergence_line(divergence),),
        cause=cause,
        fix=fix,
        step=step,
        site=parties[0][1].site,
    )


def _same_what(calls: Sequence[Event]) -> str:
    """What to make equal: the first thing in which calls of one group differ."""
    if len({call.name for call in calls}) > 1:
        return "compare the two lines: which branch differs between ranks?"
    words = {word.partition("=")[0] for call in calls for word in call.op.split()}
    if len({call.op for call in calls}) > 1:
        said = listed(sorted(f"{word}=" for word in words if word.islower())) or "op="
        return f"pass the same {said} on all ranks"
    if len({call.dtype for call in calls}) > 1:
        return "give it the same dtype on all ranks: tensor.to(torch.float32), say"
    return "make the sizes equal: pad to the largest, which ranks exchange first; or use objects"


def _divergence_line(divergence: collectives.Divergence) -> str:
    return f"call {divergence.sequence + 1} of group {divergence.group}, counted on each rank"


def _does_not_complete(waiting: Sequence[Facts]) -> Finding:
    wait = waiting[0].waits_in
    ranks = tuple(f.rank for f in waiting)
    if _is_message([waiting]):
        code, title = "collectives-parted", they(f"waits for each other in {spot(wait)}", waiting)
        cause, fix = _why_parted([waiting])
    else:
        code = "does-not-complete"
        now = "were" if waiting[0].ended else "are"
        title = f"all ranks {now} in {wait.short()} and it does not complete"
        cause = (
            "All ranks made the same call. What is left is below Python: the network, NCCL, a GPU, "
            "or parameters that got no gradient on one rank."
        )
        fix = "check the network between hosts, NCCL_DEBUG=INFO, and find_unused_parameters=True"
    return Finding(
        code=code,
        severity=Severity.STUCK,
        title=title,
        ranks=ranks,
        evidence=tuple(positions(waiting)),
        cause=cause,
        fix=fix,
        step=min(f.record.step for f in waiting),
        site=wait.site,
    )


# -- too late -------------------------------------------------------------------------------------


def _came_late(waiting: Sequence[Facts]) -> Finding | None:
    """All made the same call; was one of them through with it before another had begun?"""
    left = [(at, f) for f in waiting if (at := _gave_up(f)) is not None]
    if not left:
        return None
    at, first = min(left, key=lambda pair: pair[0])
    late = [f for f in waiting if f.waits_in.since > at]
    if not late:
        return None
    wait, waited = late[0].waits_in, at - first.waits_in.since
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
        fix=f"do such work on all ranks, or where the others do not wait; {LATE_FIX}",
        step=late[0].record.step,
        site=wait.site,
    )


def gave_up(waiting: Sequence[Facts]) -> tuple[str, ...]:
    """Of those that wait for another one: who has had enough of it."""
    gone = [f for f in waiting if _gave_up(f) is not None and f.waits_in.group != NAMED_BARRIERS]
    if not gone:
        return ()
    waited = seconds(gone[0].until - gone[0].waits_in.since)
    return (they(f"gave up after {waited}: the process group's time limit", gone),)


def _gave_up(facts: Facts) -> float | None:
    """When a rank's call ended with a time-out."""
    ended, wait = facts.record.exit, facts.wait
    if ended is None or ended.by_launcher or not _TIMED_OUT.search(ended.message):
        return None
    return wait.event.ended if wait is not None and wait.event is not None else ended.at


def _before(facts: Facts) -> str:
    """How long the rank was at something that is not recorded, and after what."""
    since = facts.waits_in.since
    past = [e for e in facts.record.events if (e.ended or e.at) < since]
    begun = max([facts.record.attached, *(e.ended or e.at for e in past)])
    after = f"after {in_words(past[-1])}" if past else "since its start"
    return f"rank {facts.rank}: {seconds(since - begun)} of its own {after}"
