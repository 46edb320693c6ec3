"""Sharded data and workers that crash: each pass has every row once, and the run continues."""

import itertools
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import miniray
from miniray.data import DataLoader, IndexedDataset
from miniray.errors import ActorDiedError
from miniray.train import DataParallelTrainer

pytestmark = [
    pytest.mark.usefixtures("_light_workers"),
    pytest.mark.filterwarnings("ignore:resuming a run of"),
]

ROWS = 20


@miniray.remote
class Doomed:
    """Worker that reads ``batches`` batches of two rows per epoch and counts calls across restarts.

    ``deaths`` are calls that kill it: "train-1-0" is worker 1's first ``train_epoch``.
    """

    def __init__(self, worker_id, folder):
        self.worker_id, self.folder, self.deaths = worker_id, Path(folder), ()

    def _call(self, method):
        earlier = list(self.folder.glob(f"{method}-{self.worker_id}-*"))
        name = f"{method}-{self.worker_id}-{len(earlier)}"
        (self.folder / name).touch()
        if name in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def load_data_shard(self, shard_id, num_shards, data, deaths=(), batches=None):
        self.loader, self.deaths, self.batches = DataLoader(data, 2), deaths, batches
        self._call("load")

    def train_epoch(self, epoch):
        batches = itertools.islice(self.loader, self.batches)
        rows = [row for batch in batches for row in batch["x"].tolist()]
        self._call("train")
        with open(self.folder / "rows.log", "a") as file:
            file.writelines(f"{epoch} {row}\n" for row in rows)
        return {"loss": 0.0, "num_samples": len(rows)}

    def get_weights(self):
        self._call("get")
        return [np.zeros(1)]

    def set_weights(self, weights):
        self._call("set")


def train(folder, workers, epochs, **kwargs):
    """Train, save, and give the number of workers that were replaced."""
    trainer = DataParallelTrainer(
        worker=Doomed,
        num_workers=workers,
        data=IndexedDataset([{"x": i} for i in range(ROWS)], shuffle=True, seed=5),
        run_dir=folder / "run",
        backend="local",
        progress=False,
        max_failures=2,
    )
    with trainer:
        resume = (folder / "run").exists()
        trainer.train(epochs, folder=str(folder), resume=resume, **kwargs)
        trainer.save_checkpoint()
    events = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in events].count("worker_failed")


def delivered(folder, *epochs):
    lines = (folder / "rows.log").read_text().splitlines()
    pairs = [tuple(map(int, line.split())) for line in lines]
    return sorted(row for epoch, row in pairs if epoch in epochs)


def test_lost_in_the_middle_of_a_pass(tmp_path):
    """Two epochs of 8 rows; worker 1 is lost in the second, and the 4 rows left go to three."""
    assert train(tmp_path, 2, 2, deaths=["train-1-1"], batches=2) == 1
    assert len(set(delivered(tmp_path, 0, 1))) == len(delivered(tmp_path, 0, 1)) == 16
    train(tmp_path, 3, 3)
    assert delivered(tmp_path, 0, 1, 2) == list(range(ROWS))


@pytest.mark.parametrize(
    ("deaths", "failures"),
    [
        (["get-1-0"], 1),  # after its result, before its weights were taken
        (["get-0-3"], 1),  # when its weights were wanted for the checkpoint
        (["set-1-1"], 1),  # when the combined weights were given out
        (["train-1-0", "load-1-1"], 2),  # and its replacement while it gets its shard
        (["train-1-0", "set-1-1"], 2),  # or while it gets the latest weights
        (["get-1-0", "set-1-2"], 2),  # or a survivor's
    ],
)
def test_rows_follow_results(tmp_path, deaths, failures):
    assert train(tmp_path, 2, 2, deaths=deaths) == failures
    assert delivered(tmp_path, 0) == delivered(tmp_path, 1) == list(range(ROWS))


def test_replacements_of_replacements_count(tmp_path):
    with pytest.raises(ActorDiedError, match=r"load_data_shard\(\)") as caught:
        train(tmp_path, 2, 1, deaths=["train-1-0", "load-1-1", "load-1-2"])
    assert (caught.value.worker, caught.value.epoch) == (1, 0)
