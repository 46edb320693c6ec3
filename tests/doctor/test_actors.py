"""Workers of a trainer have black boxes."""

import os
import re
import sys

import numpy as np
import pytest

import miniray
from miniray.doctor import read_run, recorder, sites
from miniray.doctor.diagnose import diagnose
from miniray.doctor.sites import is_users
from miniray.doctor.stacks import main_stack, request_stacks
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

    def sites(self):
        """A line of ours; a call without one, from miniray's own code; and this process's stack."""
        own = sites.call_site(sys._getframe())
        without = sites.call_site(sys._getframe(1))
        stack = request_stacks(os.environ["MINIRAY_RUN_DIR"], [recorder.current().rank])
        return own, without, main_stack(next(iter(stack.values())))


def test_a_worker_records_its_methods_and_the_users_lines(tmp_path):
    with BaseTrainer(2, worker=Worker, run_dir=tmp_path / "run", progress=False) as trainer:
        result = trainer.train(1)
        assert result["value"] == 1.5
        run = read_run(trainer.run.path)
        assert sorted(run.ranks) == [0, 1]
        assert {rank.launcher for rank in run.ranks.values()} == {"miniray"}
        assert all(rank.process.alive for rank in run.ranks.values())
        assert {rank.epoch for rank in run.ranks.values()} == {0}

        section = miniray.get(trainer.workers[0].section.remote())
        assert section.name == section.site.function == "section"
        assert section.site.file == __file__

        # The command line that started the worker is on its stack, too, and is nobody's line.
        own, without, stack = miniray.get(trainer.workers[0].sites.remote())
        assert own.split("\0")[0] == __file__
        assert without == ""
        assert stack
        assert [frame.function for frame in stack if is_users(frame.file)] == ["sites"]


@miniray.remote
class Numpy:
    """Its steps are its own affair: only what it returns of an epoch can be seen."""

    def __init__(self, worker_id):
        self.id = worker_id

    def train_epoch(self, epoch):
        bad = self.id == 1 and epoch >= 2
        return {"d_loss": np.float32("nan") if bad else 0.5, "longest": float("inf"), "loss": "?"}


def test_losses_of_workers_without_torch_are_looked_at(tmp_path):
    with BaseTrainer(2, worker=Numpy, run_dir=tmp_path / "run", progress=False) as trainer:
        trainer.train(4)
        findings = diagnose(trainer.run.path).findings
    (finding,) = findings
    assert (finding.code, finding.ranks) == ("non-finite-loss", (1,))
    assert re.findall(r"epoch (\d+) \((\w+)\)", finding.title) == [("3", "NaN")]
    (evidence,) = finding.evidence  # two epochs of rank 1, of which the third epoch is the first
    assert re.findall(r"\d+", evidence) == ["1", "2", "3"]
    assert finding.site.function == "train_epoch"
    assert "averaged" in finding.cause


def test_the_inline_engine_has_no_boxes(tmp_path):
    with (
        BaseTrainer(
            1, worker=Worker, run_dir=tmp_path / "run", backend="inline", progress=False
        ) as trainer,
        pytest.raises(AttributeError),
    ):  # there is no recorder to ask for its rank
        trainer.train(1)
    assert not (tmp_path / "run" / "ranks").exists()
