"""``average``: every worker counts the same.

    w ← (w₁ + … + wₙ) / n

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(FedAvg), https://arxiv.org/abs/1602.05629, with equally large shares of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, register_strategy


@register_strategy("average")
class Average(Strategy):
    """The mean of the workers' weights. Has no options; use ``weighted`` for unequal workers."""

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        return self.mean(worker_weights, weights, self.out)
