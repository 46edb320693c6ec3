"""``diloco``: an outer Nesterov optimizer on the averaged change of long inner runs.

    g ← w − mean(wᵢ)          the outer gradient
    b ← momentum·b + g
    w ← w − lr·(g + momentum·b)

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
https://arxiv.org/abs/2311.08105: workers train for hundreds of steps between syncs (500 in the
paper) with AdamW; outer SGD with Nesterov momentum 0.9 and learning rate 0.7. The rule is that of
``torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, at_least, register_strategy, share


@register_strategy("diloco")
class DiLoCo(Strategy):
    """Outer SGD with Nesterov momentum. The first sync takes the mean, with b = 0.

    Args:
        lr: outer learning rate; above 0.
        momentum: outer momentum; in [0, 1).
    """

    uses_worker_weights = True
    needs_global = True
    buffers = {"momentum": 0.0}  # noqa: RUF012

    def __init__(self, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.lr = at_least("lr", lr, 0, strictly=True)
        self.momentum = share("momentum", momentum)

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        assert global_weights is not None
        out, velocity = self.out, self.new_buffer("momentum")
        gradient = np.subtract(global_weights, self.mean(worker_weights, weights, out), out=out)
        np.multiply(self.buffer("momentum"), self.momentum, out=velocity)
        np.add(velocity, gradient, out=velocity)
        step = np.multiply(velocity, self.momentum, out=self.scratch("step"))
        np.multiply(np.add(step, gradient, out=step), self.lr, out=step)
        return np.subtract(global_weights, step, out=out)
