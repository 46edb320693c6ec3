"""What ``fedadam``, ``fedyogi`` and ``fedadagrad`` share: they differ in how v follows d².

    d ← mean(wᵢ) − w
    m ← β₁·m + (1 − β₁)·d
    v ← see each
    w ← w + lr·m / (√v + τ)

Reddi et al., "Adaptive Federated Optimization", https://arxiv.org/abs/2003.00295, algorithm 2:
m starts at 0, v at τ², and there is no bias correction.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from miniray.ps.leaves import Array
from miniray.ps.strategies.base import Strategy, at_least, share


class Adaptive(Strategy):
    """An adaptive server optimizer. The first sync takes the mean, with m and v as they start."""

    uses_worker_weights = True
    needs_global = True

    def __init__(self, lr: float, beta_1: float, tau: float) -> None:
        self.lr = at_least("lr", lr, 0, strictly=True)
        self.beta_1 = share("beta_1", beta_1)
        self.tau = at_least("tau", tau, 0, strictly=True)

    @property
    def buffers(self) -> Mapping[str, float]:  # type: ignore[override]
        return {"m": 0.0, "v": self.tau**2}

    @abc.abstractmethod
    def second_moment(self, square: Array, old: Array, new: Array) -> None:
        """Write v to ``new``. ``square`` is d², and may be used up; ``old`` is the last v."""

    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        assert global_weights is not None
        out, m, v = self.out, self.new_buffer("m"), self.new_buffer("v")
        change = np.subtract(self.mean(worker_weights, weights, out), global_weights, out=out)
        part = self.scratch("part")
        np.multiply(self.buffer("m"), self.beta_1, out=m)
        np.add(m, np.multiply(change, 1 - self.beta_1, out=part), out=m)
        self.second_moment(np.multiply(change, change, out=part), self.buffer("v"), v)
        np.add(np.sqrt(v, out=part), self.tau, out=part)
        np.divide(np.multiply(m, self.lr, out=out), part, out=out)
        return np.add(out, global_weights, out=out)
