"""``PPOTrainer``: proximal policy optimisation, https://arxiv.org/abs/1707.06347."""

from miniray.rl.config import PPOConfig
from miniray.rl.trainer import RLTrainer


class PPOTrainer(RLTrainer):
    """Trains by comparing each response with what the value head expected; see ``RLTrainer``.

    A model as ``policy`` gets a value head on its last hidden state; for a critic of its own,
    return ``CausalLM(model, tokenizer, critic=another)``.
    """

    config_class = PPOConfig
