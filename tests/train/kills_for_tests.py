"""Runs whose ranks, or whose driver, are killed in planned phases; for every kind of trainer."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from miniray.train import (
    Callback,
    DDPTrainer,
    ModelParallelTrainer,
    PipelineParallelTrainer,
)
from miniray.train.lockstep.snapshots import arena
from miniray.train.workers.context import WorkerContext
from tests.train.steps_for_tests import EveryCheckpoint

KINDS = ("ddp", "full", "pipeline", "tensor")
PHASES = (
    *("data", "forward", "backward", "optimizer"),
    *("snapshot", "checkpoint", "evaluation", "epoch end"),
)
STEPS = 8  # in each of two epochs
SNAPSHOT_EVERY = 2
ACTION_EVERY = 4  # steps between two evaluations, and between two checkpoints
VICTIM = 1
DRIVER = "driver"  # a phase in which the victim kills the driver


class _Process:
    """Counters of this rank since it started."""

    steps = 0
    copies = 0  # of this snapshot


@dataclasses.dataclass(frozen=True)
class Plan:
    """Kills in ``places``, one after the other. Files in ``folder`` remember which have happened.

    A place is a phase, and the least number of steps that the rank makes before it since its start.
    """

    folder: str
    kind: str
    places: tuple[tuple[str, int], ...] = ()

    def start(self):
        """Record the process of a rank, and watch its snapshots."""
        self._path(f"pid-{WorkerContext.from_environment().rank}").write_text(str(os.getpid()))
        if any(phase == "snapshot" for phase, _ in self.places):
            copy_bytes = arena._copy_bytes

            def copy_and_die(piece, target):
                copy_bytes(piece, target)
                _Process.copies += 1
                if _Process.copies > 3:  # some tensors of this snapshot are written
                    self.at("snapshot")

            arena._copy_bytes = copy_and_die

    def at(self, phase):
        """Die if this is the next place, and this process is the victim."""
        if WorkerContext.from_environment().rank != self.get_victim(phase):
            return
        due, steps = self.get_next()
        if _Process.steps < steps:
            return
        if due == phase:
            self.kill(os.getpid())
        elif due == DRIVER and phase == "forward":
            self.kill(int(self._path("pid-driver").read_text()))

    def get_victim(self, phase):
        """Return the rank to kill. If the model is split, rank 0 loads the data for all ranks."""
        return 0 if phase == "data" and self.kind in ("pipeline", "tensor") else VICTIM

    def get_next(self):
        done = self.count_done()
        return self.places[done] if done < len(self.places) else ("", 0)

    def count_done(self):
        return sum(self._path(f"killed-{n}").exists() for n in range(len(self.places)))

    def kill(self, pid):
        self._path(f"killed-{self.count_done()}").touch()
        os.kill(pid, signal.SIGKILL)

    def kill_rank(self, rank):
        self.kill(int(self._path(f"pid-{rank}").read_text()))

    def _path(self, name):
        return Path(self.folder, name)

    # -- what users' code calls -------------------------------------------------------------------

    def watch_optimizer(self, optimizer):
        def count(*_):
            _Process.steps += 1
            _Process.copies = 0

        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        optimizer.register_step_post_hook(count)
        return optimizer

    def create_optimizer(self, parameters):
        return self.watch_optimizer(torch.optim.Adam(parameters, lr=1e-2))

    def create_scheduler(self, optimizer):
        """Return a scheduler that is stepped at the end of each epoch."""

        def decay(epoch):
            if epoch:
                self.at("epoch end")
            return 0.9**epoch

        return torch.optim.lr_scheduler.LambdaLR(optimizer, decay)


class Noisy(Dataset):
    """Samples with random noise."""

    def __init__(self, size, plan):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(3))
        self.y, self.plan = self.x.argmax(1).clamp(max=2), plan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.plan.at("data")
        return self.x[index] + 0.1 * torch.randn(4), self.y[index]


class Watched(nn.Module):
    """Dies in its forward or backward pass, or in an evaluation."""

    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def forward(self, x):
        if not self.training:
            self.plan.at("evaluation")
        elif x.requires_grad:
            self.plan.at("forward")
            x.register_hook(lambda _: self.plan.at("backward"))
        return x


def make_val_data():
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(4))
    return DataLoader(TensorDataset(x, x.argmax(1).clamp(max=2)), batch_size=8)


class Worker:
    """Trains with dropout and Adam; with batch norm unless the model is sharded."""

    def __init__(self, worker_id, world_size, plan):
        torch.manual_seed(7)
        plan.start()
        norm = [] if plan.kind == "full" else [nn.BatchNorm1d(16)]
        layers = [nn.Linear(4, 16), *norm, Watched(plan), nn.Tanh(), nn.Dropout(0.2)]
        self.model = nn.Sequential(*layers, nn.Linear(16, 3))
        self.optimizer = plan.create_optimizer(self.model.parameters())
        self.scheduler = plan.create_scheduler(self.optimizer)
        data = Noisy(STEPS * 4 * world_size, plan)
        self.train_loader = DataLoader(data, batch_size=4, shuffle=True)
        self.val_loader = make_val_data()

    def training_step(self, batch, batch_idx):
        return functional.cross_entropy(self.model(batch[0]), batch[1])

    validation_step = training_step


def make_layers(plan, stages):
    """Return layers of which every stage of a pipeline has one that can die."""
    torch.manual_seed(1)
    sizes = [4, *[12] * (stages - 1)]
    blocks = [[nn.Linear(n, 12), Watched(plan), nn.Dropout(0.2), nn.Tanh()] for n in sizes]
    return [layer for block in blocks for layer in block] + [nn.Linear(12, 3)]


class KillInCheckpoint(Callback):
    """Kills a rank while the driver collects the state for a checkpoint."""

    def __init__(self, plan):
        self.plan = plan

    def get_state(self):
        if self.plan.get_next()[0] == "checkpoint":
            self.plan.kill_rank(VICTIM)
        return {}


def create_trainer(kind, world_size, plan, **options):
    checkpoint = EveryCheckpoint(every_steps=ACTION_EVERY, keep_last=None)
    common = {
        "seed": 5,
        "progress": False,
        "snapshot_every": SNAPSHOT_EVERY,
        "eval_every_steps": ACTION_EVERY,
        "max_failures": len(plan.places) + 1,
        "callbacks": [KillInCheckpoint(plan), checkpoint],
        **options,
    }
    if kind in ("ddp", "full"):
        shard = "none" if kind == "ddp" else "full"
        return DDPTrainer(world_size, worker=Worker, shard=shard, **common)

    def make_stages():
        plan.start()
        return make_layers(plan, world_size)

    def make_model():
        plan.start()
        return nn.Sequential(*make_layers(plan, 2))

    common |= {
        "loss": functional.cross_entropy,
        "optimizer": plan.create_optimizer,
        "scheduler": plan.create_scheduler,
        "data": lambda: DataLoader(Noisy(STEPS * 8, plan), batch_size=8, shuffle=True),
        "val_data": make_val_data,
        "microbatches": 4 if kind == "pipeline" else 2,
    }
    if kind == "tensor":
        return ModelParallelTrainer(world_size, model=make_model, **common)
    sizes = [4] * (world_size - 1) + [5]
    return PipelineParallelTrainer(world_size, model=make_stages, layers_per_stage=sizes, **common)


def train(kind, world_size, plan, resume=False, **options):
    """Train two epochs; return metrics, scores, weights and events."""
    with create_trainer(kind, world_size, plan, **options) as trainer:
        own = {"plan": plan, "world_size": world_size} if kind in ("ddp", "full") else {}
        result = trainer.train(2, resume=resume, **own)
        names = ("epoch", "step", "loss", "num_samples", "val_loss", "val_num_samples")
        metrics = [{name: record.get(name) for name in names} for record in result.history]
        records = trainer.run.read_steps()
        scores = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
        return metrics, scores, trainer.model_weights(), trainer.run.read_events()


_undisturbed = {}


def train_undisturbed(kind, world_size, folder):
    """Return what ``train`` does without a kill, from an earlier test if there was one."""
    key = (kind, world_size)
    if key not in _undisturbed:
        _undisturbed[key] = train(*key, Plan(str(folder), kind), run_dir="undisturbed")
    return _undisturbed[key]


def check_equal(found, expected):
    assert found[0] == expected[0]
    assert found[1] == expected[1]
    assert list(found[2]) == list(expected[2])
    assert all(torch.equal(found[2][name], value) for name, value in expected[2].items())


def check_recovery(kind, world_size, places, folder):
    """Compare a run that loses a rank in these places with one that loses none."""
    expected = train_undisturbed(kind, world_size, folder)
    plan = Plan(str(folder), kind, places)
    found = train(kind, world_size, plan, run_dir="run")
    check_equal(found, expected)
    restarts = [event for event in found[3] if event["event"] == "ranks_restarted"]
    assert plan.count_done() == len(restarts) == len(places)
    for event, (phase, _) in zip(restarts, places, strict=True):
        assert event["rank"] == plan.get_victim(phase)
    return restarts


def main(outcome, kind, world_size, *places):
    """Train in the current directory, and write the result to the file ``outcome``."""
    folder = os.getcwd()
    Path(folder, "pid-driver").write_text(str(os.getpid()))
    named = [place.rpartition(":") for place in places]
    plan = Plan(folder, kind, tuple((phase, int(step)) for phase, _, step in named))
    found = train(kind, int(world_size), plan, "auto", run_dir="run")
    Path(outcome).write_bytes(pickle.dumps(found))
