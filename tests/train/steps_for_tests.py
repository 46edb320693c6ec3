"""Workers and helpers for the tests of steps: every kind of randomness that a run can have."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from miniray.train import Callback, DDPTrainer
from miniray.train.callbacks import Checkpoint
from tests.train.ddp_for_tests import make_data

ROWS = 57


class Augmented(Dataset):
    """Rows with noise from three generators."""

    def __init__(self, rows=ROWS):
        self.x, self.y = make_data(rows).tensors

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        noise = random.random() + float(np.random.rand()) + torch.randn(4)
        return self.x[index] + 0.1 * noise, self.y[index]


class Noisy:
    """Augmentation, dropout, momentum and a scheduler that is stepped after every step."""

    scheduler_interval = "step"

    def __init__(self, worker_id, loader_workers=0, rows=ROWS):
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 3)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.9)
        self.train_loader = DataLoader(
            Augmented(rows), batch_size=4, shuffle=True, num_workers=loader_workers
        )
        self.val_loader = DataLoader(make_data(9), batch_size=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": functional.cross_entropy(self.model(x), y)}


class EveryCheckpoint(Checkpoint):
    """Leaves out no checkpoint: steps of tests take less time than writing one."""

    def save_if_due(self, trainer):
        trainer.checkpointer.wait()
        super().save_if_due(trainer)


class Watch(Callback):
    """Records the calls of hooks inside an epoch."""

    def __init__(self, stop_at=None):
        self.steps, self.scores, self.stop_at = [], [], stop_at

    def on_step_end(self, trainer, step, metrics, **kwargs):
        assert step == metrics["step"]
        self.steps.append((step, metrics))
        if self.stop_at is not None and step >= self.stop_at:
            trainer.should_stop = True

    def on_evaluate_end(self, trainer, step, scores, **kwargs):
        self.scores.append((step, scores))


def run(name, length, trainer=DDPTrainer, num_workers=2, train_options=None, **options):
    """Train; return the steps, the losses by epoch and the weights at the end."""
    options = {"worker": Noisy, "seed": 5, "progress": False, **options}
    with trainer(num_workers, run_dir=name, **options) as t:
        result = t.train(**length, **train_options or {})
        weights = t.model_weights()
    losses = {r["epoch"]: r["loss"] for r in result.history if r.get("complete", True)}
    return t.state.step, losses, weights


def check_equal(found, expected):
    """Check that two results of ``run`` have the same bits."""
    assert found[:2] == expected[:2]
    assert list(found[2]) == list(expected[2])
    assert all(torch.equal(found[2][name], expected[2][name]) for name in expected[2])
