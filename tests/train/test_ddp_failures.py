"""A rank that raises, dies, hangs or leaves out a step: one cause, and nothing left behind."""

import io
import os
import re
import signal
import time

import pytest

import miniray
from miniray.errors import ActorDiedError, HandlesError, WorkerTimeoutError
from miniray.train import Checkpoint, DDPTrainer

torch = pytest.importorskip("torch")
psutil = pytest.importorskip("psutil")

from tests.time_scale import TIME_SCALE, with_real_limits  # noqa: E402
from tests.train.ddp_for_tests import (  # noqa: E402
    SEED,
    Faulty,
    Looper,
    Skipping,
    Stepper,
    apart,
    one_process,
    read_events,
)


@pytest.fixture(scope="module")
def engine():
    """One engine for all: its first worker loads torch for the others."""
    yield lambda: miniray.is_initialized() or miniray.init(backend="local")
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Run in an empty directory and keep the engine running."""
    monkeypatch.chdir(tmp_path)


def train(how, epochs=2, at=(0, 2), hang_timeout=50.0, progress=False, **options):
    with DDPTrainer(
        2, worker=Faulty, progress=progress, seed=SEED, hang_timeout=hang_timeout, **options
    ) as trainer:
        return trainer, trainer.train(epochs=epochs, how=how, marker="gone-wrong", at=at)


@pytest.mark.parametrize(
    ("how", "kind", "fields"),
    [
        ("fail", KeyError, {"args": ("a bad row",)}),
        (
            "lose_database",
            RuntimeError,
            {"args": ("Connection closed by peer: the database timed out",)},
        ),
        ("die", ActorDiedError, {"signal": "SIGKILL"}),
        ("exit", ActorDiedError, {"exit_code": 3}),
    ],
)
def test_what_goes_wrong_in_a_rank_is_the_error_of_the_run(engine, how, kind, fields):
    engine()
    pids = []

    class Watching(DDPTrainer):
        def on_train_start(self):
            pids.extend(self.call_workers("pid"))

    with pytest.raises(kind) as failure:
        Watching(2, worker=Faulty, progress=False, hang_timeout=50).train(epochs=2, how=how)
    assert "gloo/" not in str(failure.value)  # how rank 0 lost rank 1
    assert (failure.value.rank, failure.value.epoch, failure.value.step) == (1, 0, 2)
    assert {name: getattr(failure.value, name) for name in fields} == fields
    assert len(pids) == 2
    psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=30)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("skip", TypeError),
        ("detach", RuntimeError),
    ],
)
def test_a_step_without_a_backward_pass_ends_all_ranks_at_once(engine, how, kind, raises):
    engine()
    with raises(kind) as failure:
        train(how)
    assert (failure.value.rank, failure.value.epoch, failure.value.step) == (1, 0, 2)
    assert "gloo/" not in str(failure.value)  # how rank 0 lost rank 1


def test_a_loop_of_ones_own_may_leave_out_a_batch(engine):
    """As if the rank had one batch less: the gradients of its third meet the others' second."""
    engine()
    pairs = [(0, 0), (1, 2), (2, 3)]
    rows = [
        torch.tensor([*range(4 * a, 4 * a + 4), *range(16 + 4 * b, 20 + 4 * b)]) for a, b in pairs
    ]
    rows.append(torch.arange(12, 16))
    with DDPTrainer(2, worker=Skipping, progress=False) as trainer:
        trainer.train(epochs=2)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    _, expected = one_process(32, 0, epochs=2, rows=rows, lr=0.1)
    for found in weights:
        for mine, theirs in zip(found, expected.values(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-5)


def test_a_loop_of_ones_own_must_not_leave_out_a_backward_pass(engine, check_message):
    engine()
    with pytest.raises(ActorDiedError) as failure:
        DDPTrainer(2, worker=Skipping, progress=False).train(epochs=1, skip="backward")
    check_message(str(failure.value).splitlines()[-1])
    # Without "join", the others wait for the batch that one rank left out.
    options = {"uneven": "error", "hang_timeout": 4 * TIME_SCALE, "progress": False}
    with pytest.raises(WorkerTimeoutError, match=r"STUCK: (.|\n)*rank 1") as failure:
        DDPTrainer(2, worker=Skipping, **options).train(epochs=1)
    assert failure.value.rank is None
    check_message(str(failure.value).splitlines()[0])


def find_positions(text):
    """Return the lines that describe ranks before the doctor's diagnosis, without durations."""
    lines = text.partition("doctor.txt")[0].splitlines()
    shown = [line for line in lines if re.match(r" *rank \d", line)]
    return re.sub(r"\b\d+ s\b", "9 s", "\n".join(shown))


@with_real_limits
def test_a_rank_that_hangs_is_named_with_its_place(engine, tmp_path, scale, check_message):
    engine()
    with pytest.raises(WorkerTimeoutError) as failure:
        train("hang", hang_timeout=4 * scale)
    text = str(failure.value)
    check_message(find_positions(text))
    assert "the line that hangs" in text
    assert (failure.value.rank, failure.value.epoch, failure.value.step) == (1, 0, 2)
    (kept,) = tmp_path.glob("runs/*/doctor.txt")
    assert kept.read_text().startswith("STUCK: rank 1")
    assert kept.read_text().strip() in text


class StuckValidating(Stepper):
    def validation_step(self, batch, batch_idx):
        if self.rank == 1:
            time.sleep(1000)  # the line that hangs
        return super().validation_step(batch, batch_idx)


def test_a_rank_that_hangs_in_an_evaluation_is_named_too(engine, check_message):
    engine()
    options = {"worker": StuckValidating, "progress": False, "hang_timeout": 4 * TIME_SCALE}
    with pytest.raises(WorkerTimeoutError) as failure:
        DDPTrainer(2, eval_interval=1, sanity_batches=0, **options).train(epochs=1)
    check_message(find_positions(str(failure.value)))
    assert "the line that hangs" in str(failure.value)
    assert (failure.value.rank, failure.value.epoch) == (1, 0)


class SlowToLoad(Stepper):
    """Worker whose rank 1 loads its data only when ``marker`` exists."""

    def load_data_shard(self, shard_id, num_shards, marker):
        while shard_id == 1 and not os.path.exists(marker):
            time.sleep(0.05)


def test_a_rank_that_takes_long_before_the_first_step_is_waited_for_and_told_of(
    engine, monkeypatch, tmp_path
):
    engine()
    told = []

    class Terminal(io.StringIO):
        def write(self, text):
            told.append(text)
            if text.startswith("rank 1:"):  # not before rank 0 has started
                (tmp_path / "complained").touch()

    monkeypatch.setattr("sys.stderr", Terminal())
    options = {"worker": SlowToLoad, "progress": False, "hang_timeout": 2 * TIME_SCALE}
    with DDPTrainer(2, **options) as trainer:
        trainer.train(epochs=0, marker=str(tmp_path / "complained"))
    found = next(text for text in told if text.startswith("rank 1:"))
    assert "load_data_shard()" in found
    assert f"`miniray doctor {trainer.run.path}`" in found


def test_a_rank_that_is_stopped_is_said_to_be(engine):
    engine()
    with pytest.raises(WorkerTimeoutError, match="SIGSTOP") as failure:
        train("stop")
    assert failure.value.rank == 1


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("skip", TypeError),
        ("nan", FloatingPointError),
        ("leave_out", RuntimeError),
        ("parts_only", RuntimeError),
    ],
)
def test_what_would_leave_the_others_waiting_is_an_error(how, kind, raises):
    miniray.shutdown()
    trainer = DDPTrainer(1, worker=Faulty, backend="inline", progress=False)
    with raises(kind):
        trainer.train(epochs=1, how=how, victim=0)
    assert not torch.distributed.is_initialized()


