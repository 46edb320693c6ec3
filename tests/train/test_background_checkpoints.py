"""Checkpoints are written while ranks train on, and a checkpoint that can't be written costs none.

The writer is slowed down or fails where it writes files; ranks, shared memory and disks are real.
"""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

import miniray
from miniray.train import DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer
from miniray.train.callbacks import Callback, Checkpoint
from miniray.train.run.checkpoints import store as checkpoint_store

torch = pytest.importorskip("torch")

from tests.parallel import split_for_tests as split  # noqa: E402
from tests.train.steps_for_tests import EveryCheckpoint, Noisy, check_equal, run  # noqa: E402
from tests.train.test_checkpoint_faults import mount_disk  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    with miniray.init(backend="local", num_workers=2):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def read_events(trainer, name):
    return [event for event in trainer.run.read_events() if event["event"] == name]


def names(trainer):
    return [info.path.name for info in trainer.checkpoints.list(verify=True)]


class Gate:
    """Lets the writer of checkpoints wait until ``open`` is called."""

    def __init__(self, monkeypatch):
        self._opened = threading.Event()
        write = checkpoint_store.write_checkpoint

        def wait_and_write(path, contents):
            assert self._opened.wait(60)
            write(path, contents)

        monkeypatch.setattr(checkpoint_store, "write_checkpoint", wait_and_write)

    def open(self):
        self._opened.set()


class Opens(Callback):
    """Opens a gate at the end of the first epoch, and then waits for the checkpoint."""

    def __init__(self, gate):
        self.gate = gate

    def on_epoch_start(self, trainer, epoch, **kwargs):
        if epoch == 1:
            self.gate.open()
            trainer.checkpointer.wait()


def test_ranks_train_while_a_checkpoint_is_written(monkeypatch):
    """The checkpoint has the state of its step, although later steps have changed it."""
    gate = Gate(monkeypatch)
    callbacks = [Checkpoint(every=99, every_steps=3, keep_last=None), Opens(gate)]
    with DDPTrainer(
        2, worker=Noisy, seed=5, progress=False, callbacks=callbacks, run_dir="run"
    ) as trainer:
        trainer.train(epochs=2)  # of 8 steps
        skipped = [event["step"] for event in read_events(trainer, "checkpoint_skipped")]
        found = names(trainer)
    assert skipped[0] == 6  # while that of step 3 was written
    assert found[0] == "epoch-00000000-step-00000003"
    whole = run("whole", {"epochs": 2})
    check_equal(
        run("resumed", {"epochs": 2}, train_options={"resume": f"run/checkpoints/{found[0]}"}),
        whole,
    )
    (reserved,) = read_events(trainer, "checkpoint_memory_reserved")
    assert reserved["bytes"] > 4096


