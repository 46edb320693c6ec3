"""Divide layers into stages so that the slowest stage is as fast as possible, and print tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from miniray.doctor.findings import plural
from miniray.train.parallel.plan.job import Layout
from miniray.train.parallel.plan.measure import LayerCost
from miniray.train.parallel.plan.schedules import SCHEDULES, Schedule

#: Bytes of weights, gradients and two numbers of the optimizer for each byte of weights.
_TRAINED = 4


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """The stages of a pipeline: the number of layers of each, and their measured costs."""

    sizes: list[int]
    costs: list[LayerCost]
    schedule_name: str
    microbatches: int
    per_worker: int
    places: int

    @property
    def schedule(self) -> Schedule:
        return SCHEDULES[self.schedule_name]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return stage_bounds(self.sizes)

    @property
    def bubble(self) -> float:
        return self.schedule.bubble(self.places, self.microbatches, self.per_worker)

    def holder(self, stage: int) -> int:
        return self.schedule.holder(stage, self.places)

    def mine(self, place: int) -> list[int]:
        return self.schedule.stages_of(place, self.places, self.per_worker)

    def layers_of(self, stage: int) -> str:
        """Return the names of the layers of a stage, such as ``layers 3-5``."""
        low, high = self.bounds[stage]
        names = [cost.name for cost in self.costs[low:high]]
        return f"layer {names[0]}" if len(names) == 1 else f"layers {names[0]}-{names[-1]}"

    def state(self) -> dict[str, Any]:
        """Return the part of the plan that checkpoints contain, so that resumed runs use it."""
        return {"sizes": list(self.sizes), "places": self.places, "per_worker": self.per_worker}

    def table(self) -> str:
        """Return a table of the layers and expected costs of each stage."""
        whole = sum(cost.seconds for cost in self.costs) or 1.0
        rows = []
        for stage, (low, high) in enumerate(self.bounds):
            part = self.costs[low:high]
            seconds = sum(cost.seconds for cost in part)
            kept = self.schedule.in_flight(
                self.holder(stage), self.places, self.microbatches, self.per_worker
            )
            kept = min(kept, self.microbatches)
            rows.append(
                [
                    str(stage),
                    str(self.holder(stage)),
                    self.layers_of(stage),
                    f"{sum(cost.parameters for cost in part):,}",
                    size(sum(cost.parameter_bytes for cost in part)),
                    f"{1000 * seconds:.2f} ms",
                    f"{100 * seconds / whole:.0f} %",
                    size(kept * sum(cost.activations for cost in part)),
                ]
            )
        title = (
            f"pipeline of {len(self.sizes)} stages on {self.places} workers, {self.schedule_name}, "
            f"{self.microbatches} microbatches, bubble {100 * self.bubble:.1f} % if all stages "
            "took equally long"
        )
        head = ["stage", "place", "holds", "parameters", "weights", "a microbatch", "share", "kept"]
        return f"{title}\n{text_table(head, rows)}"


def plan_stages(
    costs: list[LayerCost],
    schedule: Schedule,
    layout: Layout,
    *,
    microbatches: int,
    stages_per_worker: int | None,
    layers_per_stage: Sequence[int] | None,
    memory_limit: float | None,
) -> StagePlan:
    """Cut the layers so that the slowest stage is as quick as possible and all fit into memory.

    ``ValueError`` where there are more stages than layers or nothing fits, with what would.
    """
    per_worker = stages_per_worker or schedule.default
    count = layout.pipeline * per_worker
    if count > len(costs):
        most = len(costs) // per_worker
        layers = plural(len(costs), "layer")
        advice = f"at most {plural(most, 'worker')}" if most else layers
        raise ValueError(
            f"{count} stages ({layout.pipeline} workers × {per_worker} per worker) for "
            f"{layers}: every stage needs at least one layer; {advice} would fit, or a "
            "model in more, smaller layers"
        )
    if layers_per_stage is not None:
        sizes = list(layers_per_stage)
        if len(sizes) != count or sum(sizes) != len(costs) or min(sizes) < 1:
            raise ValueError(
                f"layers_per_stage={sizes} must have {count} numbers >= 1 that add up to "
                f"{len(costs)} layers, but it has {len(sizes)} that add up to {sum(sizes)}"
            )
    else:
        sizes = _balance_stages(
            costs, schedule, layout.pipeline, microbatches, per_worker, memory_limit
        )
    return StagePlan(sizes, costs, schedule.name, microbatches, per_worker, layout.pipeline)


def _balance_stages(
    costs: list[LayerCost],
    schedule: Schedule,
    places: int,
    microbatches: int,
    per_worker: int,
    memory_limit: float | None,
) -> list[int]:
    seconds = [cost.seconds for cost in costs]

    def needed(low: int, high: int) -> float:
        """Return the bytes of a stage with the largest number of microbatches in flight."""
        kept = min(microbatches, schedule.in_flight(0, places, microbatches, per_worker))
        part = costs[low:high]
        weights = _TRAINED * sum(cost.parameter_bytes for cost in part)
        return weights + kept * sum(cost.activations for cost in part)

    limit = None if memory_limit is None else memory_limit / per_worker

    def fits(low: int, high: int) -> bool:
        return limit is None or needed(low, high) <= limit

    sizes = cut_evenly(seconds, places * per_worker, fits)
    if sizes is None:
        assert memory_limit is not None
        least = cut_evenly([needed(i, i + 1) for i in range(len(costs))], places * per_worker)
        assert least is not None
        largest = max(needed(low, high) for low, high in stage_bounds(least)) * per_worker
        raise ValueError(
            f"{len(costs)} layers can't be divided among {places} workers within "
            f"memory_limit={size(memory_limit)}. Set memory_limit to at least {size(largest)}, or "
            "use more workers"
        )
    if per_worker > 1:
        sizes = even_out(seconds, sizes, lambda stage: schedule.holder(stage, places), fits)
    return sizes


def cut_evenly(
    costs: Sequence[float],
    stages: int,
    fits: Callable[[int, int], bool] = lambda low, high: True,
) -> list[int] | None:
    """Return the number of layers of each stage, at least one, or None if that isn't possible.

    The largest sum of ``costs`` in a stage is as small as possible. If several divisions have the
    same sum, choose the one with the smallest sum of squares, which also balances the other stages.
    ``fits(low, high)`` returns whether layers [low, high) may be one stage.
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
    """Move layers between neighboring stages as long as the busiest worker gets less work.

    For workers with several stages; ``holder(stage)`` is the worker of a stage. If several moves
    leave the busiest worker with the same work, choose the one with the smallest largest stage.
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
    """Return the range [low, high) of the layers of each stage."""
    bounds, low = [], 0
    for size in sizes:
        bounds.append((low, low + size))
        low += size
    return bounds


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with words aligned to the left and numbers to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    right = [all(row[i][:1].isdigit() for row in rows) for i in range(len(head))]
    lines = []
    for row in (head, ["-" * width for width in widths], *rows):
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size(count: float) -> str:
    """Format a number of bytes, such as ``1.5 MB``."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
