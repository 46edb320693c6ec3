"""Models, data and the training on one process that split models are compared with."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from miniray.train.parallel.plan.layers import seed_context

SEED = 3
#: Of losses and weights, after 20 steps of Adam in float32. Sums over microbatches and shards are
#: made in another order than over a batch: that is all the difference there may be.
TOLERANCE = 2e-4


def make_layers():
    """Eight layers of different cost; an Embedding first, as in a language model."""
    blocks = [
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        for _ in range(5)
    ]
    return [nn.Embedding(12, 16), *blocks, nn.Flatten(), nn.Linear(64, 4)]


def make_model():
    return nn.Sequential(*make_layers())


def make_data(n=40, batch_size=8):
    """Five batches of 8 in an epoch; with n=44 the last has 4."""
    source = torch.Generator().manual_seed(1)
    x = torch.randint(0, 12, (n, 4), generator=source)
    return DataLoader(TensorDataset(x, x.sum(1) % 4), batch_size=batch_size)


def loss(output, target):
    return functional.cross_entropy(output, target)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


PARTS = {"loss": loss, "optimizer": adam, "seed": SEED, "progress": False}


def one_process(epochs=4, n=40, batch_size=8, model=make_model, clip=None):
    """(loss of each epoch, final weights) of plain torch on the same batches."""
    with seed_context(SEED):
        whole = model()
    optimizer = adam(whole.parameters())
    losses = []
    batches = list(make_data(n, batch_size))  # a loader draws a random number when it starts
    torch.manual_seed(SEED)
    for _ in range(epochs):
        total = 0.0
        for x, y in batches:
            value = loss(whole(x), y)
            optimizer.zero_grad()
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(whole.parameters(), clip)
            optimizer.step()
            total += value.item() * len(y)
        losses.append(total / n)
    return losses, whole.state_dict()


def check_same(trainer, result, expected):
    losses, weights = expected
    torch.testing.assert_close(
        torch.tensor([record["loss"] for record in result.history]),
        torch.tensor(losses),
        rtol=0,
        atol=TOLERANCE,
    )
    found = trainer.model_weights()
    assert sorted(found) == sorted(weights)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)


class Attention(nn.Module):
    """With separate projections and a number of heads, as derived plans know it."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.n_heads, self.size = heads, width // heads
        # No bias: that of keys has no gradient but rounding, which Adam would make steps of.
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        rows, length, _ = x.shape
        shape = (rows, length, self.n_heads, self.size)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """Not a row of layers: torch has to trace it to cut it."""

    def __init__(self, blocks=3, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Fault(nn.Module):
    """A layer that goes wrong once, in the second epoch: not where ``marker`` is already."""

    def __init__(self, how, marker, calls):
        super().__init__()
        self.how, self.marker, self.calls = how, marker, calls
        self.done = 0

    def forward(self, x):
        self.done += self.training and x.device.type != "meta"
        if self.done > self.calls and not Path(self.marker).exists():
            Path(self.marker).touch()
            if self.how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(600)
            raise KeyError("a bad layer")
        return x
