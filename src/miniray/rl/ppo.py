"""``PPOTrainer``: proximal policy optimisation, https://arxiv.org/abs/1707.06347."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miniray.rl.config import PPOConfig
from miniray.rl.trainer import RLTrainer


class PPOTrainer(RLTrainer):
    """Trains by comparing each response with what the value head expected; see ``RLTrainer``.

    A model as ``policy`` gets a value head on its last hidden state; for a critic of its own,
    return ``CausalLM(model, tokenizer, critic=another)``.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        reward: Callable[[Any, Any], Any],
        data: Any,
        *,
        config: PPOConfig | None = None,
        **kwargs: Any,
    ) -> None:
        config = PPOConfig() if config is None else config
        if not isinstance(config, PPOConfig):
            raise TypeError(f"PPOTrainer needs a PPOConfig, not {config!r}")
        super().__init__(policy, reward, data, config=config, **kwargs)
