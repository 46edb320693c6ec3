"""Cutting a row of layers into stages so that the slowest stage is as quick as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def cut_evenly(
    costs: Sequence[float],
    stages: int,
    fits: Callable[[int, int], bool] = lambda low, high: True,
) -> list[int] | None:
    """How many layers each stage gets, in order, every stage at least one.

    The largest sum of ``costs`` in a stage is as small as possible; of several ways the one with
    the smallest sum of squares, which also evens out the other stages. ``fits(low, high)`` says
    whether layers [low, high) may be one stage. None where there is no way at all.
    """
    count = len(costs)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    impossible = (math.inf, math.inf)
    # best[i]: (largest stage, sum of squares) for the first i layers in the stages so far
    best = [(0.0, 0.0)] + [impossible] * count
    choices: list[list[int]] = []
    for _ in range(stages):
        after = [impossible] * (count + 1)
        chosen = [0] * (count + 1)
        for high in range(1, count + 1):
            for low in range(high):
                if best[low] == impossible or not fits(low, high):
                    continue
                own = total[high] - total[low]
                score = (max(best[low][0], own), best[low][1] + own * own)
                if score < after[high]:
                    after[high], chosen[high] = score, low
        best = after
        choices.append(chosen)
    if best[count] == impossible:
        return None
    sizes = []
    high = count
    for chosen in reversed(choices):
        sizes.append(high - chosen[high])
        high = chosen[high]
    return sizes[::-1]


def even_out(
    costs: Sequence[float],
    sizes: Sequence[int],
    holder: Callable[[int], int],
    fits: Callable[[int, int], bool] = lambda low, high: True,
) -> list[int]:
    """Move layers between neighbouring stages as long as the busiest worker gets less to do.

    For workers with several stages: ``holder(stage)`` is whose it is. Of moves that give the
    busiest worker equally much, the one with the smaller largest stage is made.
    """

    def score(candidate: Sequence[int]) -> tuple[float, float]:
        workers: dict[int, float] = {}
        stages = []
        for stage, (low, high) in enumerate(stage_bounds(candidate)):
            stages.append(sum(costs[low:high]))
            workers[holder(stage)] = workers.get(holder(stage), 0.0) + stages[-1]
        return max(workers.values()), max(stages)

    best = list(sizes)
    while True:
        tries = []
        for giver, size in enumerate(best):
            for taker in (giver - 1, giver + 1):
                if size > 1 and 0 <= taker < len(best):
                    moved = list(best)
                    moved[giver] -= 1
                    moved[taker] += 1
                    if all(fits(low, high) for low, high in stage_bounds(moved)):
                        tries.append(moved)
        better = min(tries, key=score, default=best)
        if not score(better) < score(best):
            return best
        best = better


def stage_bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """[low, high) of the layers of each stage."""
    bounds, low = [], 0
    for size in sizes:
        bounds.append((low, low + size))
        low += size
    return bounds