@pytest.mark.timeout(120)  # processes start slowly on a machine that is busy
def test_ranks_start_again_from_the_end_of_the_last_epoch(engine, capfd, check_message):
    engine()
    options = {"progress": True, "snapshot_every": None}
    trainer, result = train("die", at=(1, 2), max_failures=1, **options)
    lines = capfd.readouterr().err.splitlines()
    losses, _ = one_process(32, 8, epochs=2)
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-5)
    assert [record.get("restarts") for record in result.history] == [None, 1]
    failed, restarted = trainer.run.read_events()
    assert (failed["event"], failed["worker"], failed["epoch"]) == ("worker_failed", 1, 1)
    assert "step 2" in failed["reason"]
    assert (restarted["event"], restarted["epoch"]) == ("ranks_restarted", 1)
    assert (restarted["rank"], restarted["died_at_step"], restarted["resumed_at_step"]) == (1, 6, 4)
    assert lines.count(restarted["message"]) == 1
    check_message(restarted["message"].replace(f"{restarted['seconds']:.2f} s", "1.00 s"))


class DiesTakingUp(Stepper):
    """Rank 1 is killed when it is given its state of a checkpoint, once."""

    def __init__(self, worker_id, marker=""):
        super().__init__(worker_id, n=32)
        self.marker = marker if worker_id == 1 else ""

    def get_state(self):
        return {"mine": 1}

    def set_state(self, state):
        if self.marker and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(120)
