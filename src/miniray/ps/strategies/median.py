"""``median``: the middle value of each number over the workers.

    w[k] ← median(w₁[k], …, wₙ[k])          the mean of the middle two when n is even

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates",
https://arxiv.org/abs/1803.01498: right as long as fewer than half of the workers are broken.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy
from miniray.ps.strategies.order import sorted_rows
from miniray.ps.strategies.registry import register_strategy


@register_strategy("median")
class Median(Strategy):
    """The median of each number. Has no options; with two workers it is their mean."""

    compares_workers = True
    shows_nonfinite = False

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        rows = sorted_rows(worker_weights, self.scratch)
        middle = len(rows) // 2
        if len(rows) % 2:
            return rows[middle]
        # Halved first: the sum of two large numbers could overflow.
        np.multiply(rows[middle - 1], 0.5, out=rows[middle - 1])
        np.multiply(rows[middle], 0.5, out=rows[middle])
        return np.add(rows[middle - 1], rows[middle], out=self.out)
