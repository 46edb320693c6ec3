"""A finding: something that is wrong with a run, with its evidence, its cause and what to do.

And the words for it, shared by those who explain: about numbers, and about ranks that wait.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from miniray.doctor.model import NOWHERE, Site

if TYPE_CHECKING:
    from miniray.doctor.facts import Facts
    from miniray.doctor.waiting import Wait


class Severity(enum.IntEnum):
    """How bad it is. Notes are worth knowing and say nothing against the run."""

    NOTE = 0
    SLOW = 1  #: right, but wasteful
    WRONG = 2  #: it runs on and its result is not what was meant
    STUCK = 3  #: it will never go on
    FAILED = 4  #: a rank has ended that should not have

    @property
    def word(self) -> str:
        return self.name

    @property
    def ends_run(self) -> bool:
        return self >= Severity.STUCK


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong. ``title`` is a whole sentence a user can act on by itself.

    Attributes:
        code: stable name of the kind of finding, for programs.
        ranks: the ranks it is about: for a hang those that must be looked at, not those that wait.
        evidence: what was recorded, a line each, with rank, step, file:line and numbers.
        explains: codes of findings that are consequences of this one and are not shown beside it.
    """

    code: str
    severity: Severity
    title: str
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    cause: str = ""
    fix: str = ""
    step: int | None = None
    site: Site = NOWHERE
    explains: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "severity": self.severity.word.lower(),
            "title": self.title,
            "ranks": list(self.ranks),
            "step": self.step,
            "site": str(self.site) if self.site.file else "",
            "evidence": list(self.evidence),
            "cause": self.cause,
            "fix": self.fix,
        }


def by_weight(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first, one of each kind, without those that another one explains."""
    every = list(findings)
    hidden = frozenset[str]().union(*(finding.explains for finding in every))
    kept: dict[str, Finding] = {}
    for finding in sorted(every, key=lambda finding: -finding.severity):
        if finding.code not in hidden:
            kept.setdefault(finding.code, finding)
    return tuple(kept.values())


def numbers(ranks: Iterable[int]) -> str:
    """``0``, ``1–3``, ``0, 2 and 5``"""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts: list[str] = []
    for run in runs:
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return listed(parts)


def named(ranks: Iterable[int]) -> str:
    """``rank 1``, ``ranks 1–3``; "no rank" for none."""
    every = sorted(set(ranks))
    if not every:
        return "no rank"
    return f"rank{'' if len(every) == 1 else 's'} {numbers(every)}"


def is_or_are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def listed(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]]) if len(parts) > 1 else "".join(parts)


def plural(count: int, word: str) -> str:
    return (
        f"{count} {word}" if count == 1 else f"{count} {word}{'es' if word[-2:] == 'ch' else 's'}"
    )


def shortened(text: str, limit: int = 100) -> str:
    return text if len(text) <= limit else text[: limit - 2].rstrip() + " …"


def seconds(value: float) -> str:
    """``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``"""
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def size(count: float) -> str:
    """``40 kB``, ``512 MB``, ``1.5 GB``"""
    if 0 < count < 1e6:
        return f"{count / 1e3:.0f} kB"
    if count < 1e9:
        return f"{count / 1e6:.0f} MB"
    return f"{count / 1e9:.1f} GB"


def plain(value: float | None) -> float | str | None:
    """JSON has no NaN: the words are those of ``metrics.jsonl``."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# -- ranks and what they wait for ----------------------------------------------------------------


def position(facts: Facts, party: Iterable[Facts] | None = None) -> str:
    ranks = [f.rank for f in party] if party is not None else [facts.rank]
    return (
        f"{named(ranks)}: step {facts.record.global_step}, {conjugated(facts.doing(), len(ranks))}"
    )


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
