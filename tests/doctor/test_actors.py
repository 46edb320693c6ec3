"""Workers of a trainer have black boxes."""

import os

import numpy as np
import pytest

import miniray
from miniray.doctor import read_run, recorder
from miniray.train import BaseTrainer


@miniray.remote
class Worker:
    def train_epoch(self, epoch):
        current = recorder.current()
        return {"rank": current.rank, "pid": os.getpid(), "value": self.own()}

    def own(self):
        return np.float64(1.5)

    def section(self):
        return read_run(os.environ["MINIRAY_RUN_DIR"]).ranks[0].section


@pytest.fixture
def trainer(tmp_path):
    with BaseTrainer(2, worker=Worker, run_dir=tmp_path / "run", progress=False) as trainer:
        yield trainer


def test_every_worker_records(trainer):
    result = trainer.train(1)
    assert result["value"] == 1.5
    run = read_run(trainer.run.path)
    assert sorted(run.ranks) == [0, 1]
    assert {rank.launcher for rank in run.ranks.values()} == {"miniray"}
    assert all(rank.process.alive for rank in run.ranks.values())


def test_the_method_that_runs_is_the_section(trainer):
    trainer.train(0)
    assert miniray.get(trainer.workers[0].section.remote()).name == "section"


def test_the_inline_engine_has_no_boxes(tmp_path):
    with BaseTrainer(
        1, worker=Worker, run_dir=tmp_path / "run", backend="inline", progress=False
    ) as trainer:
        with pytest.raises(AttributeError):  # there is no recorder to ask for its rank
            trainer.train(1)
    assert not (tmp_path / "run" / "ranks").exists()
