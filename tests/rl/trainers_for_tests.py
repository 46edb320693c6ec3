"""Trainers with one worker in this process, and a policy that is a table."""

import torch

from miniray.rl import Generated, GRPOConfig, GRPOTrainer, PPOConfig, Sampling
from tests.rl.models_for_tests import TOKENIZER, Momentum, digits, make_model, rows

SMALL = {"prompts_per_step": 4, "rollouts": 4, "micro_batch_tokens": 80}


def make(kind=GRPOTrainer, *, policy=make_model, reward=digits, data=None, config=None, **more):
    default = GRPOConfig if kind is GRPOTrainer else PPOConfig
    settings = {
        "tokenizer": TOKENIZER,
        "config": config or default(**SMALL),
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": Momentum,
        "seed": 1,
        "backend": "inline",
        "progress": False,
        **more,
    }
    return kind(policy, reward, data or rows(12), **settings)


class Batches:
    """Lists of rows; with ``batch_size`` as other loaders have it, if ``declared``."""

    def __init__(self, count, size, declared):
        self.batches = [rows(size)] * count
        if declared:
            self.batch_size = size

    def __iter__(self):
        return iter(self.batches)


class Bandit(torch.nn.Module):
    """Chooses one of three arms by a table of logits; rows carry bytes that it decodes itself."""

    def __init__(self, length=1):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(2, 3))
        self.worth = torch.nn.Parameter(torch.zeros(2))
        self.length = length
        self.decoded = 0

    def _logits(self, rows):
        self.decoded += len(rows)
        return self.table[[row["image"][0] for row in rows]]

    def generate(self, rows, seeds, sampling):
        chances = self._logits(rows).softmax(-1).cpu()  # where the generators are
        arms = []
        for chance, seed in zip(chances, seeds, strict=True):
            random = torch.Generator().manual_seed(seed % 2**63)
            arms.append(torch.multinomial(chance, self.length, True, generator=random))
        return Generated([torch.zeros(1)] * len(rows), arms, [arm.tolist() for arm in arms])

    def log_probs(self, batch):
        logits = self._logits(batch.rows).log_softmax(-1)
        return logits.gather(1, batch.responses)

    def values(self, batch):
        own = self.worth[[row["image"][0] for row in batch.rows]]
        return own[:, None].expand(-1, batch.width)


BANDITS = [{"image": bytes([i]), "best": 2 * i} for i in (0, 1)]


def pull(row, arms):
    return {"reward": float(arms[:1] == [row["best"]]), "pulled": sum(arms)}