def test_a_rank_killed_while_a_checkpoint_is_taken_up_is_a_failure_like_others(engine):
    engine()
    options = {"worker": DiesTakingUp, "progress": False, "seed": SEED, "run_dir": "run"}
    with DDPTrainer(2, callbacks=[Checkpoint()], **options) as trainer:
        trainer.train(epochs=1)
    with DDPTrainer(2, max_failures=1, **options) as trainer:
        result = trainer.train(epochs=2, resume=True, marker="gone-wrong")
    losses, _ = one_process(32, 8, epochs=2)
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-5)
    failed, restarted = read_events(trainer)
    assert (failed["event"], failed["worker"]) == ("worker_failed", 1)
    assert "SIGKILL" in failed["reason"]
    assert restarted["event"] == "ranks_restarted"


class DiesGiving(Stepper):
    """Rank 1 is killed when it is asked for its state after the first epoch, once."""

    def __init__(self, worker_id, marker):
        super().__init__(worker_id, n=32)
        self.calls, self.marker = 0, marker if worker_id == 1 else ""

    def get_state(self):
        self.calls += 1
        if self.marker and self.calls == 2 and not os.path.exists(self.marker):
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.timeout(120)
def test_a_rank_killed_while_it_gives_its_state_costs_the_epoch_and_not_the_run(engine):
    engine()
    options = {"worker": DiesGiving, "progress": False, "seed": SEED, "max_failures": 2}
    with DDPTrainer(2, **options) as trainer:
        result = trainer.train(epochs=2, marker="gone-wrong")
    losses, _ = one_process(32, 8, epochs=2)
    assert [record["loss"] for record in result.history] == pytest.approx(losses, abs=1e-5)
    assert [record.get("restarts") for record in result.history] == [1, None]


def test_what_ranks_must_agree_on_is_compared_before_they_wait_for_one_another(engine, raises):
    engine()

    class Wider(Stepper):
        def __init__(self, worker_id):
            super().__init__(worker_id)
            if worker_id == 1:
                self.model = torch.nn.Linear(4, 3)
                self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    with raises(ValueError):
        DDPTrainer(2, worker=Wider, progress=False).train(epochs=1)

    class Uneven(Stepper):
        def load_data_shard(self, shard_id, num_shards):
            from tests.train.ddp_for_tests import DataLoader, make_data

            self.train_loader = DataLoader(make_data(16 - 4 * shard_id), batch_size=4)

    with raises(ValueError):
        DDPTrainer(2, worker=Uneven, uneven="error", progress=False).train(epochs=1)
    with DDPTrainer(2, worker=Uneven, progress=False) as trainer:  # joined instead
        assert trainer.train(epochs=1)["num_samples"] == 28
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    assert apart(*weights) == 0

    with raises(ValueError):
        DDPTrainer(2, worker=Looper, accumulate=2, clip_norm=1.0, progress=False).train(epochs=1)


def test_a_dataset_with_an_open_file_is_refused_before_loader_processes_start():
    miniray.shutdown()

    class Open(Stepper):
        def __init__(self, worker_id):
            super().__init__(worker_id)
            data = self.train_loader.dataset
            data.file = open(__file__)
            self.train_loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1)

    with pytest.raises(
        HandlesError, match=r"self\.train_loader\.dataset\.file .*test_ddp_failures"
    ):
        DDPTrainer(1, worker=Open, backend="inline", progress=False).train(epochs=1)


def test_the_inline_engine_has_one_process(raises):
    miniray.shutdown()
    with raises(miniray.errors.CapabilityError):
        DDPTrainer(2, worker=Stepper, backend="inline", progress=False).train(epochs=1)
    with DDPTrainer(1, worker=Stepper, backend="inline", progress=False, seed=SEED) as trainer:
        trainer.train(epochs=1)
        assert apart(trainer.model_weights(), one_process(64, 4, epochs=1)[1]) < 1e-6
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "options",
    [
        {"uneven": "even"},
        {"precision": "fp8"},
        {"accumulate": 0},
        {"clip_norm": -1.0},
        {"hang_timeout": 0},
        {"models": "model"},
    ],
)
def test_bad_options_are_refused_at_once(options, raises):
    with raises(ValueError):
        DDPTrainer(2, worker=Stepper, **options)
    with pytest.raises(TypeError, match=r"'sync_interval'.*DataParallelTrainer"):
        DDPTrainer(2, worker=Stepper, sync_interval=2)
