"""``TorchWorker``s whose epochs the driver trains in segments."""

import os
import random
import signal
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from miniray.train import TorchWorker
from tests.train import steps_for_tests
from tests.train.ddp_for_tests import make_data
from tests.train.steps_for_tests import Augmented

ROWS = 57


class Noisy(TorchWorker):
    """Augmentation, dropout, Adam, a scheduler by the loss of the epoch, and a shuffled loader."""

    order = ""  # path of a file: "rank step" at which this process is killed, once

    def setup(self, loader_workers=0, persistent=False, own_loader=True, driver=None):
        torch.manual_seed(7)
        self.model = nn.Sequential(
            nn.Linear(4, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 3)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, patience=0)
        self.driver, self.seen, self.rows = driver, [], []
        if own_loader:
            self.train_loader = DataLoader(
                Augmented(ROWS), 4, shuffle=True, num_workers=loader_workers,
                persistent_workers=persistent,
            )  # fmt: skip
            self.val_loader = DataLoader(make_data(9), 4, shuffle=True)

    def training_step(self, batch, batch_idx):
        order = f"{self.worker_id} {batch_idx}"
        if os.path.exists(self.order) and open(self.order).read() == order:
            os.remove(self.order)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.driver is not None:
            time.sleep(0.02)
            if batch_idx == 2 and self.worker_id == 0:
                os.kill(self.driver, signal.SIGTERM)
        self.seen.append(batch_idx)
        x, y = batch.values() if isinstance(batch, dict) else batch
        self.rows += [round(float(value), 4) for value in x[:, 0]]
        noise = random.random() + np.random.rand()
        return functional.cross_entropy(self.model(x), y) * noise

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"loss": functional.cross_entropy(self.model(x), y)}

    def get_seen(self):
        return self.seen

    def get_rows(self):
        return self.rows


class Watch(steps_for_tests.Watch):
    """Hooks are called when the trainer has completed the step, because it waits for segments."""

    def on_step_end(self, trainer, step, metrics, **kwargs):
        assert step == trainer.state.step
        super().on_step_end(trainer, step, metrics, **kwargs)
