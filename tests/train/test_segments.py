"""Epochs of ``DataParallelTrainer`` in segments: workers with ``train_steps``."""

import json
import os
import signal

import pytest

import miniray
from miniray.data import IndexedDataset
from miniray.train import Checkpoint, CheckpointStore, DataParallelTrainer, TorchWorker

torch = pytest.importorskip("torch")

from tests.train.ddp_for_tests import make_data  # noqa: E402
from tests.train.segments_for_tests import Noisy, Watch  # noqa: E402
from tests.train.steps_for_tests import EveryCheckpoint, check_equal  # noqa: E402

pytestmark = pytest.mark.timeout(240)  # many processes, and the machine may be busy

STEPS = 8  # per epoch on two workers: 29 rows and 28 rows in batches of 4


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=4)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def make(num_workers=2, worker=Noisy, **options):
    settings = {"worker": worker, "seed": 5, "progress": False, **options}
    return DataParallelTrainer(num_workers, **settings)


def run(length, train_options=None, **options):
    """Train; return the step, the losses by epoch and the weights of all workers."""
    with make(**options) as trainer:
        result = trainer.train(**length, **(train_options or {}))
        weights = trainer.call_workers("get_weights")
        losses = {record["epoch"]: record["loss"] for record in result.history}
        return trainer.state.step, losses, merge(weights)


def merge(weights):
    return {f"{i}.{key}": value for i, each in enumerate(weights) for key, value in each.items()}


def names(trainer):
    return [info.path.name for info in trainer.checkpoints.list()]


# -- the same bits ---------------------------------------------------------------------------------


def test_pauses_change_no_bit():
    watch = Watch()
    callbacks = [EveryCheckpoint(every=10, every_steps=3, keep_last=None), watch]
    with make(callbacks=callbacks, eval_every_steps=4, sync_interval=2, log_every=2) as trainer:
        result = trainer.train(epochs=2)
        saved = names(trainer)
        weights = trainer.call_workers("get_weights")
        records = trainer.run.read_steps()
        scored = [r["step"] for r in records if "val_loss" in r]
    assert saved == [
        *("epoch-00000000-step-00000003", "epoch-00000000-step-00000006"),
        *("epoch-00000001-step-00000009", "epoch-00000001-step-00000012"),
        *("epoch-00000001-step-00000015", "epoch-00000001"),
    ]
    assert [step for step, _ in watch.scores] == scored == [4, 8, 12, 16]
    assert all(scores["val_num_samples"] == 9 for _, scores in watch.scores)
    assert [(r["epoch"], r["step"], r["synced"]) for r in result.history] == [
        (0, 8, False),
        (1, 16, True),
    ]
    losses = {record["epoch"]: record["loss"] for record in result.history}
    check_equal((16, losses, merge(weights)), run({"epochs": 2}, sync_interval=2))


@pytest.mark.parametrize(
    ("options", "train_options"),
    [
        ({}, {"loader_workers": 2}),
        pytest.param({"sync_interval": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"sync_every_steps": 3}, {}, marks=pytest.mark.slow),
        pytest.param({"accumulate": 3, "clip_norm": 1.0}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"num_workers": 3}, {"loader_workers": 1, "persistent": True}, marks=pytest.mark.slow
        ),
        ({"data": "miniray", "batch_size": 4}, {"own_loader": False}),
        pytest.param(
            {"data": "torch", "batch_size": 4}, {"own_loader": False}, marks=pytest.mark.slow
        ),
    ],
)
def test_interrupted_and_resumed_run_has_the_bits_of_a_whole_one(options, train_options):
    kind = options.get("data")
    if kind is not None:
        options = {**options, "data": make_dataset(kind)}
    whole = run({"epochs": 3}, train_options, **options)
    resumed = {"run_dir": "parts", "callbacks": Checkpoint(keep_last=None)}
    per_epoch = whole[0] // 3
    run({"steps": 1}, train_options, **options, **resumed)
    run({"steps": per_epoch + 2}, train_options, **options, **resumed, resume=True)
    check_equal(run({"epochs": 3}, train_options, **options, **resumed, resume=True), whole)


