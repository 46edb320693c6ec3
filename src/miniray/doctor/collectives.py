"""Ranks compared by their sequences of collectives: where is the first one they do not share?

All ranks of a group must call the same collectives in the same order. The n-th call of one rank
meets the n-th call of every other, whatever those are, so records are laid side by side by number:

- another operation, reduction, dtype or size at one number is a divergence in itself;
- equal calls from *different lines* are not, for ranks may rightly reach one collective by
  different branches. Only the same lines in another order mean that two were swapped.

Under ``Join`` a rank that is out of data answers for itself, unseen: numbers mean nothing then.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, plural, position
from miniray.doctor.model import Event, Site
from miniray.doctor.waiting import GRADIENTS

#: Collectives that need tensors of one size on all ranks. Others may rightly differ in it.
_SAME_SIZE = {
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
}
#: How far apart swapped calls may lie.
_WINDOW = 32

CALL, ORDER = "call", "order"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first number at which the ranks of a group did not do the same.

    ``kind`` is ``call`` (the calls do not match) or ``order`` (they match, from swapped lines).
    ``odd`` are the ranks that differ from the rest: the fewer, or, between two, the one whose call
    no other rank ever made; empty where nothing tells them apart.
    """

    kind: str
    group: str
    sequence: int
    calls: Mapping[int, Event]
    odd: tuple[int, ...]

    @property
    def at(self) -> float:
        return min(event.at for event in self.calls.values())

    def parties(self) -> list[tuple[tuple[int, ...], Event]]:
        """(ranks, what they called), the odd ones first."""
        found: dict[tuple[object, ...], list[int]] = {}
        for rank, event in sorted(self.calls.items()):
            found.setdefault((signature(event), event.site), []).append(rank)
        every = [(tuple(ranks), self.calls[ranks[0]]) for ranks in found.values()]
        return sorted(every, key=lambda item: (item[0][0] not in self.odd, len(item[0]), item[0]))


def signature(event: Event) -> tuple[object, ...]:
    """What must be equal on all ranks. (4,) and (2, 2) are: only the number of elements counts."""
    if event.name not in _SAME_SIZE:
        return event.name, event.op
    return event.name, event.op, event.dtype, math.prod(event.shape)


def first_divergence(case: Case) -> Divergence | None:
    """The earliest one of all groups; calls that do not match before those merely swapped."""
    if case.joined:
        return None
    found = [d for group in case.members for d in (_of_group(case, group),) if d is not None]
    return min(found, key=lambda d: (d.kind != CALL, d.at), default=None)


def sequences(case: Case, group: str) -> dict[int, dict[int, Event]]:
    """Rank → number → call, as far as the rings still have them."""
    found = {}
    for facts in case:
        calls = {event.sequence: event for event in facts.record.collectives(group)}
        if calls:
            found[facts.rank] = calls
    return found


def _of_group(case: Case, group: str) -> Divergence | None:
    by_rank = sequences(case, group)
    if len(by_rank) < 2:
        return None
    for number in sorted(set().union(*by_rank.values())):
        calls = {rank: events[number] for rank, events in by_rank.items() if number in events}
        if len(calls) > 1 and len({signature(event) for event in calls.values()}) > 1:
            keys = {rank: signature(event) for rank, event in calls.items()}
            return Divergence(CALL, group, number, calls, _odd(by_rank, keys, calls))
    return _swapped(by_rank, group)


def _odd(
    by_rank: Mapping[int, Mapping[int, Event]],
    keys: Mapping[int, object],
    calls: Mapping[int, Event],
) -> tuple[int, ...]:
    counts = Counter(keys.values())
    (most, votes), *others = counts.most_common()
    if not others or votes > others[0][1]:
        return tuple(sorted(rank for rank, key in keys.items() if key != most))
    # As many on one side as on the other: a line that only one side ever came to is the odd one.
    strangers = []
    for rank, event in calls.items():
        elsewhere = [
            other.site
            for peer, events in by_rank.items()
            if keys.get(peer) != keys[rank]
            for other in events.values()
        ]
        if event.site.file and event.site not in elsewhere:
            strangers.append(rank)
    sides = {keys[rank] for rank in strangers}
    return tuple(sorted(strangers)) if len(sides) == 1 else ()


def _swapped(by_rank: Mapping[int, Mapping[int, Event]], group: str) -> Divergence | None:
    """Ranks that ran through the same lines in another order than the others."""
    ranks = sorted(by_rank)
    numbers = sorted(set(by_rank[ranks[0]]).intersection(*(by_rank[rank] for rank in ranks[1:])))
    for index, number in enumerate(numbers):
        calls = {rank: by_rank[rank][number] for rank in ranks}
        sites = {rank: event.site for rank, event in calls.items()}
        if len(set(sites.values())) < 2 or not all(site.file for site in sites.values()):
            continue
        window = numbers[index : index + _WINDOW]
        ahead = {rank: [by_rank[rank][n].site for n in window] for rank in ranks}
        first = ranks[0]
        others = [rank for rank in ranks[1:] if _permuted(ahead[first], ahead[rank])]
        if others:
            involved = {rank: calls[rank] for rank in ranks}
            return Divergence(ORDER, group, number, involved, _odd(by_rank, sites, involved))
    return None


def _permuted(one: Sequence[Site], two: Sequence[Site]) -> bool:
    """Whether the two begin with the same lines in another order."""
    if one[0] == two[0] or one[0] not in two or two[0] not in one:
        return False
    return any(Counter(one[:n]) == Counter(two[:n]) for n in range(2, len(one) + 1))


# -- backwards that averaged no gradients ---------------------------------------------------------


def explain_unsynced(suspects: Sequence[Facts], waiting: Sequence[Facts]) -> Finding | None:
    """Why suspects do not come to the backward in which others wait, if they averaged less often.

    DDP averages gradients in every backward but those inside of ``no_sync()`` and those of a model
    that was called past its wrapper. A rank that does so once more than the others is one exchange
    behind from there on, and they wait for it at the end.
    """
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
        step=first.record.global_step if step is None else step,
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
