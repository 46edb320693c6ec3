"""``trimmed_mean``: the mean of each number without its smallest and largest values.

    k ← ⌈trim·n⌉;  w[j] ← mean of w₁[j], …, wₙ[j] without the k smallest and the k largest

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
https://arxiv.org/abs/1803.01498: right as long as at most k workers are broken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, register_strategy, within
from miniray.ps.strategies.median import sorted_rows


@register_strategy("trimmed_mean")
class TrimmedMean(Strategy):
    """The mean of the middle values. Fails when so few workers are left that none would remain.

    Args:
        trim: share of the workers to leave out at each end, rounded up; in (0, 0.5).
    """

    compares_workers = True
    shows_nonfinite = False

    def __init__(self, trim: float = 0.2) -> None:
        self.trim = within("trim", trim, 0, 0.5)

    def weigh(self, weights: Sequence[float], distances: Array | None) -> Sequence[float]:
        if 2 * self._cut(len(weights)) >= len(weights):
            raise ValueError(
                f"trimmed_mean with trim={self.trim:g} leaves none of {len(weights)} workers: "
                "use more workers, a smaller trim or another strategy"
            )
        return weights

    def _cut(self, count: int) -> int:
        # The product may exceed the integer by rounding: 0.28 * 25 is 7.000000000000001.
        return math.ceil(self.trim * count - 1e-9)

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        cut = self._cut(len(worker_weights))
        rows = sorted_rows(worker_weights, self.scratch)[cut : len(worker_weights) - cut]
        return self.mean(rows, [1 / len(rows)] * len(rows), self.out)
