"""``fedyogi``: Yogi on the server: like Adam, but v changes by at most (1 − β₂)·d² at a time.

    v ← v − (1 − β₂)·d²·sign(v − d²)

Reddi et al., "Adaptive Federated Optimization", https://arxiv.org/abs/2003.00295; the rest of the
rule is in ``adaptive.py``.
"""

from __future__ import annotations

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import register_strategy
from miniray.ps.strategies.fedadam import FedAdam


@register_strategy("fedyogi")
class FedYogi(FedAdam):
    """Yogi on the averaged change. Options as for ``fedadam``."""

    def second_moment(self, square: Array, old: Array, new: Array) -> None:
        np.sign(np.subtract(old, square, out=new), out=new)
        np.multiply(new, np.multiply(square, 1 - self.beta_2, out=square), out=new)
        np.subtract(old, new, out=new)
