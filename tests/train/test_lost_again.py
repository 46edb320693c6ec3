"""Workers that are killed where a run is not training: set up, resumed, evaluated, replaced."""

import json
import os
import signal

import pytest

import miniray
from miniray.core.engine import Engine
from miniray.errors import ActorDiedError
from miniray.train import Callback, Checkpoint, DataParallelTrainer, LRSchedule
from tests.train.workers_for_tests import Noisy

pytestmark = pytest.mark.usefixtures("_light_workers")


@miniray.remote
class Fragile(Noisy.__wrapped__):
    """Kills itself in the methods named in files of ``graves``, as often as there are files."""

    def __init__(self, worker_id, graves):
        super().__init__(worker_id)
        self.graves = graves

    def _risk(self, method):
        for name in sorted(os.listdir(self.graves)):
            if name.startswith(f"{method}-{self.worker_id}-"):
                os.unlink(os.path.join(self.graves, name))
                os.kill(os.getpid(), signal.SIGKILL)

    def set_lr(self, lr):
        self._risk("set_lr")
        super().set_lr(lr)

    def set_weights(self, weights):
        self._risk("set_weights")
        super().set_weights(weights)

    def set_state(self, state):
        self._risk("set_state")
        super().set_state(state)

    def evaluate(self):
        self._risk("evaluate")
        return {"w": (float(self.w[0]), 1)}

    def train_epoch(self, epoch):
        self._risk("train_epoch")
        return super().train_epoch(epoch)


class Plan:
    """Which worker is to die where, and how often; the files are gone once it has happened."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()

    def kill(self, method, worker_id, times=1):
        for number in range(times):
            (self.folder / f"{method}-{worker_id}-{number}").touch()

    def left(self):
        return sorted(os.listdir(self.folder))


@pytest.fixture
def plan(tmp_path):
    return Plan(tmp_path / "graves")


def make(plan, run_dir, **options):
    settings = {"sync_interval": 2, "max_failures": 1, **options}
    return DataParallelTrainer(
        2, worker=Fragile, run_dir=run_dir, backend="local", progress=False, **settings
    )


def told(trainer):
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [(e["event"], e["worker"]) for e in events if "worker" in e]


def state_of(trainer):
    """Weights and everything else, of every worker."""
    return miniray.get(
        [r for w in trainer.workers for r in (w.get_weights.remote(), w.get_state.remote())]
    )


@pytest.mark.parametrize("method", ["set_weights", "set_state"])
def test_a_worker_killed_while_a_run_is_taken_up_is_replaced_and_takes_it_up(
    tmp_path, plan, method
):
    class Kills(Callback):
        def set_state(self, state):  # called first when a checkpoint is restored
            plan.kill(method, 1, times=2)

    saving = [Kills(), Checkpoint()]
    with make(plan, tmp_path / "run", sync_interval=1, callbacks=saving) as trainer:
        trainer.train(epochs=3, graves=str(plan.folder))
        before = state_of(trainer)
    with make(
        plan, tmp_path / "run", sync_interval=1, max_failures=2, callbacks=[Kills()]
    ) as trainer:
        trainer.train(epochs=0, resume=True, graves=str(plan.folder))
        assert state_of(trainer) == before
    # With set_weights it is the replacement's own set-up that the second one dies in.
    failures, done = ("worker_failed", 1), ("worker_replaced", 1)
    expected = [failures, failures, done] if method == "set_weights" else [failures, done] * 2
    assert told(trainer) == expected
    assert plan.left() == []


def test_a_replacement_killed_in_a_callback_is_replaced_within_what_may_be_spared(tmp_path, plan):
    plan.kill("train_epoch", 1)
    seen = []

    class Kills(Callback):
        def on_worker_replaced(self, trainer, worker_id):
            seen.append(worker_id)
            if len(seen) == 1:
                plan.kill("set_lr", 1)  # LRSchedule, the next callback, calls it

    callbacks = [Kills(), LRSchedule(lambda epoch: 5.0 - epoch)]
    with make(plan, tmp_path / "run", max_failures=2, callbacks=callbacks) as trainer:
        result = trainer.train(epochs=2, graves=str(plan.folder))
        lrs = [s["lr"] for s in miniray.get([w.seen.remote() for w in trainer.workers])]
    assert len(result.history) == 2
    assert (seen, lrs) == ([1, 1], [4.0, 4.0])
    assert told(trainer) == [("worker_failed", 1)] * 2 + [("worker_replaced", 1)]


@pytest.mark.parametrize(
    ("lost", "failures"),
    [
        # Before the first replacement is placed, after it was lost, and before the second.
        pytest.param([(), (), ()], 2, id="no-node"),
        pytest.param([("a",), ("a",), ("a",)], 2, id="known-before"),
        pytest.param([("a",), ("a", "b"), ("a", "b")], 1, id="lost-with-the-replacement"),
    ],
)
def test_a_replacement_lost_with_its_node_is_no_second_failure(
    tmp_path, plan, monkeypatch, lost, failures
):
    """Worker 1 dies, and so does its replacement while it is set up."""
    views = [frozenset(view) for view in lost]
    monkeypatch.setattr(Engine, "lost_nodes", lambda self: views.pop(0))

    class Kills(Callback):
        def on_epoch_start(self, trainer, epoch):
            if epoch == 1:
                plan.kill("train_epoch", 1)
                plan.kill("set_weights", 1)

    with make(plan, tmp_path / "run", max_failures=2, callbacks=[Kills()]) as trainer:
        trainer.train(epochs=2, graves=str(plan.folder))
        assert trainer._group.budget.failures == failures
    assert told(trainer) == [("worker_failed", 1)] * 2 + [("worker_replaced", 1)]
    assert (plan.left(), views) == ([], [])


def test_one_failure_more_than_may_be_spared_names_the_callback(tmp_path, plan):
    plan.kill("train_epoch", 1)

    class Kills(Callback):
        def on_worker_replaced(self, trainer, worker_id):
            plan.kill("set_lr", 1)

    callbacks = [Kills(), LRSchedule(lambda epoch: 1.0)]
    with pytest.raises(ActorDiedError, match=r"on_worker_replaced\(\)") as caught:
        make(plan, tmp_path / "run", callbacks=callbacks).train(epochs=2, graves=str(plan.folder))
    assert (caught.value.worker, caught.value.signal) == (1, "SIGKILL")
    assert not miniray.is_initialized()


@pytest.mark.parametrize(("method", "worker"), [("set_weights", 1), ("evaluate", 0)])
def test_one_killed_in_the_first_sync_or_in_evaluation_is_replaced(tmp_path, plan, method, worker):
    plan.kill(method, worker)
    with make(plan, tmp_path / "run", sync_interval=1, eval_interval=1) as trainer:
        result = trainer.train(epochs=1, graves=str(plan.folder))
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    # After the sync, both workers have the same weights, also if one was replaced.
    assert float(weights[0][0][0]) == float(weights[1][0][0]) > 0
    assert result.history[0]["val_w"] == pytest.approx(float(weights[0][0][0]))
    assert told(trainer) == [("worker_failed", worker), ("worker_replaced", worker)]
    assert plan.left() == []
