"""Workers whose every number can be computed by hand."""

import os
import random
import signal

import numpy as np

import miniray


@miniray.remote
class Counter:
    """Its weights are [w]; an epoch adds ``step`` (its worker id plus one) to w."""

    def __init__(self, worker_id, start=None, lr=None):
        self.worker_id = worker_id
        self.lr = lr
        self.w = np.array([float(worker_id if start is None else start)])
        self.shard = None
        self.epochs, self.lrs = [], []

    def set_lr(self, lr):
        self.lr = lr

    def load_data_shard(self, shard_id, num_shards, batch_size=None, dataset=None):
        self.shard = (shard_id, num_shards, batch_size, dataset)

    def train_epoch(self, epoch):
        self.epochs.append(epoch)
        self.lrs.append(self.lr)
        self.w = self.w + self.worker_id + 1
        return {"loss": 1.0 / (epoch + 1) + self.worker_id, "accuracy": self.worker_id / 10}

    def get_weights(self):
        return [self.w]

    def set_weights(self, weights):
        self.w = np.array(weights[0])

    def seen(self):
        return {
            "shard": self.shard,
            "epochs": self.epochs,
            "lr": self.lr,
            "lrs": self.lrs,
            "pid": os.getpid(),
        }


@miniray.remote
class Noisy(Counter.__wrapped__):
    """Counter with additional state: a random stream and the velocity of an optimizer."""

    def __init__(self, worker_id):
        super().__init__(worker_id, start=0)
        self.random = random.Random(worker_id)
        self.velocity = 0.0

    def train_epoch(self, epoch):
        self.velocity = 0.9 * self.velocity + self.random.random()
        self.w = self.w + self.velocity
        return {"loss": float(self.w[0]), "velocity": self.velocity}

    def get_state(self):
        version, internal, gauss = self.random.getstate()
        return {"random": [version, list(internal), gauss], "velocity": self.velocity}

    def set_state(self, state):
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.velocity = state["velocity"]


@miniray.remote
class Mortal(Counter.__wrapped__):
    """Worker that crashes or hangs once, in epoch ``in_epoch``; a file records that it did."""

    def __init__(self, worker_id, victim, in_epoch, how, marker):
        super().__init__(worker_id, start=0)
        self.plan = (victim, in_epoch, how, marker)

    def train_epoch(self, epoch):
        victim, in_epoch, how, marker = self.plan
        if self.worker_id == victim and epoch == in_epoch and not os.path.exists(marker):
            with open(marker, "w"):
                pass
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                raise ValueError(f"told to fail in epoch {epoch}")
        return super().train_epoch(epoch)
