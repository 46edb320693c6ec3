"""``mode="async"``: no worker waits for a slow one, and every epoch is still counted once."""

import os
import time
from collections import Counter as Tally
from pathlib import Path

import numpy as np
import pytest

import miniray
from miniray.train import Callback, Checkpoint, DataParallelTrainer
from tests.time_scale import TIME_SCALE

pytestmark = pytest.mark.usefixtures("_light_workers")


def wait_for(path):
    deadline = time.monotonic() + 40
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.01)


@miniray.remote
class Noting:
    """Leaves a file at the start and the end of every epoch; may wait for one of another worker."""

    def __init__(self, worker_id, folder, waits=None, dies=None):
        self.id, self.folder = worker_id, folder
        self.waits, self.dies = waits or {}, dies
        self.w = np.zeros(1)

    def note(self, what, epoch):
        with open(f"{self.folder}/{what}-{self.id}-{epoch}", "a") as file:
            file.write("x")

    def train_epoch(self, epoch):
        self.note("began", epoch)
        if (self.id, epoch) in self.waits:
            wait_for(f"{self.folder}/{self.waits[self.id, epoch]}")
        if self.dies == (self.id, epoch) and not os.path.exists(f"{self.folder}/died"):
            open(f"{self.folder}/died", "w").close()
            os._exit(3)
        self.w = self.w + 1
        self.note("ended", epoch)
        return {"loss": float(epoch), "seen": sorted(os.listdir(self.folder))}

    def get_weights(self):
        return [self.w]

    def set_weights(self, weights):
        self.w = np.array(weights[0])

    def evaluate(self, data):
        return {"w": (self.w[0] * len(data), len(data))}


def make(folder, **options):
    folder.mkdir(exist_ok=True)
    workers = {k: options.pop(k) for k in ("waits", "dies") if k in options}

    class Trainer(DataParallelTrainer):
        def create_worker(self, worker_id, **kwargs):
            return Noting.remote(worker_id, str(folder), **workers)

    return Trainer(2, mode="async", progress=False, **options)


def done(folder):
    """How often each (worker, epoch) was trained."""
    files = Path(folder).glob("ended-*")
    return {tuple(map(int, f.name.split("-")[1:])): len(f.read_text()) for f in files}


def every(workers, epochs):
    return {(i, e): 1 for i in range(workers) for e in range(epochs)}


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_every_worker_does_every_epoch_once(tmp_path, backend):
    with make(tmp_path / "f", backend=backend, sync_interval=2) as trainer:
        result = trainer.train(epochs=4)
        stats = trainer.get_sync_stats()
        final = trainer.model_weights()[0][0]
    assert done(tmp_path / "f") == every(2, 4)
    assert [(r["epoch"], r["loss"], r["synced"]) for r in result.history] == [
        (0, 0.0, False),
        (1, 1.0, True),
        (2, 2.0, False),
        (3, 3.0, True),
    ]
    assert (stats["num_pushes"], stats["clocks"]) == (4, {0: 2, 1: 2})
    # Each push is 2 above what was pulled and moves the server half of the way there, or less far
    # where the other one's push came in between.
    assert 2 < final <= 4


def test_a_slow_worker_holds_up_nobody(tmp_path):
    """Worker 1 is in its first epoch until worker 0 is through its fourth and last."""
    waits = {(1, 0): "ended-0-3"}
    with make(tmp_path / "f", backend="local", waits=waits) as trainer:
        trainer.train(epochs=4)
    assert done(tmp_path / "f") == every(2, 4)


def test_staleness_bounds_how_far_ahead_a_worker_gets(tmp_path):
    """Worker 1 waits until worker 0 has finished epoch 1, which is one sync ahead."""
    seen = []

    class Look(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            seen.append(result["seen"])

    waits = {(1, 0): "ended-0-1"}
    with make(
        tmp_path / "f", backend="local", waits=waits, staleness=1, callbacks=[Look()]
    ) as trainer:
        trainer.train(epochs=5)
    # Seen by worker 1 after its first epoch: worker 0 had to wait before its third.
    first_of_1 = seen[0][1]
    assert "ended-0-1" in first_of_1
    assert "began-0-2" not in first_of_1
    assert done(tmp_path / "f") == every(2, 5)


def test_a_worker_that_dies_is_replaced_and_does_its_epoch_again(tmp_path):
    with make(tmp_path / "f", backend="local", dies=(1, 1), max_failures=1) as trainer:
        result = trainer.train(epochs=3)
    assert done(tmp_path / "f") == every(2, 3)
    assert result.epochs == 3
    assert "worker_replaced" in (trainer.run.path / "events.jsonl").read_text()


class StopAtOnce(Callback):
    def on_epoch_end(self, trainer, epoch, result, **kwargs):
        trainer.should_stop = epoch == 0


def test_a_worker_that_hangs_between_two_epochs_is_named_and_replaced(tmp_path):
    class Stuck(Noting.__wrapped__):
        def set_weights(self, weights):
            super().set_weights(weights)
            if self.id == 1 and os.path.exists(f"{self.folder}/ended-1-0"):
                hung = Path(self.folder, "hung")
                if not hung.exists():
                    hung.touch()
                    time.sleep(100)

    options = {
        "backend": "local",
        "mode": "async",
        "worker_timeout": 5 * TIME_SCALE,
        "max_failures": 1,
    }
    with DataParallelTrainer(2, worker=Stuck, progress=False, **options) as trainer:
        history = trainer.train(epochs=3, folder=str(tmp_path)).history
    assert [record["loss"] for record in history] == [0.0, 1.0, 2.0]
    assert [e["event"] for e in trainer.run.read_events()] == ["worker_failed", "worker_replaced"]


def test_a_stopped_run_is_taken_up_where_each_worker_was(tmp_path):
    """Worker 0 is far ahead when the run stops after its first epoch."""
    options = {"backend": "local", "run_dir": tmp_path / "run"}
    callbacks = [Checkpoint(), StopAtOnce()]
    with make(
        tmp_path / "f", waits={(1, 0): "ended-0-3"}, callbacks=callbacks, **options
    ) as trainer:
        assert trainer.train(epochs=6).epochs == 1
        before = Tally(worker for worker, _ in done(tmp_path / "f"))
        assert before[0] >= 4 > 2 >= before[1]
        assert trainer.train(epochs=1).epochs == 2  # continue in the same process
    with make(tmp_path / "f", **options) as trainer:
        result = trainer.train(epochs=6, resume=True)
    assert done(tmp_path / "f") == every(2, 6)
    assert [r["loss"] for r in result.history] == [0, 1, 2, 3, 4, 5]


def test_evaluation_is_of_the_servers_weights_and_leaves_the_workers_their_own(tmp_path):
    with make(tmp_path / "f", backend="inline", sync_interval=5) as trainer:
        trainer.train(epochs=2)  # nothing was handed in yet
        assert trainer.evaluate(data=np.zeros(4)) == {"w": 0.0, "num_samples": 4}
        held = miniray.get([w.get_weights.remote() for w in trainer.workers])
    assert [float(w[0][0]) for w in held] == [2.0, 2.0]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "fast"},
        {"staleness": 1},
        {"mode": "async", "staleness": -1},
    ],
)
def test_bad_options_are_refused_at_once(options, raises):
    with raises(ValueError):
        DataParallelTrainer(2, worker=Noting, **options)
