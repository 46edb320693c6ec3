"""Train a small DCGAN on digits; four workers average their weights every five epochs.

    python examples/distributed_gan_v2.py --epochs 40

Writes a grid of samples to the run directory every ten epochs.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from image_data import load_digits_images
from torch import nn
from torch.nn import functional

import miniray
from miniray.train import DataParallelTrainer

NOISE = 32


def make_generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def make_discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(64 * 4, 1),
    )  # fmt: skip


@miniray.remote
class GANWorker:
    def __init__(self, worker_id: int, lr: float):
        self.g, self.d = make_generator(), make_discriminator()
        self.g_optimizer = torch.optim.Adam(self.g.parameters(), lr, betas=(0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(self.d.parameters(), lr, betas=(0.5, 0.999))

    def load_data_shard(self, shard_id, num_shards, batch_size=64):
        images = torch.from_numpy(load_digits_images()[0])
        self.images, self.batch_size = images[shard_id::num_shards], batch_size

    def train_epoch(self, epoch):
        g_losses, d_losses = [], []
        for rows in torch.randperm(len(self.images)).split(self.batch_size):
            real, noise = self.images[rows], torch.randn(len(rows), NOISE, 1, 1)
            fake = self.g(noise)
            d_real, d_fake = self.d(real), self.d(fake.detach())
            d_loss = functional.softplus(-d_real).mean() + functional.softplus(d_fake).mean()
            self.d_optimizer.zero_grad()
            d_loss.backward()
            self.d_optimizer.step()
            g_loss = functional.softplus(-self.d(fake)).mean()
            self.g_optimizer.zero_grad()
            g_loss.backward()
            self.g_optimizer.step()
            g_losses.append(g_loss.item())
            d_losses.append(d_loss.item())
        return {"g_loss": np.mean(g_losses), "d_loss": np.mean(d_losses)}

    # Include BatchNorm's running statistics. Without them, the averaged generator would draw
    # different images.
    def get_weights(self):
        return {"g": self.g.state_dict(), "d": self.d.state_dict()}

    def set_weights(self, weights):
        self.g.load_state_dict(weights["g"])
        self.d.load_state_dict(weights["d"])

    @torch.no_grad()
    def sample(self, count):
        self.g.eval()
        images = self.g(torch.randn(count, NOISE, 1, 1)).numpy()
        self.g.train()
        return images


class GANTrainer(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return GANWorker.remote(worker_id, kwargs["lr"])

    def on_epoch_end(self, epoch, result, **kwargs):
        super().on_epoch_end(epoch, result, **kwargs)
        if (epoch + 1) % 10 == 0:
            images = miniray.get(self.workers[0].sample.remote(64))
            print("Samples:", save_grid(images, self.run.path / f"samples-{epoch + 1:03d}.png"))
            self.save_checkpoint(epoch)


def save_grid(images: np.ndarray, path):
    """Save 64 images as one grid."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    framed = np.pad(images[:, 0], ((0, 0), (1, 1), (1, 1)), constant_values=0.2)
    grid = framed.reshape(8, 8, 10, 10).transpose(0, 2, 1, 3).reshape(80, 80)
    pyplot.imsave(path, np.kron(grid, np.ones((5, 5))), cmap="gray", vmin=-1, vmax=1)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40, help="number of epochs")
    parser.add_argument("--workers", type=int, default=4, help="number of workers")
    arguments = parser.parse_args()
    with GANTrainer(num_workers=arguments.workers, sync_interval=5, seed=0) as trainer:
        result = trainer.train(epochs=arguments.epochs, lr=2e-3, batch_size=64)
        print(f"g_loss {result['g_loss']:.3f}  d_loss {result['d_loss']:.3f}")
        print("Curves:", result.plot())
        print("Report:", result.report())
