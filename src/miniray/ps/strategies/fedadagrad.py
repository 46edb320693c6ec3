"""``fedadagrad``: Adagrad on the server: steps become smaller where there was much change.

    v ← v + d²

Reddi et al., "Adaptive Federated Optimization", https://arxiv.org/abs/2003.00295; the rest of the
rule is in ``adaptive.py``. As in the paper's experiments β₁ is 0 unless said otherwise.
"""

from __future__ import annotations

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.adaptive import Adaptive
from miniray.ps.strategies.base import register_strategy


@register_strategy("fedadagrad")
class FedAdagrad(Adaptive):
    """Adagrad on the averaged change.

    Args:
        lr: server learning rate; the paper searches it in powers of ten around 0.1.
        beta_1: decay of the first moment; in [0, 1).
        tau: keeps the step finite; the larger, the less adaptive.
    """

    def __init__(self, lr: float = 0.1, beta_1: float = 0.0, tau: float = 1e-3) -> None:
        super().__init__(lr, beta_1, tau)

    def second_moment(self, square: Array, old: Array, new: Array) -> None:
        np.add(old, square, out=new)
