"""Runs whose length is a number of steps, and what happens inside an epoch."""

import time

import pytest

import miniray
from miniray.doctor.reader import read_box
from miniray.errors import CheckpointError
from miniray.train import (
    Callback,
    Checkpoint,
    CheckpointStore,
    DataParallelTrainer,
    DDPTrainer,
    Logger,
    RunDirectory,
)

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from tests.train.ddp_for_tests import Looper, Stepper, read_events  # noqa: E402
from tests.train.steps_for_tests import (  # noqa: E402
    EveryCheckpoint,
    Noisy,
    Watch,
    check_equal,
    run,
)
from tests.train.workers_for_tests import Counter  # noqa: E402

STEPS = 8  # per epoch of ``Noisy`` on two ranks


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
    return DDPTrainer(num_workers, **{"worker": worker, "seed": 5, "progress": False, **options})


def names(trainer):
    return [info.path.name for info in trainer.checkpoints.list()]


# -- length ----------------------------------------------------------------------------------------


def test_run_of_steps_ends_inside_an_epoch_and_continues_there():
    with make(run_dir="parts", callbacks=Checkpoint()) as trainer:
        first = trainer.train(steps=5)
        assert (trainer.state.step, trainer.state.epoch, trainer.state.step_in_epoch) == (5, 0, 5)
        assert names(trainer) == ["epoch-00000000-step-00000005"]
        (record,) = first.history
        assert (record["step"], record["complete"], record["epoch"]) == (5, False, 0)
        assert trainer.run.read_metrics() == first.history
        store = CheckpointStore(trainer.run.checkpoints)
        assert store.list()[0].metrics["loss"] == record["loss"] == first["loss"]
        second = trainer.train(steps=2 * STEPS - 5)  # N more
        assert (trainer.state.step, trainer.state.epoch, trainer.state.step_in_epoch) == (16, 2, 0)
        assert [(r["epoch"], r["step"]) for r in second.history] == [(0, 8), (1, 16)]
        assert [r["epoch"] for r in trainer.run.read_metrics()] == [0, 1]
        found = trainer.state.step, {r["epoch"]: r["loss"] for r in second.history}
        found = *found, trainer.model_weights()
    check_equal(found, run("whole", {"epochs": 2}))


def test_epochs_complete_the_one_that_is_open():
    with make() as trainer:
        trainer.train(steps=5)
        result = trainer.train(epochs=1)
        assert (trainer.state.step, result.epochs, len(result.history)) == (STEPS, 1, 1)
        assert "complete" not in result


@pytest.mark.parametrize("length", [{}, {"epochs": 1, "steps": 1}])
def test_length_is_either_epochs_or_steps(length):
    with pytest.raises(TypeError, match=r"epochs=.*steps="):
        make().train(**length)


def test_best_checkpoint_of_a_run_inside_an_epoch():
    callbacks = EveryCheckpoint(every_steps=2, keep_last=1, keep_best=True, monitor="val_loss")
    with make(callbacks=callbacks, eval_every_steps=2) as trainer:
        result = trainer.train(steps=7)
        scores = {r["step"]: r["val_loss"] for r in trainer.run.read_steps() if "val_loss" in r}
        best = trainer.checkpointer.find_best()
    assert sorted(scores) == [2, 4, 6]
    assert best.name == f"epoch-00000000-step-{min(scores, key=scores.get):08d}"
    assert result.checkpoint.name == "epoch-00000000-step-00000007"


def test_total_that_is_reached_prints_one_line(capfd, check_message):
    run("done", {"steps": 5}, callbacks=Checkpoint())
    capfd.readouterr()
    seen = []

    class Started(Callback):
        def on_train_start(self, trainer, **kwargs):
            seen.append("on_train_start")

    with make(run_dir="done", callbacks=Started()) as trainer:
        result = trainer.train(steps=4, resume=True)
        assert (trainer.state.step, result["step"], trainer.result) == (5, 5, result)
    (line,) = capfd.readouterr().err.splitlines()
    check_message(line)
    assert not seen
    assert RunDirectory("done").status() == "finished"


