"""``krum``: the weights of the worker that is closest to its nearest neighbours.

    score(i) ← sum of ‖wᵢ − wⱼ‖² over the n − f − 2 workers j closest to i
    w ← mean of the m workers with the lowest scores          (m = 1: Krum; more: Multi-Krum)

Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
https://arxiv.org/abs/1703.02757 (NeurIPS 2017): right with up to f broken workers of n ≥ 2f + 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.checks import check_int
from miniray.ps.leaves import Array
from miniray.ps.strategies.average import Average
from miniray.ps.strategies.base import register_strategy


@register_strategy("krum")
class Krum(Average):
    """Krum and Multi-Krum. Integers, too, are taken from the chosen workers only.

    Args:
        num_byzantine: f, how many workers may be broken.
        num_selected: m, how many to average; at most n − f.
    """

    compares_workers = True
    shows_nonfinite = False
    uses_distances = True

    def __init__(self, num_byzantine: int = 1, num_selected: int = 1) -> None:
        self.num_byzantine = check_int("num_byzantine", num_byzantine, 0)
        self.num_selected = check_int("num_selected", num_selected, 1)

    def weigh(self, weights: Sequence[float], distances: Array | None) -> Sequence[float]:
        count, broken = len(weights), self.num_byzantine
        if count < 2 * broken + 3:
            raise ValueError(
                f"krum with num_byzantine={broken} needs at least {2 * broken + 3} workers, "
                f"not {count}"
            )
        if self.num_selected > count - broken:
            raise ValueError(
                f"krum cannot select {self.num_selected} of {count} workers when {broken} of them "
                "may be broken"
            )
        assert distances is not None
        nearest = np.sort(distances, axis=1)[:, 1 : count - broken - 1]  # column 0: itself
        order = np.argsort(nearest.sum(axis=1), kind="stable")
        chosen = set(order[: self.num_selected].tolist())
        return [1 / self.num_selected if i in chosen else 0.0 for i in range(count)]
