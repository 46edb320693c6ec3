"""Train a classifier of handwritten digits with DDP on any number of workers.

python examples/ddp_digits.py              # 2 workers
python examples/ddp_digits.py --workers 4  # the same global batch size
"""

from __future__ import annotations

import argparse

import torch
from image_data import load_images
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from miniray.train import DDPTrainer


class Digits:
    def __init__(self, worker_id, batch_size=32):
        images, labels, test_images, test_labels = map(torch.from_numpy, load_images("digits"))
        self.model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32 * (images.shape[2] // 2) ** 2, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)
        train, test = TensorDataset(images, labels), TensorDataset(test_images, test_labels)
        self.train_loader = DataLoader(train, batch_size, shuffle=True)
        self.val_loader = DataLoader(test, batch_size=128)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self.model(images)
        accuracy = (logits.argmax(1) == labels).float().mean()
        return {"loss": functional.cross_entropy(logits, labels), "accuracy": accuracy}

    validation_step = training_step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="number of workers")
    parser.add_argument("--epochs", type=int, default=10, help="number of epochs")
    parser.add_argument("--batch", type=int, default=64, help="global batch size")
    arguments = parser.parse_args()
    trainer = DDPTrainer(
        arguments.workers,
        worker=Digits,
        use_gpu=False,  # the model is tiny
        seed=0,
        eval_interval=1,
        clip_norm=1.0,
    )
    with trainer:
        result = trainer.train(arguments.epochs, batch_size=arguments.batch // arguments.workers)
        print(f"Held-out accuracy: {result['val_accuracy']:.1%}")
        print("Model: ", trainer.save_final_model())
        print("Report:", result.report())
