"""``GRPOTrainer``: group relative policy optimisation, https://arxiv.org/abs/2402.03300."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miniray.rl.config import GRPOConfig
from miniray.rl.trainer import RLTrainer


class GRPOTrainer(RLTrainer):
    """Trains by comparing the responses to each prompt with each other; see ``RLTrainer``."""

    def __init__(
        self,
        policy: Callable[[], Any],
        reward: Callable[[Any, Any], Any],
        data: Any,
        *,
        config: GRPOConfig | None = None,
        **kwargs: Any,
    ) -> None:
        config = GRPOConfig() if config is None else config
        if not isinstance(config, GRPOConfig):
            raise TypeError(f"GRPOTrainer needs a GRPOConfig, not {config!r}")
        super().__init__(policy, reward, data, config=config, **kwargs)
