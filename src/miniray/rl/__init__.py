"""PPO and GRPO with rollouts, rewards and updates in the workers. Needs torch.

Names are imported on first use, so a driver that only calls workers doesn't load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.errors import NonFiniteError, NoTokensError, RewardError, RewardTimeoutError
    from miniray.rl import advantages, losses
    from miniray.rl.collective import sum_gradients
    from miniray.rl.config import AdaptiveKL, GRPOConfig, KLPenalty, PPOConfig, Sampling
    from miniray.rl.metrics import Quad, pool
    from miniray.rl.models.generation import generate
    from miniray.rl.models.policy import CausalLM, Policy
    from miniray.rl.models.tokenizer import CharTokenizer
    from miniray.rl.rollouts.batch import Generated, MicroBatch, pad_left, positions
    from miniray.rl.rollouts.sources import held_out, make_source
    from miniray.rl.trainer import GRPOTrainer, PPOTrainer
    from miniray.rl.worker import RLWorker

_WHERE = {
    "AdaptiveKL": ".config",
    "CausalLM": ".models.policy",
    "CharTokenizer": ".models.tokenizer",
    "GRPOConfig": ".config",
    "GRPOTrainer": ".trainer",
    "Generated": ".rollouts.batch",
    "KLPenalty": ".config",
    "MicroBatch": ".rollouts.batch",
    "NoTokensError": "..errors",
    "NonFiniteError": "..errors",
    "PPOConfig": ".config",
    "PPOTrainer": ".trainer",
    "Policy": ".models.policy",
    "Quad": ".metrics",
    "RLWorker": ".worker",
    "RewardError": "..errors",
    "RewardTimeoutError": "..errors",
    "Sampling": ".config",
    "advantages": ".advantages",
    "generate": ".models.generation",
    "held_out": ".rollouts.sources",
    "losses": ".losses",
    "make_source": ".rollouts.sources",
    "pad_left": ".rollouts.batch",
    "pool": ".metrics",
    "positions": ".rollouts.batch",
    "sum_gradients": ".collective",
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

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
