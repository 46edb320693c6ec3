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

from miniray.doctor.facts import Case
from miniray.doctor.model import Event, Site

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
