"""``weighted``: workers count by what ``set_worker_weight`` says, usually their share of the data.

    w ← Σ aᵢ·wᵢ / Σ aᵢ

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(FedAvg), https://arxiv.org/abs/1602.05629: aᵢ is the number of samples of worker i.
"""

from __future__ import annotations

from miniray.ps.strategies.average import Average
from miniray.ps.strategies.base import register_strategy


@register_strategy("weighted")
class Weighted(Average):
    """The weighted mean. A worker whose weight was never set counts 1; one with 0 is left out."""

    uses_worker_weights = True
