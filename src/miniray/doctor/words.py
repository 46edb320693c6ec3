"""Words about ranks and what they wait for, shared by those who explain hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from miniray.doctor.facts import Facts
from miniray.doctor.findings import is_or_are, listed, named, plural
from miniray.doctor.waiting import Wait


def position(facts: Facts, party: Iterable[Facts] | None = None) -> str:
    ranks = [f.rank for f in party] if party is not None else [facts.rank]
    return f"{named(ranks)}: step {facts.record.step}, {conjugated(facts.doing(), len(ranks))}"


def conjugated(clause: str, count: int) -> str:
    """A clause that was written for one rank, for ``count`` of them."""
    verb, _, rest = clause.partition(" ")
    return f"{_PLURALS.get(verb, verb)} {rest}" if count > 1 else clause


_PLURALS = {"is": "are", "waits": "wait", "has": "have"}


def positions(several: Iterable[Facts], most: int = 4) -> list[str]:
    """``position`` of each, ranks that are in one place together."""
    parties: dict[tuple[object, ...], list[Facts]] = {}
    for facts in several:
        where: object = facts.wait.describe() if facts.wait is not None else facts.rank
        where = "the end" if facts.wait is None and facts.ended else where
        parties.setdefault((where, facts.record.step), []).append(facts)
    return [position(party[0], party) for party in list(parties.values())[:most]]


def waiting_clause(waiting: Sequence[Facts]) -> str:
    by_place: dict[str, list[Facts]] = {}
    for facts in waiting:
        assert facts.wait is not None
        by_place.setdefault(facts.wait.short(), []).append(facts)
    parts = []
    for place, party in by_place.items():
        ranks = [f.rank for f in party]
        ended = all(f.ended for f in party)
        verb = "waited" if ended else "waits" if len(ranks) == 1 else "wait"
        parts.append(f"{named(ranks)} {verb} in {place}")
    return listed(parts[:3]) + (f" and {plural(len(parts) - 3, 'other place')}" * (len(parts) > 3))


def spot(wait: Wait) -> str:
    """``all_gather (train.py:9)``"""
    return f"{wait.word} ({wait.site})" if wait.site.file else wait.word


def now_at(party: Sequence[Facts]) -> str:
    ranks = [f.rank for f in party]
    return f"{named(ranks)} {is_or_are(ranks)} in {spot(wait_of(party))}"


def wait_of(party: Sequence[Facts]) -> Wait:
    wait = party[0].wait
    assert wait is not None
    return wait


def name_of(wait: Wait | None) -> str:
    return wait.name if wait is not None else ""
