"""Workers and helpers for the DDP tests. Ranks without a trainer run in a pair of actors."""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray.data import shard_indices
from miniray.train.ddp.checks import RankSettings
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.lockstep.rank import RankActor
from miniray.train.workers.context import WorkerContext

SEED = 5


def make_data(n):
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.argmax(1).clamp(max=2))


def make_model(norm=False):
    torch.manual_seed(7)
    middle = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


class Stepper:
    """A model, an optimizer, a loader and a step: all that a DDP worker needs."""

    def __init__(self, worker_id=0, n=64, batch_size=4, norm=False):
        self.model = make_model(norm)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.train_loader = DataLoader(make_data(n), batch_size=batch_size, shuffle=True)
        self.val_loader = DataLoader(make_data(9), batch_size=4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return functional.cross_entropy(self.model(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        out = self.model(x)
        return {
            "loss": functional.cross_entropy(out, y),
            "accuracy": (out.argmax(1) == y).float().mean(),
        }


class Looper:
    """A worker of the parameter-server trainer: it knows nothing of DDP."""

    def __init__(self, worker_id=0, rows=(16, 16), lr=0.1):
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.rows = rows

    def load_data_shard(self, shard_id, num_shards):
        low = sum(self.rows[:shard_id])
        x, y = make_data(sum(self.rows)).tensors
        self.x, self.y = x[low : low + self.rows[shard_id]], y[low : low + self.rows[shard_id]]

    def train_epoch(self, epoch):
        total = 0.0
        for x, y in zip(self.x.split(4), self.y.split(4), strict=True):
            loss = functional.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item() * len(x)
        return {"loss": total / len(self.x), "num_samples": len(self.x)}

    def get_weights(self):
        return [p.detach().cpu() for p in self.model.parameters()]

    def set_weights(self, weights):
        with torch.no_grad():
            for param, new in zip(self.model.parameters(), weights, strict=True):
                param.copy_(new)


class Skipping(Looper):
    """Custom training loop that skips a part of the second batch on rank 1."""

    def __init__(self, worker_id=0, skip="batch"):
        super().__init__(worker_id, rows=(16, 16))
        self.skip = skip if worker_id == 1 else ""

    def train_epoch(self, epoch):
        for number, (x, y) in enumerate(zip(self.x.split(4), self.y.split(4), strict=True)):
            if number == 1 and self.skip == "batch":
                continue
            loss = functional.cross_entropy(self.model(x), y)
            if number == 1 and self.skip == "backward":
                continue
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return {"loss": loss.item()}


#: Reads like an error of a rank that lost a different one, but nothing else caused it.
LOST_CONNECTION = "Connection closed by peer: the database timed out"


class Faulty(Stepper):
    """Worker of which one rank fails in the step ``at``; a file records that it did."""

    def __init__(self, worker_id, how, marker="", at=(0, 2), victim=1):
        super().__init__(worker_id, n=32)
        self.is_victim = worker_id == victim
        self.how, self.marker, self.at = how, marker, tuple(at)

    def training_step(self, batch, batch_idx):
        here = (self.train_loader.batch_sampler.epoch, batch_idx) == self.at
        if not self.is_victim or not here or os.path.exists(self.marker):
            return super().training_step(batch, batch_idx)
        if self.marker:
            open(self.marker, "w").close()
        return getattr(self, self.how)(batch)

    def pid(self):
        return os.getpid()

    def fail(self, batch):
        raise KeyError("a bad row")

    def lose_database(self, batch):
        raise RuntimeError(LOST_CONNECTION)

    def die(self, batch):
        os.kill(os.getpid(), signal.SIGKILL)

    def stop(self, batch):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hang(self, batch):
        time.sleep(1000)  # the line that hangs

    def exit(self, batch):
        sys.exit(3)

    def skip(self, batch):
        return None

    def detach(self, batch):
        return super().training_step(batch, 0).detach()

    def nan(self, batch):
        return super().training_step(batch, 0) * float("nan")

    def leave_out(self, batch):
        self.model(batch[0])
        return self.model[2].bias.sum()

    def parts_only(self, batch):
        return self.model[0](batch[0]).sum()


def one_process(n, size, epochs, clip=None, rows=None, lr=1e-2):
    """(losses by epoch, weights) of plain training on batches of ``size``, in miniray's order."""
    model, data, losses = make_model(), make_data(n), []
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for epoch in range(epochs):
        order = shard_indices(n, 0, 1, shuffle=True, seed=SEED, epoch=epoch)
        batches = torch.tensor(list(order)).split(size) if rows is None else rows
        total = 0.0
        for batch in batches:
            x, y = data[batch]
            loss = functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / n)
    return losses, model.state_dict()


def apart(a, b):
    """The largest difference between two sets of weights."""
    return max((a[key].double() - b[key].double()).abs().max().item() for key in b)


# -- ranks without a trainer ----------------------------------------------------------------------


def local_bytes(worker):
    """Return the bytes of weights and optimizer state in this process."""
    numbers = [v for state in worker.optimizer.state.values() for v in state.values()]
    held = [*worker.model.parameters(), *(v for v in numbers if v.dim())]
    return sum(getattr(value, "_local_tensor", value).nbytes for value in held)


@miniray.remote
class Place:
    """A process in which one rank after the other lives; torch is loaded once."""

    def run(self, cls, arguments, settings, spec, rank, world_size, epochs):
        worker = cls(rank, **arguments)
        WorkerContext(rank, world_size, "cpu").bind(worker)
        actor = RankActor(worker)
        facts = actor.prepare_rank(rank, world_size, settings)
        is_counted = facts["batches"] is not None and not facts["planned"]
        counts = [facts["batches"]] * world_size if is_counted else None
        actor.join_group(spec, counts, False)
        try:
            reports = [actor.run_rank_epoch(epoch) for epoch in range(epochs)]
            return {
                "losses": [report.metrics["loss"] for report in reports],
                "steps": [report.step for report in reports],
                "weights": actor.get_weights(),
                "samples": facts["batches"],
                "shared": actor._replica.state.get_shared(),
                "own": actor.get_state(),
                "bytes": local_bytes(worker),
            }
        finally:
            actor.leave_group()


def run_ranks(
    places,
    cls=Stepper,
    epochs=3,
    uneven="join",
    options=None,
    steps=None,
    compile=False,
    shard="none",
    models=("model",),
    **arguments,
):
    """Run ranks of ``cls`` in these actors; what each has to show at the end."""
    world_size = len(places)
    host = GroupHost(world_size, name="test", timeout=60)
    settings = RankSettings(
        **(steps or {}),
        uneven=uneven,
        seed=SEED,
        ddp_options=options or {},
        compile=compile,
        shard=shard,
        models=models,
        own_process=False,
    )
    calls = [
        place.run.remote(cls, arguments, settings, host.spec, rank, world_size, epochs)
        for rank, place in enumerate(places)
    ]
    try:
        return miniray.get(calls, timeout=50)
    finally:
        host.close()


def read_events(trainer):
    """Return the events of the run, without those about memory."""
    events = trainer.run.read_events()
    return [event for event in events if event["event"] != "checkpoint_memory_reserved"]
