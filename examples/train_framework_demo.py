"""Train a classifier, a regression and a custom loop with one framework.

python examples/train_framework_demo.py                 # run all three on 4 workers
python examples/train_framework_demo.py classification  # run one of them
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
from image_data import load_images
from torch import nn
from torch.nn import functional

import miniray
from miniray.train import BaseTrainer, DataParallelTrainer

# -- classification with a subclass of DataParallelTrainer ----------------------------------------


@miniray.remote
class ImageClassifier:
    def __init__(self, worker_id: int, lr: float = 0.002):
        self.lr = lr

    def load_data_shard(self, shard_id, num_shards, dataset="cifar10", batch_size=32):
        loaded = load_images(dataset, say=shard_id == 0)
        images, labels, test_images, test_labels = map(torch.from_numpy, loaded)
        self.images, self.labels = images[shard_id::num_shards], labels[shard_id::num_shards]
        self.test = test_images[shard_id::num_shards], test_labels[shard_id::num_shards]
        self.batch_size = batch_size
        channels, side = images.shape[1], images.shape[2]
        self.model = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(64 * (side // 2) ** 2, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), self.lr)

    def train_epoch(self, epoch):
        self.model.train()
        total = correct = 0.0
        for rows in torch.randperm(len(self.labels)).split(self.batch_size):
            logits = self.model(self.images[rows])
            loss = functional.cross_entropy(logits, self.labels[rows])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(rows)
            correct += (logits.argmax(1) == self.labels[rows]).sum().item()
        n = len(self.labels)
        return {"loss": total / n, "accuracy": correct / n, "num_samples": n}

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        images, labels = self.test
        correct = (self.model(images).argmax(1) == labels).sum().item()
        return {"accuracy": (correct, len(labels))}

    def get_weights(self):
        return [p.detach().cpu() for p in self.model.parameters()]

    def set_weights(self, weights):
        with torch.no_grad():
            for param, new in zip(self.model.parameters(), weights, strict=True):
                param.copy_(new)


class ClassificationTrainer(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return ImageClassifier.remote(worker_id, lr=kwargs.get("lr", 0.002))

    def on_train_end(self, history, **kwargs):
        super().on_train_end(history)
        self.save_final_model()


def classification(num_workers: int) -> None:
    trainer = ClassificationTrainer(
        num_workers=num_workers, sync_interval=1, seed=0, eval_interval=1
    )
    with trainer:
        result = trainer.train(epochs=12, dataset="cifar10", batch_size=32)
        print_result(result)


# -- regression without a subclass ---------------------------------------------------------------


@miniray.remote
class LineFitter:
    """Fit y = 3x - 1 with noise by gradient descent."""

    def __init__(self, worker_id: int):
        self.weights = [np.zeros(1), np.zeros(1)]

    def load_data_shard(self, shard_id, num_shards):
        random = np.random.default_rng(shard_id)
        self.x = random.uniform(-1, 1, 500)
        self.y = 3 * self.x - 1 + random.normal(0, 0.1, 500)

    def train_epoch(self, epoch):
        slope, offset = self.weights
        error = slope * self.x + offset - self.y
        self.weights = [slope - 0.5 * np.mean(error * self.x), offset - 0.5 * np.mean(error)]
        return {"loss": float(np.mean(error**2))}

    def get_weights(self):
        return self.weights

    def set_weights(self, weights):
        self.weights = [np.array(w) for w in weights]


def regression(num_workers: int) -> None:
    with DataParallelTrainer(num_workers, worker=LineFitter, progress=False) as trainer:
        result = trainer.train(epochs=60)
        slope, offset = (float(w[0]) for w in trainer.model_weights())
        print(f"y = {slope:.3f} x {offset:+.3f}, loss {result['loss']:.4f}")


# -- a custom loop -------------------------------------------------------------------------------


@miniray.remote
class Walker:
    def __init__(self, worker_id: int):
        self.random = np.random.default_rng(worker_id)
        self.best = 0.0

    def custom_method(self, center, radius):
        """Search for the maximum of a bumpy function near ``center``."""
        x = center + self.random.normal(0, radius, 1000)
        height = np.exp(-((x - 2) ** 2)) + 0.1 * np.cos(8 * x)
        return float(x[height.argmax()]), float(height.max())


class SearchTrainer(BaseTrainer):
    def create_worker(self, worker_id, **kwargs):
        return Walker.remote(worker_id)

    def on_train_start(self, **kwargs):
        self.center, self.radius = 0.0, 1.0

    def train_epoch(self, epoch, **kwargs):
        found = self.call_workers("custom_method", self.center, self.radius)
        self.center, height = max(found, key=lambda pair: pair[1])
        self.radius *= 0.7
        return {"height": height, "spread": statistics.pstdev(x for x, _ in found)}


def custom_loop(num_workers: int) -> None:
    with SearchTrainer(num_workers, progress=False) as trainer:
        result = trainer.train(epochs=15)
        print(f"maximum at x = {trainer.center:.3f}, height {result['height']:.4f}")


def print_result(result) -> None:
    """Print the accuracy and the files that the run created."""
    print(f"\nHeld-out accuracy: {result['val_accuracy']:.1%}\n")
    print("Model: ", result.run_dir / "final_model.safetensors")
    print("Curves:", result.plot())
    print("Report:", result.report())


PARTS = {"classification": classification, "regression": regression, "custom": custom_loop}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--workers", type=int, default=4, help="number of workers")
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"unknown part {part!r}; choose from {', '.join(PARTS)}")
    for part in arguments.parts or PARTS:
        print(f"{part}:")
        PARTS[part](arguments.workers)
