"""PPO and GRPO where the data is: rollouts, rewards and updates in the workers. Needs torch.

What is here is imported when it is first used: a driver that only calls workers loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miniray.errors import NonFiniteError, NoTokensError, RewardError, RewardTimeoutError
    from miniray.rl import advantages, losses
    from miniray.rl.batch import Generated, MicroBatch, pad_left, positions
    from miniray.rl.collective import sum_gradients
    from miniray.rl.config import GRPOConfig, KLPenalty, PPOConfig
    from miniray.rl.generation import generate
    from miniray.rl.grpo import GRPOTrainer
    from miniray.rl.kl import AdaptiveKL
    from miniray.rl.metrics import Quad, pool
    from miniray.rl.policy import CausalLM, Policy
    from miniray.rl.ppo import PPOTrainer
    from miniray.rl.sampling import Sampling
    from miniray.rl.sources import held_out, make_source
    from miniray.rl.tokenizer import CharTokenizer
    from miniray.rl.worker import RLWorker

_WHERE = {
    "AdaptiveKL": "rl.kl",
    "CausalLM": "rl.policy",
    "CharTokenizer": "rl.tokenizer",
    "GRPOConfig": "rl.config",
    "GRPOTrainer": "rl.grpo",
    "Generated": "rl.batch",
    "KLPenalty": "rl.config",
    "MicroBatch": "rl.batch",
    "NoTokensError": "errors",
    "NonFiniteError": "errors",
    "PPOConfig": "rl.config",
    "PPOTrainer": "rl.ppo",
    "Policy": "rl.policy",
    "Quad": "rl.metrics",
    "RLWorker": "rl.worker",
    "RewardError": "errors",
    "RewardTimeoutError": "errors",
    "Sampling": "rl.sampling",
    "generate": "rl.generation",
    "held_out": "rl.sources",
    "make_source": "rl.sources",
    "pad_left": "rl.batch",
    "pool": "rl.metrics",
    "positions": "rl.batch",
    "sum_gradients": "rl.collective",
}

__all__ = [
    "AdaptiveKL",
    "CausalLM",
    "CharTokenizer",
    "GRPOConfig",
    "GRPOTrainer",
    "Generated",
    "KLPenalty",
    "MicroBatch",
    "NoTokensError",
    "NonFiniteError",
    "PPOConfig",
    "PPOTrainer",
    "Policy",
    "Quad",
    "RLWorker",
    "RewardError",
    "RewardTimeoutError",
    "Sampling",
    "advantages",
    "generate",
    "held_out",
    "losses",
    "make_source",
    "pad_left",
    "pool",
    "positions",
    "sum_gradients",
]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used."""
    if name in ("advantages", "losses"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"miniray.{_WHERE[name]}"), name)
    globals()[name] = value
    return value
