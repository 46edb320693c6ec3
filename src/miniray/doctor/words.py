"""Words about ranks and what they wait for, shared by those who explain hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from miniray.doctor.facts import Facts
from miniray.doctor.findings import listed, named, plural
from miniray.doctor.waiting import Wait


def position(facts: Facts, party: Iterable[Facts] | None = None) -> str:
    ranks = [f.rank for f in party] if party is not None else [facts.rank]
    return f"{named(ranks)}: step {facts.record.step}, {conjugated(facts.doing(), len(ranks))}"


def conjugated(clause: str, count: int, past: bool = False) -> str:
    """A clause that was written for one rank that lives, for ``count`` of them."""
    verb, _, rest = clause.partition(" ")
    verb = _PAST.get(verb, verb) if past else verb
    return f"{_PLURALS.get(verb, verb) if count > 1 else verb} {rest}"


_PAST = {"is": "was", "waits": "waited", "goes": "went"}
_PLURALS = {"is": "are", "was": "were", "waits": "wait", "has": "have"}


def they(clause: str, party: Sequence[Facts]) -> str:
    """``ranks 1 and 2 wait in …``; in the past where all of them have ended."""
    past = all(facts.ended for facts in party)
    return f"{named(f.rank for f in party)} {conjugated(clause, len(party), past)}"


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
        by_place.setdefault(facts.waits_in.short(), []).append(facts)
    parts = [they(f"waits in {place}", party) for place, party in by_place.items()]
    return listed(parts[:3]) + (f" and {plural(len(parts) - 3, 'other place')}" * (len(parts) > 3))


def spot(wait: Wait) -> str:
    """``all_gather (train.py:9)``"""
    return f"{wait.word} ({wait.site})" if wait.site.file else wait.word


def now_at(party: Sequence[Facts]) -> str:
    return they(f"is in {spot(party[0].waits_in)}", party)


#: Cause and fix of a forward that not all ranks call.
BUFFERS_STORY = (
    "The forward of a DDP model exchanges its buffers (BatchNorm statistics): all ranks must call "
    "it. Validation on one rank must not go through the wrapper.",
    "call model.module(x) there, or validate on all ranks",
)
