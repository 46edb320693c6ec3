"""Metrics that can be combined over workers, as (sum, count, min, max).

A mean of the workers' means would be wrong, because workers have different numbers of responses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Quad = tuple[float, float, float, float]

#: Means over sequences, tokens or updates, in the order in which they are recorded.
_MEANS = (
    "loss", "policy_loss", "value_loss", "kl", "entropy", "clip_fraction", "dual_clip_fraction",
    "value_clip_fraction", "approx_kl", "grad_norm", "lr", "flat_groups", "response_tokens",
)  # fmt: skip
_RANGES = ("reward", "response_tokens")
_COUNTS = ("prompts", "sequences", "tokens")
#: Counts of skipped items, which are recorded unless they are 0.
_LEFT_OUT = (
    "filtered_prompts", "empty_responses", "skipped_rewards", "skipped_nonfinite",
)  # fmt: skip
#: Number of skipped updates, which is the same on all workers.
_SKIPPED_UPDATES = "skipped_updates"
_SECONDS = ("data", "rollout", "reward", "log_prob", "update")

#: Names that aren't available for the metrics of a reward function.
RESERVED = frozenset(
    (
        *_MEANS, *_COUNTS, *_LEFT_OUT, _SKIPPED_UPDATES, *(f"{name}_seconds" for name in _SECONDS),
        "counts", "range", "timing", "kl_coef", "tokens_per_second", "step_seconds", "step",
        "epoch", "seconds", "synced", "restarts",
    )
)  # fmt: skip


class Metrics:
    """Collects metrics by name."""

    def __init__(self) -> None:
        self._quads: dict[str, Quad] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add a value with a weight. A weight of 0 skips it."""
        if weight:
            self.merge(name, (value * weight, weight, value, value))

    def extend(self, name: str, values: Sequence[float]) -> None:
        """Add several values with weight 1."""
        if values:
            quad = (math.fsum(values), float(len(values)), float(min(values)), float(max(values)))
            self.merge(name, quad)

    def total(self, name: str, amount: float) -> None:
        """Add an amount that is summed over all workers, not averaged."""
        self.merge(name, (amount, 1.0, amount, amount))

    def merge(self, name: str, quad: Quad) -> None:
        """Add values that were already combined."""
        self._quads[name] = combine([self._quads[name], quad]) if name in self._quads else quad

    def export(self) -> dict[str, Quad]:
        """Return all metrics, to send them to the driver."""
        return dict(self._quads)


def combine(quads: Sequence[Quad]) -> Quad:
    """Combine several quads into one."""
    return (
        math.fsum(q[0] for q in quads),
        math.fsum(q[1] for q in quads),
        min(q[2] for q in quads),
        max(q[3] for q in quads),
    )


def pool(exports: Sequence[Mapping[str, Quad]]) -> dict[str, Quad]:
    """Combine the metrics of all workers."""
    names = dict.fromkeys(name for export in exports for name in export)
    return {name: combine([e[name] for e in exports if name in e]) for name in names}


def record(pooled: Mapping[str, Quad]) -> dict[str, Any]:
    """Return the record of a step for the history.

    It starts with the reward and the metrics of the reward function, followed by the means of the
    step. ``counts`` are totals over all workers, ``range`` contains [min, max], and ``timing``
    contains the seconds of the slowest worker.
    """
    told = [name for name in pooled if name not in RESERVED and name != "reward"]
    line: dict[str, Any] = {}
    for name in ("reward", *told, *_MEANS):
        if name in pooled:
            total, count, _, _ = pooled[name]
            line[name] = total / count
    if line.get("dual_clip_fraction") == 0:
        del line["dual_clip_fraction"]
    for name in _LEFT_OUT:
        if name in pooled and pooled[name][0]:
            line[name] = int(pooled[name][0])
    if _SKIPPED_UPDATES in pooled:
        line[_SKIPPED_UPDATES] = int(pooled[_SKIPPED_UPDATES][3])
    line["counts"] = {name: int(pooled[name][0]) for name in _COUNTS if name in pooled}
    line["range"] = {name: list(pooled[name][2:]) for name in _RANGES if name in pooled}
    timing = {name: pooled.get(f"{name}_seconds") for name in _SECONDS}
    line["timing"] = {name: quad[3] for name, quad in timing.items() if quad is not None}
    return line
