"""``GRPOTrainer``: group relative policy optimisation, https://arxiv.org/abs/2402.03300."""

from miniray.rl.config import GRPOConfig
from miniray.rl.trainer import RLTrainer


class GRPOTrainer(RLTrainer):
    """Trains by comparing the responses to each prompt with each other; see ``RLTrainer``."""

    config_class = GRPOConfig
