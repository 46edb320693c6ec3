"""``weighted``: workers count by what ``set_worker_weight`` says, usually their share of the data.

    w ← Σ aᵢ·wᵢ / Σ aᵢ

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(FedAvg), https://arxiv.org/abs/1602.05629: aᵢ is the number of samples of worker i.
"""

from __future__ import annotations

from collections.abc import Sequence

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy
from miniray.ps.strategies.registry import register_strategy


@register_strategy("weighted")
class Weighted(Strategy):
    """The weighted mean. A worker whose weight was never set counts 1; one with 0 is left out."""

    uses_worker_weights = True

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        return self.mean(worker_weights, weights, self.out)
