"""The run records the result of an epoch as hooks changed it."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import miniray
from miniray.train import (
    Callback,
    Checkpoint,
    CheckpointStore,
    DataParallelTrainer,
    EarlyStopping,
)
from tests.train.workers_for_tests import Counter, Noisy

pytestmark = pytest.mark.usefixtures("_light_workers")


class Gap(DataParallelTrainer):
    """Adds to each result how far its loss is from 2: 0.5, 1, 0.5, 1, ..."""

    def on_epoch_end(self, epoch, result, **kwargs):
        result["gap"] = 0.5 if epoch % 2 == 0 else 1.0


class Doubled(Callback):
    def on_epoch_end(self, trainer, epoch, result, **kwargs):
        result["doubled"] = 2 * result["gap"]


def make(cls, run_dir, callbacks=(), worker=Noisy, **options):
    settings = {"backend": "inline", "progress": False, **options}
    return cls(2, worker=worker, run_dir=run_dir, callbacks=callbacks, **settings)


def lines(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def saved(run_dir):
    """The history in the newest checkpoint."""
    return CheckpointStore(run_dir / "checkpoints").load()[1]["state"]["history"]


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_what_hooks_add_is_in_history_metrics_and_every_checkpoint(tmp_path, backend):
    callbacks = [Doubled(), Checkpoint()]
    with make(Gap, tmp_path / "run", callbacks, backend=backend, loggers="csv") as trainer:
        result = trainer.train(epochs=2)
    with make(Gap, tmp_path / "run", callbacks, backend=backend) as trainer:
        resumed = trainer.train(epochs=3, resume=True)
    assert (result["gap"], result["doubled"], result.best["gap"].epoch) == (1.0, 2.0, 0)
    for records in (resumed.history, lines(tmp_path / "run"), saved(tmp_path / "run")):
        assert [(r["epoch"], r["gap"], r["doubled"]) for r in records] == [
            (0, 0.5, 1.0),
            (1, 1.0, 2.0),
            (2, 0.5, 1.0),
        ]
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert ",gap,doubled," in header


def test_callbacks_go_by_what_the_trainers_own_hook_adds(tmp_path):
    callbacks = [
        EarlyStopping("gap", patience=3),
        Checkpoint(keep_last=1, keep_best=True, monitor="gap"),
    ]
    with make(Gap, tmp_path / "run", callbacks) as trainer:
        result = trainer.train(epochs=20)
    assert result.epochs == 4  # 0.5 at first, and never less
    assert lines(tmp_path / "run")[-1]["stop_reason"] == result["stop_reason"]
    kept = CheckpointStore(tmp_path / "run" / "checkpoints").list()
    assert [c.epoch for c in kept] == [2, 3]  # of equals the newest is the best


@pytest.mark.parametrize("change", ["set", "delete"])
def test_a_hook_cannot_make_another_epoch_of_it(tmp_path, change):
    class Counting(DataParallelTrainer):
        def on_epoch_end(self, epoch, result, **kwargs):
            del result["epoch"]
            if change == "set":
                result["epoch"] = epoch + 1  # for people
            self.save_checkpoint(epoch)

    with make(Counting, tmp_path / "run") as trainer:
        trainer.train(epochs=2)
    with make(Counting, tmp_path / "run") as trainer:
        result = trainer.train(epochs=3, resume=True)
    for records in (result.history, lines(tmp_path / "run"), saved(tmp_path / "run")):
        assert [r["epoch"] for r in records] == [0, 1, 2]


@pytest.mark.parametrize("saves", ["before", "not"])
def test_a_run_that_was_killed_in_a_hook_has_each_epoch_once(tmp_path, saves):
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal
            from miniray.train import DataParallelTrainer
            from tests.train.workers_for_tests import Noisy

            class Killed(DataParallelTrainer):
                def on_epoch_end(self, epoch, result, **kwargs):
                    result["seen"] = True
                    if epoch < 2 or {saves == "before"}:
                        self.save_checkpoint(epoch)
                    if epoch == 2:
                        os.kill(os.getpid(), signal.SIGKILL)

            Killed(2, worker=Noisy, backend="inline", progress=False, run_dir="run").train(5)
            """
        )
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, env={**os.environ, **path})
    assert ended.returncode == -signal.SIGKILL
    with make(DataParallelTrainer, tmp_path / "run") as trainer:
        result = trainer.train(epochs=5, resume=True)
    done = 3 if saves == "before" else 2
    for records in (result.history, lines(tmp_path / "run")):
        assert [r["epoch"] for r in records] == list(range(5))
        assert [r.get("seen") for r in records] == [True] * done + [None] * (5 - done)


@pytest.mark.parametrize("full", [False, True])
def test_a_hook_that_raises_takes_no_epoch_with_it(tmp_path, full, monkeypatch, capfd):
    class Raising(Gap):
        def on_epoch_end(self, epoch, result, **kwargs):
            super().on_epoch_end(epoch, result, **kwargs)
            self.save_checkpoint(epoch)
            if epoch == 1:
                if full:
                    monkeypatch.setattr(self.run, "metrics_file", tmp_path)  # cannot be written
                raise RuntimeError("in the hook")

    with pytest.raises(RuntimeError, match="in the hook"):
        make(Raising, tmp_path / "run").train(epochs=3)
    written = [(r["epoch"], r["gap"]) for r in lines(tmp_path / "run")]
    assert written == [(0, 0.5)] if full else [(0, 0.5), (1, 1.0)]
    assert (f"{tmp_path / 'run'}: " in capfd.readouterr().err) == full
    monkeypatch.undo()
    with make(Gap, tmp_path / "run") as trainer:
        trainer.train(epochs=3, resume=True)
    written = [(r["epoch"], r["gap"]) for r in lines(tmp_path / "run")]
    assert written == [(0, 0.5), (1, 1.0), (2, 0.5)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("backend", ["inline", "local"])
def test_a_hook_may_go_back_to_a_checkpoint(tmp_path, mode, backend):
    class Back(DataParallelTrainer):
        good = None

        def on_epoch_end(self, epoch, result, **kwargs):
            if epoch == 1 and self.good is None:
                self.good = self.save_checkpoint(epoch)
            elif epoch == 3 and self.good is not None:
                at_good, self.good = self.good, None
                self.load_checkpoint(at_good)
                state = CheckpointStore(at_good.parent).load(at_good)[1]
                weights = miniray.get([w.get_weights.remote() for w in self.workers])
                self.then = [float(w[0][0]) for w in weights]
                mine = state["weights"] * (1 if len(state["weights"]) > 1 else 2)
                self.expected = [float(w[0][0]) for w in mine]

    options = {"staleness": 1} if mode == "async" else {}
    with make(
        Back, tmp_path / "run", worker=Counter, mode=mode, backend=backend, **options
    ) as trainer:
        result = trainer.train(epochs=5)  # 0 to 3, and 2 to 4
        stats = trainer.get_sync_stats()
    assert trainer.then == trainer.expected
    for records in (result.history, lines(tmp_path / "run")):
        assert [r["epoch"] for r in records] == [0, 1, 2, 3, 4]
    gone = lines(tmp_path / "run", "metrics.discarded.jsonl")
    assert [r["epoch"] for r in gone] == [2, 3]
    assert result.epochs == 5
    assert stats["last_error"] is None
