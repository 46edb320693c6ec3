"""``momentum``: slow momentum on the change between syncs.

    d ← mean(wᵢ) − w          what the workers changed since the last sync
    v ← momentum·v + d
    w ← w + lr·v

Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
https://arxiv.org/abs/1910.00643 (its inner learning rate cancels out of the rule); Hsu et al.,
"Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
(FedAvgM), https://arxiv.org/abs/1909.06335. With ``momentum=0, lr=1`` it is ``weighted``.

It is not a moving average of weights: that is ``ema``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, at_least, register_strategy, share


@register_strategy("momentum")
class Momentum(Strategy):
    """Slow momentum. The first sync takes the mean, with v = 0.

    Args:
        momentum: how much of the last step goes into the next; in [0, 1).
        lr: how far to go; above 0.
    """

    uses_worker_weights = True
    needs_global = True
    buffers = {"momentum": 0.0}  # noqa: RUF012

    def __init__(self, momentum: float = 0.9, lr: float = 1.0) -> None:
        self.momentum = share("momentum", momentum)
        self.lr = at_least("lr", lr, 0, strictly=True)

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        assert global_weights is not None
        out, velocity = self.out, self.new_buffer("momentum")
        np.subtract(self.mean(worker_weights, weights, out), global_weights, out=out)
        np.multiply(self.buffer("momentum"), self.momentum, out=velocity)
        np.add(velocity, out, out=velocity)
        np.multiply(velocity, self.lr, out=out)
        return np.add(out, global_weights, out=out)