# -- resume ----------------------------------------------------------------------------------------


class InterruptedError_(Exception):
    pass


class Interrupt(Callback):
    """Raises after a checkpoint was written at ``step`` or later."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, metrics, **kwargs):
        if step >= self.step and names(trainer):
            raise InterruptedError_


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("num_workers", "options", "train_options"),
    [
        (2, {"accumulate": 3}, {"loader_workers": 2}),
        pytest.param(3, {}, {}, marks=pytest.mark.slow),
        *(
            pytest.param(ranks, {"accumulate": n}, {"loader_workers": k}, marks=pytest.mark.slow)
            for ranks, n, k in [(2, 1, 0), (2, 1, 2), (3, 3, 2), (4, 1, 0), (4, 3, 2)]
        ),
        pytest.param(2, {"precision": "fp16"}, {}, marks=pytest.mark.slow),  # with a scaler
        pytest.param(2, {"uneven": "pad"}, {}, marks=pytest.mark.slow),
        pytest.param(2, {"uneven": "drop"}, {}, marks=pytest.mark.slow),
    ],
)
def test_interrupted_and_resumed_run_has_the_bits_of_a_whole_one(
    num_workers, options, train_options
):
    options = {"num_workers": num_workers, "train_options": train_options, **options}
    whole = run("whole", {"epochs": 3}, **options)
    run("parts", {"steps": 1}, **options, callbacks=Checkpoint())
    per_epoch = whole[0] // 3
    resumed = {"resume": True, "callbacks": Checkpoint(keep_last=None)}
    run("parts", {"steps": per_epoch + 1}, **options, **resumed)  # over the end of an epoch
    check_equal(run("parts", {"epochs": 3}, **options, **resumed), whole)
    expected = [r["step"] for r in RunDirectory("whole").read_metrics()]
    assert [r["step"] for r in RunDirectory("parts").read_metrics()] == expected


def test_run_that_raised_resumes_from_the_step_of_its_checkpoint():
    whole = run("whole", {"epochs": 2})
    callbacks = [EveryCheckpoint(every_steps=3), Interrupt(3)]
    with make(run_dir="parts", callbacks=callbacks) as trainer, pytest.raises(InterruptedError_):
        trainer.train(epochs=2)
    at = trainer.state.step
    assert (at % 3, at % STEPS != 0) == (0, True)
    check_equal(run("parts", {"epochs": 2}, resume=True), whole)
    steps = [r["step"] for r in RunDirectory("parts").read_steps()]
    assert steps == sorted(set(steps))  # none twice
    assert steps[-1] == 2 * STEPS


def test_resume_auto_starts_resumes_and_completes():
    options = {"name": "auto", "callbacks": Checkpoint()}
    for total, epochs in ((1, [0]), (3, [0, 1, 2]), (3, [0, 1, 2])):
        with DataParallelTrainer(1, worker=Counter, progress=False, **options) as trainer:
            result = trainer.train(epochs=total, resume="auto")
        assert [r["epoch"] for r in result.history] == epochs
    with pytest.raises(ValueError, match=r"name=.*run_dir="):
        DataParallelTrainer(1, worker=Counter).train(1, resume="auto")


def test_resume_auto_starts_again_if_the_run_left_no_checkpoint():
    class Failing(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            raise InterruptedError_

    options = {"worker": Counter, "progress": False, "name": "requeued"}
    with (
        DataParallelTrainer(1, callbacks=Failing(), **options) as trainer,
        pytest.raises(InterruptedError_),
    ):
        trainer.train(epochs=2, resume="auto")
    with DataParallelTrainer(1, **options) as trainer:
        trainer.train(epochs=2, resume="auto")
        assert [r["epoch"] for r in trainer.run.read_metrics()] == [0, 1]


def test_resume_auto_with_damaged_checkpoints_only_raises():
    options = {"worker": Counter, "progress": False, "name": "damaged", "callbacks": Checkpoint()}
    with DataParallelTrainer(1, **options) as trainer:
        path = trainer.train(epochs=1).checkpoint
    (path / "manifest.json").write_text("{}")
    trainer = DataParallelTrainer(1, **options)
    with pytest.warns(UserWarning, match="epoch-00000000"), pytest.raises(CheckpointError):
        trainer.train(epochs=2, resume="auto")


# -- checkpoints and evaluation --------------------------------------------------------------------


def test_checkpoints_and_evaluations_every_few_steps():
    watch = Watch()
    hooks = []

    class Hooked(DDPTrainer):
        def on_evaluate_end(self, step, scores, **kwargs):
            hooks.append(step)

    callbacks = [EveryCheckpoint(every=10, every_steps=3, keep_last=None), watch]
    options = {"worker": Noisy, "seed": 5, "progress": False, "run_dir": "watched"}
    with Hooked(2, callbacks=callbacks, eval_every_steps=4, **options) as trainer:
        result = trainer.train(epochs=2)
        states = [
            CheckpointStore(info.path.parent).load(info.path)[1]["ddp"]["position"]["step"]
            for info in trainer.checkpoints.list()
        ]
        saved = names(trainer)
    assert states == [3, 6, 9, 12, 15, 16]
    assert saved[2:] == [
        *("epoch-00000001-step-00000009", "epoch-00000001-step-00000012"),
        *("epoch-00000001-step-00000015", "epoch-00000001"),
    ]
    assert [step for step, _ in watch.scores] == hooks == [4, 8, 12, 16]
    assert all(scores["val_num_samples"] == 9 for _, scores in watch.scores)
    assert [r["val_loss"] for r in result.history] == [
        scores["val_loss"] for step, scores in watch.scores if step % STEPS == 0
    ]
    records = [r for r in RunDirectory("watched").read_steps() if "val_loss" in r]
    assert [(r["step"], r["epoch"]) for r in records] == [(4, 0), (8, 0), (12, 1), (16, 1)]
    # Evaluations and checkpoints change no bit. Validation draws no random numbers here.
    losses = {r["epoch"]: r["loss"] for r in result.history}
    assert losses == run("plain", {"epochs": 2})[1]


class Collector(Logger):
    def __init__(self):
        self.names = []

    def log(self, step, epoch, metrics):
        self.names += [(step, name) for name in metrics]


def test_loggers_get_the_scores_of_a_step_once():
    collector = Collector()
    with make(loggers=[collector], eval_every_steps=4, eval_interval=1) as trainer:
        trainer.train(epochs=1)
    assert [step for step, name in collector.names if name == "val_loss"] == [4, 8]
    assert (8, "epoch_loss") in collector.names


class Slow(Stepper):
    """Steps of 10 ms, so that decisions by the clock come inside the epoch."""

    def training_step(self, batch, batch_idx):
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def get_step(self):
        return self.optimizer.state[next(iter(self.optimizer.param_groups[0]["params"]))]["step"]


def test_checkpoint_by_the_clock_is_of_one_step_on_all_ranks():
    """Without an agreement, ranks would be in different steps, and the gradients would hang."""
    saved = []

    class Saved(Callback):
        def on_step_end(self, trainer, step, metrics, **kwargs):
            trainer.should_stop = len(names(trainer)) > 0

    class Recording(DDPTrainer):
        def save_checkpoint(self, epoch=None, **options):
            steps = self.call_workers("get_step")
            saved.append(({int(step) for step in steps}, self.state.step))
            return super().save_checkpoint(epoch, **options)

    callbacks = [Checkpoint(every=10, every_minutes=0.3 / 60), Saved()]
    options = {"worker": Slow, "progress": False, "callbacks": callbacks}
    with Recording(3, **options) as trainer:
        trainer.train(epochs=1, n=20_000)
        assert trainer.state.epoch == 0
        found = names(trainer)
    assert saved
    assert all(steps == {step} for steps, step in saved)
    assert found[0].startswith("epoch-00000000-step-")


def test_stop_in_a_hook_ends_the_run_inside_the_epoch():
    watch = Watch(stop_at=1)
    with DDPTrainer(2, worker=Slow, progress=False, callbacks=[watch, Checkpoint()]) as trainer:
        start = time.monotonic()
        result = trainer.train(epochs=3, n=80_000)  # 10,000 steps
        assert time.monotonic() - start < 30
        assert 1 <= trainer.state.step < 5000
        assert result["complete"] is False
        assert names(trainer) == [f"epoch-00000000-step-{trainer.state.step:08d}"]
        assert [event["event"] for event in read_events(trainer)] == ["stopped"]
    assert watch.steps[-1][0] == trainer.state.step


# -- log records -----------------------------------------------------------------------------------


class Token(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.weight


class Tokens:
    """The loss is ``weight * ids``, so its gradient is the mean id, whatever the weight."""

    def __init__(self, worker_id, mask=False):
        self.model = Token()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.5)
        rows = [{"input_ids": torch.tensor([float(i)] * 3)} for i in range(10)]
        if mask:
            rows = [{**row, "attention_mask": torch.tensor([1, 1, 0])} for row in rows]
        self.train_loader = DataLoader(rows, batch_size=2)

    def training_step(self, batch, batch_idx):
        ids = batch["input_ids"][:, 0]
        return {"loss": self.model(ids).mean(), "id": ids.mean()}


@pytest.mark.parametrize("mask", [False, True])
def test_values_of_a_log_record(mask):
    """10 samples on 2 ranks: steps of 4, 4 and 2 samples."""
    watch = Watch()
    with make(worker=Tokens, callbacks=watch, log_every=2, run_dir="logged") as trainer:
        trainer.train(epochs=1, mask=mask)
        records = trainer.run.read_steps()
    # The first step at once, and the others with the last one: at most one record per second.
    assert [step for step, _ in watch.steps] == [1, 3]
    assert [metrics for _, metrics in watch.steps] == records
    ids = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    weights = [0.0]
    for values in ids:
        weights.append(weights[-1] - 0.5 * sum(values) / len(values))
    (first, last), per_row = records, 2 if mask else 3
    assert (first["step"], first["epoch"], first["id"], first["loss"]) == (1, 0, 1.5, 0.0)
    assert (first["lr"], first["grad_norm"]) == (0.5, pytest.approx(1.5))
    assert last["id"] == pytest.approx((22 + 17) / 6)
    expected = (22 * weights[1] + 17 * weights[2]) / 6
    assert last["loss"] == pytest.approx(expected)
    assert last["grad_norm"] == pytest.approx(8.5)
    for record, samples in ((first, 4), (last, 6)):
        rate = record["samples_per_second"]
        assert record["tokens_per_second"] == pytest.approx(per_row * rate)
        steps = 1 if samples == 4 else 2
        assert record["step_seconds"] * steps == pytest.approx(samples / rate)
        assert record["memory_mb"] > 10


def test_records_come_at_most_once_per_second():
    watch = Watch()
    with DDPTrainer(2, worker=Slow, progress=False, callbacks=watch, log_every=1) as trainer:
        start = time.monotonic()
        trainer.train(epochs=1, n=1600)  # 200 steps of 10 ms
        seconds = time.monotonic() - start
        records = trainer.run.read_steps()
    steps = [record["step"] for record in records]
    assert steps[-1] == 200
    assert steps == sorted(set(steps))
    assert 3 <= len(steps) <= seconds + 2
    # No sample is lost between records.
    total = sum(r["samples_per_second"] * r["step_seconds"] * n for r, n in _with_steps(records))
    assert total == pytest.approx(1600)


def _with_steps(records):
    ends = [0, *(record["step"] for record in records)]
    return [(r, after - before) for r, before, after in zip(records, ends, ends[1:], strict=False)]


# -- workers without steps -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "options"),
    [
        ({"steps": 3}, {}),
        ({"epochs": 1}, {"eval_every_steps": 2}),
        ({"epochs": 1}, {"callbacks": [Checkpoint(every_steps=2)]}),
    ],
)
def test_step_options_need_a_training_step(length, options):
    started = []

    class Started(DDPTrainer):
        def on_train_start(self, **kwargs):
            started.append(True)

    with (
        Started(2, worker=Looper, progress=False, **options) as trainer,
        pytest.raises(TypeError, match="training_step"),
    ):
        trainer.train(**length)
    assert not started


def test_step_options_of_workers_that_average_weights():
    trainer = DataParallelTrainer(1, worker=Counter, progress=False)
    with pytest.raises(TypeError, match="train_steps"):
        trainer.train(steps=3)
    trainer = DataParallelTrainer(
        1, worker=Counter, progress=False, callbacks=[Checkpoint(every_steps=2)]
    )
    with pytest.raises(TypeError, match="train_steps"):
        trainer.train(epochs=3)
    assert trainer.run is None


# -- what workers see and log ----------------------------------------------------------------------


class Scheduled(Stepper):
    """Records its attributes in ``__init__`` and in each step; its rate falls to 0 at the end."""

    def __init__(self, worker_id):
        super().__init__(worker_id, n=57)
        self.seen = [(self.global_step, self.epochs, self.total_steps)]

    def configure_scheduler(self, optimizer, total_steps):
        self.planned = total_steps
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_steps)

    def training_step(self, batch, batch_idx):
        self.seen.append((self.global_step, self.epochs, self.total_steps))
        self.log("twice", 2 * len(batch[0]))
        self.log("right", (torch.tensor(1.0), len(batch[0])))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("rows", float(len(batch[0])))
        return super().validation_step(batch, batch_idx)

    def get_seen(self):
        return self.seen, self.planned, self.optimizer.param_groups[0]["lr"]


def test_workers_know_the_length_of_the_run_and_build_schedules():
    options = {"worker": Scheduled, "run_dir": "known", "callbacks": Checkpoint()}
    with make(**options) as trainer:
        trainer.train(steps=STEPS + 2)
        for seen, planned, lr in trainer.call_workers("get_seen"):
            assert seen == [(step, None, STEPS + 2) for step in (0, *range(STEPS + 2))]
            assert (planned, lr) == (STEPS + 2, 0.0)
    with make(**options) as trainer:
        trainer.train(epochs=2, resume=True)
        (seen, planned, _), _ = trainer.call_workers("get_seen")
    steps = range(STEPS + 2, 2 * STEPS)
    assert seen == [(STEPS + 2, 2, None), *((step, 2, 2 * STEPS) for step in steps)]
    assert planned == 2 * STEPS


def test_schedule_of_a_resumed_run_ends_at_its_total():
    with make(
        worker=Scheduled, run_dir="half", callbacks=EveryCheckpoint(every_steps=3)
    ) as trainer:
        trainer.callbacks.append(Interrupt(3))
        with pytest.raises(InterruptedError_):
            trainer.train(epochs=1)
    with make(worker=Scheduled, run_dir="half") as trainer:
        trainer.train(epochs=1, resume=True)
        rates = [lr for _, _, lr in trainer.call_workers("get_seen")]
    assert rates == [0.0, 0.0]


class Own(Stepper):
    """Has attributes of these names."""

    epochs = "mine"

    def __init__(self, worker_id):
        super().__init__(worker_id)
        self.global_step = 100
        self.log = []

    def training_step(self, batch, batch_idx):
        self.log.append(self.global_step)
        return super().training_step(batch, batch_idx)

    def get_own(self):
        return self.epochs, set(self.log)


def test_attributes_of_the_users_code_are_left_unchanged():
    with make(worker=Own) as trainer:
        trainer.train(steps=3)
        assert trainer.call_workers("get_own") == [("mine", {100})] * 2


def test_values_that_workers_log():
    watch = Watch()
    with make(worker=Scheduled, callbacks=watch, eval_interval=1) as trainer:
        result = trainer.train(epochs=1)
        records = trainer.run.read_steps()
    # 57 rows in 7 steps of 4 + 4 and one of 1: rank 1 repeats a batch that doesn't count.
    assert result["twice"] == pytest.approx((56 * 8 + 1 * 2) / 57)
    assert records[0]["twice"] == 8.0
    assert result["right"] == pytest.approx(15 / 57)  # a sum over 15 batches
    assert result["val_rows"] == pytest.approx((4 * 4 + 4 * 4 + 1) / 9)
    assert "rows" not in result


def test_evaluation_inside_an_epoch_has_its_own_barrier_and_logs_metrics():
    """``self.log`` in ``validation_step`` adds a metric, limited to one batch per rank."""
    watch = Watch()
    limits = {"limit_val_batches": 1, "eval_every_steps": 2, "overfit_batches": 3}
    with make(worker=Scheduled, callbacks=watch, **limits) as trainer:
        trainer.train(epochs=2)
        ranks = [read_box(trainer.run.path / "ranks" / f"{rank}.box") for rank in range(2)]
    assert [step for step, _ in watch.scores] == [2, 4, 6]  # the last one at the end of an epoch
    assert [scores["val_rows"] for _, scores in watch.scores] == [4.0] * 3
    assert [scores["val_num_samples"] for _, scores in watch.scores] == [8] * 3
    for box in ranks:
        names = [event.name for event in box.events if event.kind == "barrier"]
        assert names.count("before-evaluation") == 3


# -- limits ----------------------------------------------------------------------------------------


class Rows(Stepper):
    """Records the rows of each training step and the number of validation batches."""

    def __init__(self, worker_id):
        super().__init__(worker_id, n=57)
        self.rows, self.validated = [], 0

    def training_step(self, batch, batch_idx):
        self.rows.append([round(value, 4) for value in batch[0][:, 0].tolist()])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        return super().validation_step(batch, batch_idx)

    def get_rows(self):
        return self.rows, self.validated


class OwnRows(Rows):
    """Chooses its batches itself."""

    def load_data_shard(self, shard_id, num_shards):
        rows = torch.utils.data.Subset(self.train_loader.dataset, range(shard_id, 57, num_shards))
        self.train_loader = DataLoader(rows, batch_size=4)


@pytest.mark.parametrize("worker", [Rows, OwnRows])
def test_limits_are_batches_per_rank(worker):
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "eval_interval": 2}
    limits["sanity_batches"] = 0
    with make(worker=worker, accumulate=2, **limits) as trainer:
        result = trainer.train(epochs=2)
        found = trainer.call_workers("get_rows")
        config = trainer.run.read_run()["config"]
    assert trainer.state.step == 4  # of 2 batches and of 1
    assert [(len(rows), validated) for rows, validated in found] == [(6, 1)] * 2
    assert (result["num_samples"], result["val_num_samples"]) == (24, 8)
    assert (config["limit_train_batches"], config["limit_val_batches"]) == (3, 1)


def test_overfitting_repeats_the_same_batches():
    with make(worker=Rows, overfit_batches=2) as trainer:
        trainer.train(epochs=3)
        found = trainer.call_workers("get_rows")
    for rows, _ in found:
        assert len(rows) == 6
        assert rows[:2] == rows[2:4] == rows[4:]
    first = Rows(0).train_loader.dataset.tensors[0][:16, 0].tolist()
    assert found[0][0][0] == [round(value, 4) for value in first[0:8:2]]
    trainer = make(worker=OwnRows, overfit_batches=2)
    with trainer, pytest.raises(ValueError, match="overfit_batches"):
        trainer.train(epochs=1)


@pytest.mark.parametrize(
    "options",
    [
        {"limit_train_batches": 0},
        {"limit_val_batches": 1.5},
        {"overfit_batches": True},
        {"overfit_batches": 1, "limit_train_batches": 1},
        {"log_every": 0},
        {"eval_every_steps": -1},
    ],
)
def test_invalid_step_options(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))):
        make(**options)
