"""Who keeps the others waiting: rank, factor, since which step, in data or in compute.

In DDP all ranks take the same time for a step, because the fast ones wait in backward. What tells
them apart is their *own* time: waiting for data plus their own code, with the shortest backward of
all ranks added as the cost of a backward without waiting.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from miniray.doctor.facts import Case
from miniray.doctor.model import Steps

#: A straggler takes at least this many times the median of the others ...
_FACTOR = 1.5
#: ... and this much longer: a tenth of a step and 2 ms, so that jitter of tiny steps is not one ...
_SHARE, _LEAST = 0.10, 0.002
#: ... over at least this many of the newest steps.
_STEPS = 10


@dataclasses.dataclass(frozen=True)
class Straggler:
    """``own`` and ``others`` are seconds a step; ``where`` is "data" or "compute"."""

    rank: int
    factor: float
    since: int
    where: str
    own: float
    others: float
    data: float
    steps: int


def find(case: Case) -> Straggler | None:
    """The slowest rank, if it is that much slower; None where all are alike or too few steps."""
    if len(case.ranks) < 2:
        return None
    by_rank = {f.rank: {s.step: s for s in f.record.steps if s.seconds > 0} for f in case}
    common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    if len(common) < _STEPS:
        return None
    cheapest = [min(steps[n].backward for steps in by_rank.values()) for n in common]
    own = {
        rank: [
            steps[n].data + steps[n].compute + backward
            for n, backward in zip(common, cheapest, strict=True)
        ]
        for rank, steps in by_rank.items()
    }
    slowest = max(own, key=lambda rank: statistics.median(own[rank][-_STEPS:]))
    return _judge(slowest, own, by_rank, common)


def _judge(
    rank: int,
    own: Mapping[int, Sequence[float]],
    by_rank: Mapping[int, Mapping[int, Steps]],
    common: Sequence[int],
) -> Straggler | None:
    others = [
        statistics.median(o[i] for r, o in own.items() if r != rank) for i in range(len(common))
    ]
    mine = own[rank]
    begin = _begin(mine, others)
    steps = len(common) - begin
    if steps < _STEPS:
        return None
    # Medians: one slow step (a checkpoint, a pause) makes no straggler.
    a, b = statistics.median(mine[begin:]), statistics.median(others[begin:])
    step = statistics.median(by_rank[rank][n].seconds for n in common[begin:])
    if a < _FACTOR * b or a - b < max(_LEAST, _SHARE * step):
        return None
    data = statistics.median(by_rank[rank][n].data for n in common[begin:])
    others_data = statistics.median(
        steps_of[n].data for r, steps_of in by_rank.items() if r != rank for n in common[begin:]
    )
    where = "data" if data - others_data > (a - b) / 2 else "compute"
    first = common[begin] if begin or common[0] > 1 else 1
    return Straggler(rank, a / b if b else float("inf"), first, where, a, b, data, steps)


def _begin(mine: Sequence[float], others: Sequence[float]) -> int:
    """Index from which on, to the end, slow steps most outnumber the others.

    So a step that is not slow here and there, on a noisy machine, does not move the beginning.
    """
    begin, best, score = len(mine), 0, 0
    for index in range(len(mine) - 1, -1, -1):
        score += 1 if mine[index] > _FACTOR * others[index] else -1
        if score > best:
            best, begin = score, index
    return begin