def make_dataset(kind):
    data = make_data(57)
    if kind == "torch":
        return data
    rows = [{"x": x.numpy(), "y": int(y)} for x, y in zip(*data.tensors, strict=True)]
    return IndexedDataset(rows, shuffle=True, seed=1)


def test_run_of_steps_ends_inside_an_epoch_and_continues_there():
    with make(callbacks=Checkpoint()) as trainer:
        first = trainer.train(steps=5)
        assert (trainer.state.step, trainer.state.epoch, trainer.state.step_in_epoch) == (5, 0, 5)
        assert names(trainer) == ["epoch-00000000-step-00000005"]
        assert first["complete"] is False
        store = CheckpointStore(trainer.run.checkpoints)
        assert len(store.load()[1]["weights"]) == 2  # they differ inside an epoch
        trainer.train(steps=STEPS - 5)
        assert (trainer.state.step, trainer.state.epoch, trainer.state.step_in_epoch) == (8, 1, 0)
        seen = trainer.call_workers("get_seen")
    assert seen == [list(range(8)), list(range(7))]  # the second worker has a batch less


def test_resume_inside_an_epoch_on_other_workers_starts_the_epoch_again(warns):
    run({"steps": STEPS + 3}, run_dir="parts", callbacks=Checkpoint())
    with make(1, run_dir="parts") as trainer:
        with warns(UserWarning):
            trainer.train(epochs=2, resume=True)
        (seen,) = trainer.call_workers("get_seen")
        assert trainer.state.step == STEPS + 15
    assert seen == list(range(15))


def test_resume_inside_an_epoch_on_other_workers_trains_the_remaining_rows():
    options = {"data": make_dataset("miniray"), "batch_size": 4, "run_dir": "parts"}
    rows = []
    for num_workers, length in ((2, {"steps": 3}), (3, {"epochs": 1})):
        with make(num_workers, callbacks=Checkpoint(), **options) as trainer:
            trainer.train(**length, own_loader=False, resume="auto")
            rows += [row for each in trainer.call_workers("get_rows") for row in each]
    expected = [round(float(value), 4) for value in make_data(57).tensors[0][:, 0]]
    assert sorted(rows) == sorted(expected)


# -- records, stops, losses ------------------------------------------------------------------------


def test_log_records_and_a_stop_inside_the_epoch():
    watch = Watch(stop_at=6)
    callbacks = [watch, Checkpoint()]
    with make(callbacks=callbacks, eval_every_steps=3, log_every=3) as trainer:
        result = trainer.train(epochs=3)
        records = trainer.run.read_steps()
        assert names(trainer) == ["epoch-00000000-step-00000006"]
    assert result["complete"] is False
    assert [step for step, _ in watch.steps] == [1, 3, 6]
    steps = [record["step"] for record in records if "lr" in record]
    assert steps[0] == 1
    assert steps == sorted(set(steps))
    (first,) = (record for record in records if record["step"] == 1)
    assert (first["epoch"], first["lr"]) == (0, 0.01)
    assert first["grad_norm"] > 0
    assert first["samples_per_second"] * first["step_seconds"] == pytest.approx(8)
    assert first["memory_mb"] > 10


@pytest.mark.parametrize("every", [None, 3])
def test_lost_worker_trains_what_came_after_the_last_sync(tmp_path, every):
    class Mortal(Noisy):
        order = str(tmp_path / "order")

    (tmp_path / "order").write_text("1 5")
    options = {"max_failures": 1, "sync_every_steps": every, "eval_every_steps": 1}
    with make(worker=Mortal, **options) as trainer:
        trainer.train(epochs=1)
        seen = trainer.call_workers("get_seen")
        events = [e["event"] for e in trainer.run.read_events()]
    assert "worker_replaced" in events
    assert seen == [list(range(8)), list(range(3 if every else 0, 7))]


