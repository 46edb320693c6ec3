"""Metrics that can be added up: (sum, count, min, max) from every worker, one number at the end.

A mean of the workers' means would count a worker with one response as much as one with a hundred.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Quad = tuple[float, float, float, float]

#: Means over sequences, tokens or updates, in the order of a step's line.
_MEANS = (
    "loss", "policy_loss", "value_loss", "kl", "entropy", "clip_fraction", "dual_clip_fraction",
    "value_clip_fraction", "approx_kl", "grad_norm", "lr", "flat_groups", "response_tokens",
)  # fmt: skip
_RANGES = ("reward", "response_tokens")
_COUNTS = ("prompts", "sequences", "tokens")
#: Counts of what was left out: shown where there is something to tell.
_LEFT_OUT = (
    "filtered_prompts", "empty_responses", "skipped_rewards", "skipped_nonfinite",
)  # fmt: skip
#: Skipped by all workers or by none.
_SKIPPED_UPDATES = "skipped_updates"
_SECONDS = ("data", "rollout", "reward", "log_prob", "update")

#: Names that a reward function cannot use for numbers of its own.
RESERVED = frozenset(
    (
        *_MEANS, *_COUNTS, *_LEFT_OUT, _SKIPPED_UPDATES, *(f"{name}_seconds" for name in _SECONDS),
        "counts", "range", "timing", "kl_coef", "tokens_per_second", "step_seconds", "step",
        "epoch", "seconds", "synced", "restarts",
    )
)  # fmt: skip


class Metrics:
    """Gathers numbers by name."""

    def __init__(self) -> None:
        self._quads: dict[str, Quad] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """One number, which counts ``weight`` times. A weight of 0 leaves it out."""
        if weight:
            self.merge(name, (value * weight, weight, value, value))

    def extend(self, name: str, values: Sequence[float]) -> None:
        """Many numbers that count the same."""
        if values:
            quad = (math.fsum(values), float(len(values)), float(min(values)), float(max(values)))
            self.merge(name, quad)

    def total(self, name: str, amount: float) -> None:
        """Something that is summed up over all workers, not averaged."""
        self.merge(name, (amount, 1.0, amount, amount))

    def merge(self, name: str, quad: Quad) -> None:
        """Numbers that were added up elsewhere."""
        self._quads[name] = combine([self._quads[name], quad]) if name in self._quads else quad

    def export(self) -> dict[str, Quad]:
        """What travels to the driver."""
        return dict(self._quads)


def combine(quads: Sequence[Quad]) -> Quad:
    """Several as one."""
    return (
        math.fsum(q[0] for q in quads),
        math.fsum(q[1] for q in quads),
        min(q[2] for q in quads),
        max(q[3] for q in quads),
    )


def pool(exports: Sequence[Mapping[str, Quad]]) -> dict[str, Quad]:
    """The workers' metrics as one set."""
    names = dict.fromkeys(name for export in exports for name in export)
    return {name: combine([e[name] for e in exports if name in e]) for name in names}


def record(pooled: Mapping[str, Quad]) -> dict[str, Any]:
    """A step's line in the history.

    First the reward and what else the reward function told, then the means of the step. ``counts``
    are totals over all workers, ``range`` has [min, max], ``timing`` the slowest worker's seconds.
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
