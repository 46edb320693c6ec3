"""PPO and GRPO where the data is: rollouts, rewards and updates in the workers. Needs torch."""

from miniray.errors import NonFiniteError, NoTokensError, RewardError, RewardTimeoutError
from miniray.rl import advantages, losses
from miniray.rl.batch import Generated, MicroBatch, pad_left, positions
from miniray.rl.collective import sum_gradients
from miniray.rl.config import GRPOConfig, KLPenalty, PPOConfig
from miniray.rl.generate import generate
from miniray.rl.grpo import GRPOTrainer
from miniray.rl.kl import AdaptiveKL
from miniray.rl.metrics import Quad, pool
from miniray.rl.policy import CausalLM, Policy
from miniray.rl.ppo import PPOTrainer
from miniray.rl.sampling import Sampling
from miniray.rl.sources import held_out, make_source
from miniray.rl.tokenizer import CharTokenizer
from miniray.rl.worker import RLWorker

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
