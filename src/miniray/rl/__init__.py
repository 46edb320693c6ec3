"""PPO and GRPO with rollouts, rewards and updates in the workers. Needs torch.

Names are imported on first use, so a driver that only calls workers doesn't load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.errors import NonFiniteError, NoTokensError, RewardError, RewardTimeoutError
    from miniray.rl import advantages, losses
    from miniray.rl.batch import Generated, MicroBatch, pad_left, positions
    from miniray.rl.collective import sum_gradients
    from miniray.rl.config import AdaptiveKL, GRPOConfig, KLPenalty, PPOConfig, Sampling
    from miniray.rl.generation import generate
    from miniray.rl.metrics import Quad, pool
    from miniray.rl.policy import CausalLM, Policy
    from miniray.rl.sources import held_out, make_source
    from miniray.rl.tokenizer import CharTokenizer
    from miniray.rl.trainer import GRPOTrainer, PPOTrainer
    from miniray.rl.worker import RLWorker

_WHERE = {
    "AdaptiveKL": ".config",
    "CausalLM": ".policy",
    "CharTokenizer": ".tokenizer",
    "GRPOConfig": ".config",
    "GRPOTrainer": ".trainer",
    "Generated": ".batch",
    "KLPenalty": ".config",
    "MicroBatch": ".batch",
    "NoTokensError": "..errors",
    "NonFiniteError": "..errors",
    "PPOConfig": ".config",
    "PPOTrainer": ".trainer",
    "Policy": ".policy",
    "Quad": ".metrics",
    "RLWorker": ".worker",
    "RewardError": "..errors",
    "RewardTimeoutError": "..errors",
    "Sampling": ".config",
    "advantages": ".advantages",
    "generate": ".generation",
    "held_out": ".sources",
    "losses": ".losses",
    "make_source": ".sources",
    "pad_left": ".batch",
    "pool": ".metrics",
    "positions": ".batch",
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