def test_sync_every_steps_replaces_the_interval_of_epochs():
    with make(sync_every_steps=3) as trainer:
        result = trainer.train(epochs=3)
        assert trainer.get_sync_stats()["num_syncs"] == 8
        assert [record["synced"] for record in result.history] == [False, False, True]
        first, second = trainer.call_workers("get_weights")
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.fixture
def own_handler():
    """A handler for SIGTERM, without which a preempted run would end this process."""
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, previous)


def test_preemption_pauses_between_two_segments(own_handler):
    with pytest.raises(SystemExit), make(name="stopped") as trainer:
        trainer.train(epochs=100, driver=os.getpid())
    state = json.loads(open("runs/stopped/run.json").read())
    assert state["state"] == "preempted"
    (checkpoint,) = os.listdir("runs/stopped/checkpoints")
    assert state["step"] >= 3
    epoch, step = divmod(state["step"], STEPS)
    name = f"epoch-{epoch:08d}-step-{state['step']:08d}" if step else f"epoch-{epoch - 1:08d}"
    assert checkpoint == name
    assert own_handler


# -- workers ---------------------------------------------------------------------------------------


class OwnLoop(Noisy):
    def train_epoch(self, epoch):
        return {**super().train_epoch(epoch), "own": 1}


class Counting:
    """Not torch: epochs of 5 steps, of unknown number to the driver."""

    def __init__(self, worker_id):
        self.calls, self.done = [], 0

    def train_steps(self, epoch, start, stop):
        self.calls.append((epoch, start, stop))
        self.done = 5 if stop is None else min(5, stop)
        return {"loss": 1.0 / self.done, "num_steps": self.done}

    def train_epoch(self, epoch):
        return self.train_steps(epoch, 0, None)

    def get_weights(self):
        return [torch.zeros(1)]

    def set_weights(self, weights):
        pass

    def get_calls(self):
        return self.calls


def test_workers_with_their_own_train_steps():
    with make(1, worker=Counting, callbacks=Checkpoint(every_steps=3)) as trainer:
        trainer.train(steps=8)
        (calls,) = trainer.call_workers("get_calls")
        assert (trainer.state.step, trainer.state.epoch, trainer.state.step_in_epoch) == (8, 1, 3)
    stops = [(epoch, stop) for epoch, _, stop in calls]
    assert (0, 3) in stops
    assert stops[-1] == (1, 3)


class Created(DataParallelTrainer):
    def create_worker(self, worker_id, **kwargs):
        return miniray.remote(OwnLoop).remote(worker_id)


@pytest.mark.parametrize(
    ("length", "options"),
    [
        ({"steps": 3}, {}),
        ({"epochs": 1}, {"eval_every_steps": 2}),
        ({"epochs": 1}, {"log_every": 2}),
        ({"epochs": 1}, {"sync_every_steps": 2}),
        ({"epochs": 1}, {"callbacks": Checkpoint(every_steps=2)}),
    ],
)
def test_step_options_need_train_steps(length, options):
    with make(worker=OwnLoop, **options) as trainer:
        with pytest.raises(TypeError, match="train_steps"):
            trainer.train(**length)
        assert trainer.run is None
    with (
        Created(1, progress=False, **options) as trainer,
        pytest.raises(TypeError, match="train_steps"),
    ):
        trainer.train(**length)


def test_own_loop_is_called_for_whole_epochs():
    with Created(1, progress=False, seed=5) as trainer:
        assert trainer.train(epochs=1)["own"] == 1
        (seen,) = trainer.call_workers("get_seen")
    assert len(seen) == 15
    with pytest.raises(TypeError, match="mode"):
        make(mode="async", eval_every_steps=1).train(epochs=1)
    assert issubclass(OwnLoop, TorchWorker)
