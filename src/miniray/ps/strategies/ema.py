"""``ema``: the global weights follow the workers slowly, as an exponential moving average.

    w ← decay·w + (1 − decay)·mean(wᵢ)

The server-side form of Polyak averaging; with mean teachers: Tarvainen and Valpola,
https://arxiv.org/abs/1703.01780. The workers get the smoothed weights, so a large ``decay`` slows
training down; ``momentum`` does the opposite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, register_strategy, share


@register_strategy("ema")
class ExponentialMovingAverage(Strategy):
    """A moving average of the weights. The first sync takes the mean.

    Args:
        decay: how much of the old weights stays; in [0, 1).
    """

    uses_worker_weights = True
    needs_global = True

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = share("decay", decay)

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        assert global_weights is not None
        # As a step towards the mean: equal weights then stay exactly as they are.
        out = self.mean(worker_weights, weights, self.out)
        np.subtract(out, global_weights, out=out)
        np.multiply(out, 1 - self.decay, out=out)
        return np.add(out, global_weights, out=out)
