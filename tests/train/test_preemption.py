"""Ranks that step together pause at the same step, and a resumed run has the same bits."""

import contextlib
import json
import os
import signal
import time

import pytest

import miniray
from miniray.train import DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer

torch = pytest.importorskip("torch")

from tests.parallel import split_for_tests as split  # noqa: E402
from tests.time_scale import TIME_SCALE  # noqa: E402
from tests.train.ddp_for_tests import Stepper  # noqa: E402

STEPS = 60  # in each epoch


class Signaling(Stepper):
    """Rank 0 sends a signal to the driver in step 2 of epoch 1, whose steps are slow."""

    def __init__(self, worker_id, driver=None, number=0, hangs=False):
        super().__init__(worker_id, n=STEPS * 8)
        self.driver, self.number = driver, number
        self.hangs = hangs and worker_id == 1

    def training_step(self, batch, batch_idx):
        if self.driver is not None and self.train_loader.batch_sampler.epoch == 1:
            if batch_idx == 2 and self.rank == 0:
                os.kill(self.driver, self.number)
            time.sleep(600 if batch_idx == 2 and self.hangs else 0.05)
        return super().training_step(batch, batch_idx)


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=2)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def own_handler(monkeypatch):
    """A handler for SIGTERM, without which a preempted run would end this process."""
    received = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, previous)


def train(name, resume="auto", grace_seconds=25, trainer_options=None, **kwargs):
    options = {"seed": 3, "progress": False, "grace_seconds": grace_seconds}
    options |= trainer_options or {}
    with DDPTrainer(2, worker=Signaling, name=name, **options) as trainer:
        trainer.train(epochs=3, resume=resume, **kwargs)
        weights = trainer.model_weights()
        return [weights[key].numpy().tobytes() for key in sorted(weights)], trainer


def read_state(name):
    return json.loads(open(f"runs/{name}/run.json").read())


def test_preempted_ranks_pause_at_the_same_step_and_resume_with_the_same_bits(own_handler):
    with pytest.raises(SystemExit) as ended:
        train("stopped", driver=os.getpid(), number=signal.SIGTERM)
    assert (ended.value.code, own_handler) == (143, [signal.SIGTERM])
    state = read_state("stopped")
    assert (state["state"], state["stop_reason"]) == ("preempted", "SIGTERM")
    assert STEPS + 3 <= state["step"] < 2 * STEPS
    (checkpoint,) = os.listdir("runs/stopped/checkpoints")
    assert checkpoint == f"epoch-00000001-step-{state['step']:08d}"
    resumed, trainer = train("stopped")
    whole, uninterrupted = train("whole")
    assert resumed == whole
    assert trainer.state.step == uninterrupted.state.step == 3 * STEPS
    assert [r["loss"] for r in trainer.history] == [r["loss"] for r in uninterrupted.history]


class SignalingLoss:
    """Sends SIGTERM to the driver in one of the first batches, on one rank, and is slow."""

    def __init__(self, driver, marker):
        self.driver, self.marker, self.calls = driver, marker, 0

    def __call__(self, output, target):
        self.calls += 1
        if self.calls == 8:
            with contextlib.suppress(FileExistsError):
                open(self.marker, "x").close()
                os.kill(self.driver, signal.SIGTERM)
        time.sleep(0.05)
        return split.loss(output, target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PipelineParallelTrainer, ModelParallelTrainer])
def test_ranks_with_parts_of_a_model_pause_too(own_handler, tmp_path, kind):
    def train_split(name, loss):
        options = {**split.PARTS, "loss": loss, "name": name}
        model = split.make_layers if kind is PipelineParallelTrainer else split.make_model
        with kind(2, model=model, data=split.make_data(n=320), **options) as trainer:
            trainer.train(epochs=2, resume="auto")
            return trainer.model_weights()

    with pytest.raises(SystemExit):
        train_split("stopped", SignalingLoss(os.getpid(), tmp_path / "sent"))
    step = read_state("stopped")["step"]
    assert 1 <= step < 40
    assert os.listdir("runs/stopped/checkpoints") == [f"epoch-00000000-step-{step:08d}"]
    resumed, whole = train_split("stopped", split.loss), train_split("whole", split.loss)
    assert list(resumed) == list(whole)
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_ctrl_c_saves_the_current_step_and_says_how_to_resume(capsys):
    with pytest.raises(KeyboardInterrupt):
        train("stopped", driver=os.getpid(), number=signal.SIGINT)
    state = read_state("stopped")
    assert (state["state"], state["error"]["type"]) == ("interrupted", "KeyboardInterrupt")
    (checkpoint,) = os.listdir("runs/stopped/checkpoints")
    assert checkpoint.endswith(f"-step-{state['step']:08d}")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert capsys.readouterr().err == ""  # progress=False


def test_rank_that_hangs_is_stopped_after_grace_seconds(own_handler):
    start = time.monotonic()
    with pytest.raises(SystemExit):
        train("hung", grace_seconds=2, driver=os.getpid(), number=signal.SIGTERM, hangs=True)
    assert time.monotonic() - start < 15 * TIME_SCALE
    state = read_state("hung")
    assert (state["state"], state["step"]) == ("preempted", STEPS)
    assert " 2 s" in state["error"]["message"]


def test_newest_snapshot_is_saved_if_a_rank_hangs(own_handler):
    """The checkpoint is of an earlier step than that of the signal, and no bit differs."""
    options = {"max_failures": 1, "snapshot_every": 1}
    with pytest.raises(SystemExit):
        args = {"driver": os.getpid(), "number": signal.SIGTERM, "hangs": True}
        train("hung", grace_seconds=2, trainer_options=options, **args)
    state = read_state("hung")
    assert (state["state"], state["step"]) == ("preempted", STEPS + 2)
    assert os.listdir("runs/hung/checkpoints") == [f"epoch-00000001-step-{STEPS + 2:08d}"]
    resumed, trainer = train("hung")
    whole, uninterrupted = train("whole")
    assert resumed == whole
    assert [r["loss"] for r in trainer.history] == [r["loss"] for r in uninterrupted.history]


def test_rank_in_this_process_pauses_too(own_handler):
    class Alone(Stepper):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                signal.raise_signal(signal.SIGTERM)
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    miniray.shutdown()
    miniray.init(backend="inline")
    with pytest.raises(SystemExit):
        DDPTrainer(1, worker=Alone, name="alone", progress=False).train(epochs=9, n=STEPS * 4)
    state = read_state("alone")
    assert 3 <= state["step"] < STEPS
    (checkpoint,) = os.listdir("runs/alone/checkpoints")
    assert checkpoint == f"epoch-00000000-step-{state['step']:08d}"
