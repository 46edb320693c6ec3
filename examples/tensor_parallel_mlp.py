"""Handwritten digits on a model whose layers are cut over workers.

python examples/tensor_parallel_mlp.py               # 2 workers, half of each layer on each
python examples/tensor_parallel_mlp.py --by-hand     # the same with a plan of one's own
python examples/tensor_parallel_mlp.py --workers 4 --tensor-parallel 2  # and 2 copies of the model
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from image_data import load_images
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from miniray.train import ModelParallelTrainer

PLAN = {"enter": "colwise_gather", "blocks.*.fc1": "colwise", "blocks.*.fc2": "rowwise"}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, pixels, width=128, blocks=3):
        super().__init__()
        self.enter = nn.Linear(pixels, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.leave = nn.Linear(width, 10)

    def forward(self, x):
        x = self.enter(x.flatten(1))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--by-hand", action="store_true", help="use PLAN instead of a derived one")
    arguments = parser.parse_args()
    images, labels, test_images, test_labels = map(torch.from_numpy, load_images("digits"))
    copies = max(1, arguments.workers // max(1, arguments.tensor_parallel))
    trainer = ModelParallelTrainer(
        arguments.workers,
        model=partial(Classifier, images[0].numel()),
        loss=functional.cross_entropy,
        optimizer=partial(torch.optim.Adam, lr=0.002),
        data=DataLoader(TensorDataset(images, labels), 64 // copies, shuffle=True),
        val_data=DataLoader(TensorDataset(test_images, test_labels), 128),
        metrics={"accuracy": accuracy},
        tensor_parallel=arguments.tensor_parallel,
        use_gpu=False,  # the model is tiny
        plan=PLAN if arguments.by_hand else None,
        eval_interval=1,
        seed=0,
    )
    with trainer:
        result = trainer.train(arguments.epochs)
        plan = trainer.plan.tensor
        print(f"weights: {plan.whole_bytes:,} bytes, {plan.worker_bytes:,} on each worker")
        print(f"held-out accuracy {result['val_accuracy']:.1%}")
        print("model:", trainer.save_final_model())
