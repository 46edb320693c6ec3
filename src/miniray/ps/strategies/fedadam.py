"""``fedadam``: Adam on the server.

    v ← β₂·v + (1 − β₂)·d²

Reddi et al., "Adaptive Federated Optimization", https://arxiv.org/abs/2003.00295; the rest of the
rule is in ``adaptive.py``.
"""

from __future__ import annotations

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.adaptive import Adaptive
from miniray.ps.strategies.base import register_strategy, share


@register_strategy("fedadam")
class FedAdam(Adaptive):
    """Adam on the averaged change.

    Args:
        lr: server learning rate; the paper searches it in powers of ten around 0.01.
        beta_1, beta_2: decay of the first and second moment; in [0, 1).
        tau: keeps the step finite; the larger, the less adaptive.
    """

    def __init__(
        self, lr: float = 0.01, beta_1: float = 0.9, beta_2: float = 0.99, tau: float = 1e-3
    ) -> None:
        super().__init__(lr, beta_1, tau)
        self.beta_2 = share("beta_2", beta_2)

    def second_moment(self, square: Array, old: Array, new: Array) -> None:
        np.multiply(old, self.beta_2, out=new)
        np.add(new, np.multiply(square, 1 - self.beta_2, out=square), out=new)
