"""How strongly the policy is held to its reference: a fixed coefficient or an adaptive one.

The controller lives on the driver, which sees the KL of all workers as (sum, count) and sends the
coefficient with every step. So it is one number for all ranks by construction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from miniray.rl.checks import above, in_range


class AdaptiveKL:
    """Raises the coefficient while the KL is above its target and lowers it while below.

    Each update multiplies it by ``1 + clip(kl / target - 1, ±0.2) * steps / horizon`` (Ziegler et
    al., https://arxiv.org/abs/1909.08593, section 2.2). A KL that is no finite number is refused:
    it would stay in the coefficient for ever.
    """

    def __init__(self, coefficient: float, target: float, horizon: float = 10_000) -> None:
        in_range("coefficient", coefficient, 0)
        above("target", target, 0)
        above("horizon", horizon, 0)
        self.coefficient = float(coefficient)
        self.target = float(target)
        self.horizon = float(horizon)

    def update(self, kl: float, steps: float) -> float:
        """Take note of the mean KL over ``steps`` samples; returns the new coefficient."""
        if not math.isfinite(kl):
            raise ValueError(f"the mean KL to the reference is {kl}, so it cannot be adapted to")
        error = min(0.2, max(-0.2, kl / self.target - 1))
        # A step of many samples against a short horizon must not make it negative.
        self.coefficient *= max(0.0, 1 + error * steps / self.horizon)
        return self.coefficient

    def state_dict(self) -> dict[str, float]:
        """The coefficient, for a checkpoint; the rest is settings."""
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with the coefficient of a ``state_dict``."""
        self.coefficient = float(state["coefficient"])
