"""Compare sync intervals and strategies: loss reached and bytes transferred.

    python benchmarks/sync_interval.py [--quick] [--seeds N] [--json PATH] [--markdown]

The CNN of ``train.py`` on 4 workers for 20 epochs of 8 batches of 64 a worker, with Adam. Every
batch is new, so the loss on held-out images tells how well it was trained, not how much it learnt
by heart. Bytes are those of ``get_sync_stats()``: what goes to the server and back. The last line
is what averaging gradients in every step (DistributedDataParallel) would reach: one process with
batches of 256; its bytes are counted the same way, each worker's gradients there and back.

Figures are medians over seeds; the JSON file has the curve of every run. Nothing here depends on
how busy the machine is.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).with_name("train_scripts")))

import common
import torch
from common import Line, median
from shared import make_data, make_model
from torch.nn import functional

import miniray
from miniray.train import DataParallelTrainer, TorchWorker

WORKERS, EPOCHS, STEPS, BATCH = 4, 20, 8, 64
NOISE = 12.0
HELD_OUT = 2048

#: Title, interval in epochs, strategy and its options.
CASES: list[tuple[str, int, str, dict[str, float]]] = [
    ("sync_interval=1, average", 1, "average", {}),
    ("sync_interval=5, average", 5, "average", {}),
    ("sync_interval=10, average", 10, "average", {}),
    ("sync_interval=1, diloco", 1, "diloco", {}),
    ("sync_interval=5, diloco", 5, "diloco", {}),
    ("sync_interval=10, diloco", 10, "diloco", {}),
]
EVERY_STEP = "gradients in every step"


def train_on(model: Any, optimizer: Any, images: Any, labels: Any, batch: int) -> None:
    for rows in torch.arange(len(labels)).split(batch):
        loss = functional.cross_entropy(model(images[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def data_of(seed: int, worker_id: int, epoch: int) -> tuple[Any, Any]:
    """New images: no two of (seed, worker, epoch) have the same."""
    number = (seed * EPOCHS + epoch) * WORKERS + worker_id
    return make_data(STEPS * BATCH, seed=1 + number, noise=NOISE).tensors


@functools.cache
def held_out() -> tuple[Any, Any]:
    """Images no run is trained on."""
    return make_data(HELD_OUT, seed=0, noise=NOISE).tensors


@torch.no_grad()
def score(model: Any) -> tuple[float, float]:
    """Loss and accuracy on the held-out images."""
    images, labels = held_out()
    logits = model(images)
    loss = functional.cross_entropy(logits, labels).item()
    return loss, (logits.argmax(1) == labels).float().mean().item()


class Worker(TorchWorker):
    def setup(self, seed):
        self.seed = seed
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def train_epoch(self, epoch):
        images, labels = data_of(self.seed, self.worker_id, epoch)
        train_on(self.model, self.optimizer, images, labels, BATCH)
        return {}


class Trainer(DataParallelTrainer):
    """Keeps the loss of the combined model after every sync, and the bytes moved until then."""

    def on_train_start(self, **kwargs):
        self.curve = []

    def on_epoch_end(self, epoch, result, **kwargs):
        if result["synced"]:
            model = make_model()
            model.load_state_dict(self.model_weights())
            loss, accuracy = score(model)
            moved = self.get_sync_stats()["bytes"]
            point = {"epoch": epoch + 1, "bytes": moved, "loss": loss, "accuracy": accuracy}
            self.curve.append(point)


def run_case(interval: int, strategy: str, options: dict[str, float], seed: int, epochs: int):
    with (
        tempfile.TemporaryDirectory() as folder,
        Trainer(
            WORKERS, interval, strategy, worker=Worker, seed=seed, run_dir=f"{folder}/run",
            progress=False, **options,
        ) as trainer,
    ):  # fmt: skip
        trainer.train(epochs=epochs, seed=seed)
        return trainer.curve


def run_every_step(seed: int, epochs: int) -> list[dict[str, float]]:
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    moved_a_step = 2 * WORKERS * sum(p.nbytes for p in model.parameters())
    curve = []
    for epoch in range(epochs):
        parts = [data_of(seed, worker, epoch) for worker in range(WORKERS)]
        # Step by step what the workers have: a batch of each.
        images, labels = (
            torch.stack([part[i].unflatten(0, (STEPS, BATCH)) for part in parts], 1).flatten(0, 2)
            for i in (0, 1)
        )
        train_on(model, optimizer, images, labels, WORKERS * BATCH)
        loss, accuracy = score(model)
        moved = (epoch + 1) * STEPS * moved_a_step
        curve.append({"epoch": epoch + 1, "bytes": moved, "loss": loss, "accuracy": accuracy})
    return curve


def summarise(curves: dict[str, list[list[dict[str, float]]]]) -> list[Line]:
    """A line a case: where it ended. The last cell is its bytes against those of interval 1."""
    lines = []
    first = median([curve[-1]["bytes"] for curve in curves[CASES[0][0]]])
    for title, runs in curves.items():
        ends = {key: median([curve[-1][key] for curve in runs]) for key in runs[0][-1]}
        moved = f"{ends['bytes'] / 1e6:,.0f} MB"
        cells = [f"{ends['loss']:.3f}", f"{ends['accuracy']:.1%}", moved]
        lines.append(Line(title, [*cells, f"{ends['bytes'] / first:.2f}×"]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, 10 epochs")
    parser.add_argument("--seeds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--json", type=Path, default=common.RESULTS / "sync_interval.json", metavar="PATH"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    arguments = parser.parse_args()
    seeds, epochs = (1, 10) if arguments.quick else (arguments.seeds, EPOCHS)
    started = common.stamp()
    curves: dict[str, list[list[dict[str, float]]]] = {}
    with miniray.init(backend="local"):  # one engine for all: torch is loaded once
        for seed in range(seeds):
            for title, interval, strategy, options in CASES:
                print(f"{seed + 1}/{seeds}  {title}", flush=True)
                curve = run_case(interval, strategy, options, seed, epochs)
                curves.setdefault(title, []).append(curve)
            curves.setdefault(EVERY_STEP, []).append(run_every_step(seed, epochs))
    lines = summarise(curves)
    columns = ["held-out loss", "accuracy", "moved", "to interval 1"]
    if arguments.markdown:
        print(common.markdown_table(columns, lines))
    else:
        title = f"a CNN of 1 M parameters, {WORKERS} workers, {epochs} epochs of {STEPS} steps"
        common.print_table(title, columns, lines)
    record = {
        "started": started,
        "finished": common.stamp(),
        "machine": common.machine(),
        "versions": common.versions("miniray", "torch", "numpy"),
        "seeds": seeds,
        "epochs": epochs,
        "curves": curves,
        "table": [vars(line) for line in lines],
    }
    common.write_json(arguments.json, record)
    print(f"all curves: {arguments.json}")


if __name__ == "__main__":
    main()
