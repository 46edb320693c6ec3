"""Parts that users add to checkpoints, and checkpoints that can't be loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from miniray.errors import CheckpointError
from miniray.train import BaseTrainer, Checkpoint, CheckpointStore, DataParallelTrainer
from miniray.train.options import RunOptions
from miniray.train.run.checkpointer import Checkpointer


class Worker:
    def __init__(self, worker_id):
        self.w = np.zeros(2)

    def train_epoch(self, epoch):
        self.w = self.w + 1
        return {"loss": 1.0}

    def get_weights(self):
        return [self.w]

    def set_weights(self, weights):
        self.w = np.array(weights[0])


class Counter:
    """A part that a user may write."""

    def __init__(self):
        self.values = np.zeros(1)

    def state_dict(self):
        return {"values": self.values, "note": "counted"}

    def load_state_dict(self, state):
        assert state["note"] == "counted"
        self.values = state["values"]


def make(run_dir, trainer=DataParallelTrainer, **options):
    return trainer(
        1, worker=Worker, run_dir=run_dir, progress=False, backend="inline",
        callbacks=Checkpoint(), **options,
    )  # fmt: skip


def train_one_epoch(run_dir, part=None):
    with make(run_dir) as trainer:
        if part is not None:
            trainer.checkpointer.register("counter", part)
        trainer.train(epochs=1)


def test_registered_part_is_saved_and_restored(tmp_path):
    saved, restored = Counter(), Counter()
    saved.values = np.array([3.5])
    train_one_epoch(tmp_path / "run", saved)
    with make(tmp_path / "run", resume=True) as trainer:
        trainer.checkpointer.register("counter", restored)
        trainer.train(epochs=2)
    assert restored.values.tolist() == [3.5]
    assert trainer.epoch == trainer.state.step == 2


def test_part_that_the_checkpoint_lacks_keeps_its_state(tmp_path):
    train_one_epoch(tmp_path / "run")
    part = Counter()
    with make(tmp_path / "run", resume=True) as trainer:
        trainer.checkpointer.register("counter", part)
        with pytest.warns(UserWarning, match="counter"):
            trainer.train(epochs=2)
    assert part.values.tolist() == [0.0]


@pytest.mark.parametrize(
    ("name", "part", "error"),
    [
        ("weights", Counter(), ValueError),
        ("state", Counter(), ValueError),
        ("not a name", Counter(), ValueError),
        ("counter", object(), TypeError),
        ("counter", Counter, TypeError),
    ],
)
def test_parts_that_cannot_be_registered(name, part, error):
    with pytest.raises(error, match=name):
        make(None).checkpointer.register(name, part)


def test_position_counts_reported_steps(tmp_path):
    class Steps(Worker):
        def train_epoch(self, epoch):
            return {"loss": 1.0, "num_steps": 5}

    with BaseTrainer(1, worker=Steps, run_dir=tmp_path, progress=False, backend="inline") as t:
        t.train(epochs=2)
        assert (t.state.epoch, t.state.step) == (2, 10)


def rewrite(run_dir, change):
    """Write the newest checkpoint of a run again, after ``change(contents)``."""
    store = CheckpointStore(run_dir / "checkpoints")
    epoch, contents = store.load()
    change(contents)
    return store.save(epoch, contents)


def test_older_format_is_named_and_its_weights_can_be_read(tmp_path, raises):
    train_one_epoch(tmp_path / "run")
    path = rewrite(tmp_path / "run", lambda contents: contents.update(format=1))
    with (
        make(tmp_path / "run") as trainer,
        raises(CheckpointError) as caught,
    ):
        trainer.train(epochs=1, resume=True)
    assert caught.value.entry == str(path)
    weights = CheckpointStore(path.parent).load(path)[1]["weights"]
    assert weights[0][0].tolist() == [1.0, 1.0]


def test_checkpoint_of_a_different_kind_of_trainer(tmp_path):
    train_one_epoch(tmp_path / "run")
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    other = Checkpointer("ddp", RunOptions(), print)
    with pytest.raises(CheckpointError, match=r"'workers'.*'ddp'") as caught:
        other.load(store.directory, None, "DDPTrainer")
    assert caught.value.entry == str(store.newest())


def test_checkpoint_lists_its_parts(tmp_path):
    train_one_epoch(tmp_path / "run", Counter())
    path = CheckpointStore(tmp_path / "run" / "checkpoints").newest()
    assert json.loads((path / "state.json").read_text())["keys"] == [
        *("format", "kind", "metrics", "state"),
        *("callbacks", "weights", "workers", "sync", "counter"),
    ]