@pytest.mark.parametrize("shard", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_content_is_that_of_a_checkpoint_that_ranks_wait_for(shard):
    class Both(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            trainer.checkpointer.wait()
            path = trainer.save_checkpoint(epoch)
            self.contents = trainer.checkpoints.load(path)[1]

    both = Both()
    with DDPTrainer(
        2,
        worker=Noisy,
        seed=5,
        shard=shard,
        progress=False,
        callbacks=[Checkpoint(keep_last=None), both],
    ) as trainer:
        trainer.train(epochs=1)
        first, second = trainer.checkpoints.list()[:1], both.contents
        kept = trainer.checkpoints.load(first[0].path)[1]
    assert_same({**kept, "callbacks": None}, {**second, "callbacks": None})


def assert_same(left, right):
    if isinstance(left, dict):
        assert set(left) == set(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    else:
        assert str(left) == str(right)


@pytest.mark.parametrize(
    "kind",
    [PipelineParallelTrainer, pytest.param(ModelParallelTrainer, marks=pytest.mark.slow)],
)
def test_split_models_resume_from_their_step_on_another_layout(kind):
    """Parts of a model are put together by the driver, from the memory of all ranks."""
    model = split.make_layers if kind is PipelineParallelTrainer else split.make_model

    def train(name, num_workers, kind=kind, model=model, **options):
        arguments = {**split.PARTS, "name": name, **options}
        with kind(num_workers, model=model, data=split.make_data(n=320), **arguments) as trainer:
            trainer.train(steps=15, resume="auto")
            return trainer.model_weights()

    whole = train("whole", 2)
    train_until = Until(7)
    train("stopped", 2, callbacks=[EveryCheckpoint(every=99, every_steps=7), train_until])
    resumed = train("stopped", 2)
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)
    elsewhere = train(
        "stopped-too", 1, ModelParallelTrainer, split.make_model, resume=str(train_until.path)
    )
    for key in whole:
        torch.testing.assert_close(elsewhere[key], whole[key], rtol=1e-4, atol=1e-5)


class Until(Callback):
    """Ends the run after a step, so that its checkpoint is written in the background."""

    def __init__(self, step):
        self.step, self.path = step, None

    def on_step_end(self, trainer, step, metrics, **kwargs):
        found = trainer.checkpointer.find_newest()
        if found is not None:
            trainer.should_stop, self.path = True, found


class Fills(Callback):
    """Fills the disk after the first checkpoint, and makes room in the last epoch."""

    def __init__(self, disk):
        self.ballast = disk / "ballast"

    def on_epoch_start(self, trainer, epoch, **kwargs):
        trainer.checkpointer.wait()
        if epoch == 1:
            free = 1 << 20
            with open(self.ballast, "wb", buffering=0) as file:
                while free:
                    try:
                        file.write(b"x" * free)
                    except OSError:
                        free //= 2
        if epoch == 3:
            self.ballast.unlink()


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for a few flight recorders and checkpoints."""
    with mount_disk(tmp_path / "disk", "16m") as disk:
        yield disk


def test_full_disk_is_a_warning_and_the_checkpoint_before_is_kept(small_disk):
    kept = []

    class Keeps(Fills):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            kept.append(names(trainer))

    callbacks = [Checkpoint(keep_last=1), Keeps(small_disk)]
    options = {"callbacks": callbacks, "run_dir": small_disk / "run", "progress": False}
    with DDPTrainer(2, worker=Noisy, seed=5, **options) as trainer:
        with pytest.warns(UserWarning, match=os.strerror(errno.ENOSPC)) as warned:
            result = trainer.train(epochs=4)
        failed = read_events(trainer, "checkpoint_failed")
    assert (trainer.epoch, trainer.state.step) == (4, 32)
    assert kept[1:3] == [["epoch-00000000"]] * 2
    assert kept[3] == ["epoch-00000003"] == [result.checkpoint.name]
    assert len([w for w in warned if os.strerror(errno.ENOSPC) in str(w.message)]) == 1
    assert len(failed) <= 2  # the disk that is full is the one with the events


@pytest.mark.slow
def test_time_that_ranks_wait_does_not_depend_on_the_disk(monkeypatch):
    """A disk that takes a second for a checkpoint doesn't cost the run a second."""
    write = checkpoint_store.write_checkpoint

    def write_slowly(path, contents):
        time.sleep(1)
        write(path, contents)

    monkeypatch.setattr(checkpoint_store, "write_checkpoint", write_slowly)
    waited = []

    class Timed(Checkpoint):
        def save_if_due(self, trainer):
            before = time.monotonic()
            super().save_if_due(trainer)
            waited.append(time.monotonic() - before)

    callbacks = [Timed(every=99, every_steps=4)]
    with DDPTrainer(2, worker=Noisy, seed=5, progress=False, callbacks=callbacks) as trainer:
        trainer.train(epochs=1)
        assert names(trainer) == ["epoch-00000000-step-00000004", "epoch-00000000"]
    assert min(waited) < 0.9
