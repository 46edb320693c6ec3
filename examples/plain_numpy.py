"""A model without torch: logistic regression on the digits, in numpy alone.

python examples/plain_numpy.py
"""

from __future__ import annotations

import numpy as np
from image_data import load_digits_images

import miniray
from miniray.train import DataParallelTrainer


@miniray.remote
class SoftmaxRegression:
    def __init__(self, worker_id: int):
        self.weights = {"w": np.zeros((64, 10)), "b": np.zeros(10)}

    def load_data_shard(self, shard_id, num_shards):
        parts = [part[shard_id::num_shards] for part in load_digits_images()]
        self.x, self.y, self.test_x, self.test_y = parts
        self.x, self.test_x = self.x.reshape(-1, 64), self.test_x.reshape(-1, 64)

    def probabilities(self, x):
        logits = x @ self.weights["w"] + self.weights["b"]
        exp = np.exp(logits - logits.max(1, keepdims=True))
        return exp / exp.sum(1, keepdims=True)

    def train_epoch(self, epoch):
        rows = np.arange(len(self.y))
        p = self.probabilities(self.x)
        loss = -np.log(p[rows, self.y]).mean()
        p[rows, self.y] -= 1
        self.weights["w"] -= 0.5 * self.x.T @ p / len(rows)
        self.weights["b"] -= 0.5 * p.mean(0)
        return {"loss": loss, "num_samples": len(rows)}

    def evaluate(self):
        correct = (self.probabilities(self.test_x).argmax(1) == self.test_y).sum()
        return {"accuracy": (correct, len(self.test_y))}

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = {name: np.array(value) for name, value in weights.items()}


if __name__ == "__main__":
    with DataParallelTrainer(4, sync_interval=5, worker=SoftmaxRegression) as trainer:
        result = trainer.train(epochs=200)
        print(f"loss {result['loss']:.3f}, held-out accuracy {trainer.evaluate()['accuracy']:.1%}")
        print("curve:", result.plot())
