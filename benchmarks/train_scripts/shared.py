"""What all scripts train: a CNN of about a million parameters on 4,096 made-up images.

Importing this also records when each optimizer step ended: a file a process, eight bytes a step,
in the folder ``$BENCH_STEPS``. A hook of torch does it, so no script has a line for it, and a
process that is killed leaves what it had.
"""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

SAMPLES = int(os.environ.get("BENCH_SAMPLES", "4096"))
CLASSES = 10


def make_model() -> nn.Module:
    """1,018,026 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 7 * 7, 640), nn.ReLU(), nn.Linear(640, CLASSES),
    )  # fmt: skip


def make_data(samples: int = SAMPLES, seed: int = 0, noise: float = 3.0) -> TensorDataset:
    """Images of ten patterns under noise; the same patterns whatever the seed."""
    patterns = torch.randn(CLASSES, 1, 28, 28, generator=torch.Generator().manual_seed(1234))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (samples,), generator=random)
    images = patterns[labels] + noise * torch.randn(samples, 1, 28, 28, generator=random)
    return TensorDataset(images, labels)


def _record_steps(folder: str) -> None:
    path = Path(folder)
    files: dict[int, int] = {}  # by process: a forked child has its own

    def stepped(*_: object) -> None:
        now = time.monotonic()
        pid = os.getpid()
        if pid not in files:
            files[pid] = os.open(path / f"{pid}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(files[pid], struct.pack("d", now))

    register_optimizer_step_post_hook(stepped)


if "BENCH_STEPS" in os.environ:
    _record_steps(os.environ["BENCH_STEPS"])
