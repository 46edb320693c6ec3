"""The run that is soaked: ``python -m tests.soak.driver FOLDER WORKERS``.

Goes on from the newest checkpoint in FOLDER on however many workers, until there is a file
``stop``. A pass over the data takes several rounds (epochs of the trainer), so that checkpoints,
deaths and changes of the number of workers fall into the middle of passes. After each round it
writes down which calls of workers count; each call has written its rows' ids to a file of its own.
"""

import faulthandler
import json
import os
import shutil
import signal
import sys
import uuid
import warnings
from pathlib import Path

import torch

from miniray.data import DataLoader, ParquetDataset
from miniray.data.plan.split import Contiguous, count_positions, find_remaining
from miniray.train import Callback, Checkpoint, DataParallelTrainer
from tests.soak import slowdisk

BATCH = 32
BATCHES = 6  # of a worker in a round
FEATURES = 64
TIMEOUT = 10.0  # seconds for one call to a worker; a round takes a fraction of one


class Regression:
    """Fits a line by SGD with momentum, and keeps count of the rounds that are in its weights."""

    def __init__(self, worker_id, folder):
        torch.set_num_threads(1)
        self.folder = Path(folder)
        (self.folder / "pids" / f"{os.getpid()}").write_text(str(worker_id))
        self.model = torch.nn.Linear(FEATURES, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.003, momentum=0.9)
        self.rounds = torch.zeros(1, dtype=torch.float64)

    def load_data_shard(self, shard_id, num_shards, data):
        assert "slow" in slowdisk.SlowDisk.protocol  # known to fsspec in this process too
        self.loader, self.world_size = data, num_shards

    def train_epoch(self, epoch):
        state = self.loader.state_dict()
        if not state["taken"]:  # a new pass, or the trainer has shared out anew what is left
            self.batches = iter(self.loader)
        rest = find_remaining(state["n"], state["history"], Contiguous())
        left = count_positions(rest) - state["taken"] * self.world_size
        # All workers must agree on whether the pass ends in this round: by the largest share.
        ends = -(-left // self.world_size) <= BATCH * BATCHES
        rows, loss = [], 0.0
        for _ in range(BATCHES):
            batch = next(self.batches, None)
            if batch is None:
                break
            rows += batch["id"].tolist()
            loss = self._step(batch["x"], batch["y"])
        if ends:
            assert next(self.batches, None) is None, f"rows beyond what {state} says are left"
        self.rounds += 1
        call = uuid.uuid4().hex
        path = self.folder / "calls" / f"{epoch:06d}-{call}.json"
        path.write_text(json.dumps({"pass": state["epoch"], "rows": rows}))
        return {"loss": loss, "num_samples": len(rows), "call": call}

    def _step(self, x, y):
        inputs = torch.stack([torch.as_tensor(row, dtype=torch.float32) for row in x])
        wanted = torch.as_tensor(y, dtype=torch.float32)[:, None]
        loss = torch.nn.functional.mse_loss(self.model(inputs), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def get_weights(self):
        return [*(p.detach() for p in self.model.parameters()), self.rounds]

    def set_weights(self, weights):
        with torch.no_grad():
            for mine, new in zip(self.get_weights(), weights, strict=True):
                mine.copy_(new)

    def get_state(self):
        return self.optimizer.state_dict()

    def set_state(self, state):
        self.optimizer.load_state_dict(state)


class SoakTrainer(DataParallelTrainer):
    """Knows which calls gave the results that were used."""

    calls = ()

    def call_workers(self, method, *args, **kwargs):
        results = super().call_workers(method, *args, **kwargs)
        if method == "train_epoch":
            self.calls = [result.pop("call") for result in results]
        return results


class Ledger(Callback):
    """Writes down a round before its checkpoint: a round without one is written again.

    ``lost`` has the calls of workers that were lost after they had given their results.
    """

    def __init__(self, folder):
        self.folder = folder
        self.replaced = []

    def on_epoch_start(self, trainer, epoch):
        trainer.calls = ()
        self.replaced = []

    def on_worker_replaced(self, trainer, worker_id):
        if trainer.calls:
            self.replaced.append(trainer.calls[worker_id])

    def on_epoch_end(self, trainer, epoch, result):
        record = {
            "calls": trainer.calls,
            "lost": self.replaced,
            "loss": result["loss"],
            "rounds": trainer.model_weights()[-1].item(),
            "workers": trainer.num_workers,
        }
        path = self.folder / "rounds" / f"{epoch:06d}.json"
        path.with_suffix(".tmp").write_text(json.dumps(record))
        path.with_suffix(".tmp").replace(path)
        if (self.folder / "stop").exists():
            trainer.should_stop, trainer.stop_reason = True, "asked to"


def main(folder, workers):
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background jobs
    warnings.filterwarnings("ignore", "resuming a run of")
    files = sorted(str(path) for path in (folder / "data").glob("*.parquet"))
    dataset = ParquetDataset(
        [f"slow://{path}" for path in files], shuffle=True, seed=7, memory_budget="8MB"
    )
    trainer = SoakTrainer(
        workers, 1, "average", worker=Regression, data=DataLoader(dataset, BATCH, prefetch=2),
        run_dir=folder / "run", max_failures=1_000_000, worker_timeout=TIMEOUT, progress=False,
        backend="local", callbacks=[Ledger(folder), Checkpoint(keep_last=2)],
    )  # fmt: skip
    resume = any((folder / "run" / "checkpoints").glob("epoch-*"))
    if not resume:  # killed before its first checkpoint: from the start
        shutil.rmtree(folder / "run", ignore_errors=True)
    with trainer:
        trainer.train(1_000_000, resume=resume, folder=str(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
