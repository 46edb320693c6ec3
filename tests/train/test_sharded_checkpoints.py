"""Ranks without shared memory write their own parts, and any layout resumes from them."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import signal
from pathlib import Path

import pytest

import miniray
from miniray.core import session
from miniray.errors import CheckpointError
from miniray.train import DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer
from miniray.train.callbacks import Checkpoint

torch = pytest.importorskip("torch")

from tests.parallel import split_for_tests as split  # noqa: E402
from tests.train.steps_for_tests import EveryCheckpoint, Noisy  # noqa: E402

STEPS = 8  # of an epoch of ``Noisy`` on two ranks


@pytest.fixture
def no_shared_memory(monkeypatch):
    """Ranks on this machine that pretend to share no memory, as on a cluster."""
    with miniray.init(backend="local", num_workers=3):
        engine = session.engine()
        can = dataclasses.replace(engine.capabilities, shared_memory=False)
        monkeypatch.setattr(type(engine), "capabilities", can)
        yield


@pytest.fixture
def on_ray():
    pytest.importorskip("ray")
    with miniray.init(backend="ray", num_workers=3):
        yield


def read_files(checkpoint):
    manifest = json.loads((Path(checkpoint) / "manifest.json").read_text())
    return sorted(name for name in manifest["files"] if name.startswith("rank-"))


def train_ddp(name, num_workers, until, *, shard="full", resume="auto", **options):
    """Train to a step inside the second epoch or to its end; return checkpoint and weights."""
    options = {"seed": 5, "progress": False, "callbacks": [Checkpoint()], **options}
    with DDPTrainer(num_workers, worker=Noisy, shard=shard, name=name, **options) as trainer:
        result = trainer.train(steps=until, resume=resume)
        return result.checkpoint, trainer.model_weights()


def train_split(name, num_workers, until, *, kind=PipelineParallelTrainer, **options):
    model = split.make_layers if kind is PipelineParallelTrainer else split.make_model
    arguments = {**split.PARTS, "name": name, "callbacks": [Checkpoint()]}
    data, resume = split.make_data(n=80), options.pop("resume", "auto")
    with kind(num_workers, model=model, data=data, **arguments, **options) as trainer:
        result = trainer.train(steps=until, resume=resume)
        return result.checkpoint, trainer.model_weights()


def assert_equal(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def assert_close(found, expected):
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], rtol=1e-4, atol=1e-5)


def test_shards_of_fsdp_load_on_other_numbers_of_ranks(no_shared_memory, warns):
    stopped, _ = train_ddp("run", 2, 11)
    assert read_files(stopped) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert not (stopped / "weights.safetensors").exists()
    whole = train_ddp("whole", 2, 16)[1]
    assert_equal(train_ddp("run", 2, 16)[1], whole)
    with warns(UserWarning):
        fewer = train_ddp("other", 3, 14, resume=str(stopped))[1]
    with warns(UserWarning):
        replicated = train_ddp("plain", 3, 14, shard="none", resume=str(stopped))[1]
    assert_close(fewer, replicated)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [PipelineParallelTrainer, ModelParallelTrainer])
def test_parts_of_a_split_model_load_on_another_layout(no_shared_memory, kind):
    stopped, _ = train_split("run", 2, 13, kind=kind)
    assert read_files(stopped) == ["rank-00000.safetensors", "rank-00001.safetensors"]
    whole = train_split("whole", 2, 20, kind=kind)[1]
    assert_equal(train_split("run", 2, 20, kind=kind)[1], whole)
    other = ModelParallelTrainer if kind is PipelineParallelTrainer else PipelineParallelTrainer
    assert_close(train_split("other", 2, 20, kind=other, resume=str(stopped))[1], whole)


class Limited(Noisy):
    """Rank 1 can't write files of more than 500 bytes after the first epoch."""

    def training_step(self, batch, batch_idx):
        if self.rank == 1 and self.global_step > STEPS:
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        return super().training_step(batch, batch_idx)


def test_rank_that_cannot_write_is_a_warning_and_the_checkpoint_before_is_kept(no_shared_memory):
    options = {"shard": "full", "seed": 5, "progress": False, "callbacks": [Checkpoint()]}
    with DDPTrainer(2, worker=Limited, **options) as trainer:
        with pytest.warns(UserWarning, match=os.strerror(errno.EFBIG)) as warned:
            trainer.train(epochs=3)
        (kept,) = trainer.checkpoints.list(verify=True)
        failed = [e for e in trainer.run.read_events() if e["event"] == "checkpoint_failed"]
        assert [path.name for path in trainer.checkpoints.directory.iterdir()] == [kept.path.name]
    assert kept.path.name == "epoch-00000000"
    assert (len(failed), len(warned)) == (2, 1)


@pytest.mark.slow
def test_missing_part_is_damage(no_shared_memory):
    stopped, _ = train_ddp("run", 2, 8)
    manifest = stopped / "manifest.json"
    (stopped / "rank-00001.safetensors").unlink()
    assert manifest.exists()
    with pytest.raises(CheckpointError, match="rank-00001"):
        train_ddp("other", 2, 9, resume=str(stopped))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("ray")
def test_checkpoints_of_ray_load_on_one_machine_and_back(on_ray):
    stopped, _ = train_ddp("run", 2, 11)
    assert len(read_files(stopped)) == 2
    pipeline, _ = train_split("split", 2, 13)
    assert len(read_files(pipeline)) == 2
    miniray.shutdown()
    with miniray.init(backend="local", num_workers=2):
        local, weights = train_ddp("run", 2, 16)
        assert not read_files(local)
        assert_equal(weights, train_ddp("whole", 2, 16)[1])
        assert_equal(train_split("split", 2, 20)[1], train_split("whole-split", 2, 20)[1])
    with miniray.init(backend="ray", num_workers=2):
        assert_equal(train_ddp("back", 2, 16, resume=str(stopped))[1], weights)


class Killed(Noisy):
    """Rank 1 dies in a step, once: a file remembers it."""

    def __init__(self, worker_id, marker, step=14):
        super().__init__(worker_id)
        self.marker, self.step = Path(marker), step

    def training_step(self, batch, batch_idx):
        if self.rank == 1 and self.global_step == self.step and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("shard", ["none", "full"])
def test_lost_rank_on_ray_costs_at_most_a_checkpoint_interval(on_ray, tmp_path, shard):
    def train(name, marker):
        options = {"shard": shard, "seed": 5, "progress": False, "run_dir": name}
        options["callbacks"] = [EveryCheckpoint(every=99, every_steps=4)]
        with DDPTrainer(2, worker=Killed, max_failures=1, **options) as trainer:
            trainer.train(epochs=3, marker=str(marker))
            return trainer.model_weights(), trainer.run.read_events()

    (tmp_path / "never").touch()
    weights, events = train("killed", tmp_path / "marker")
    (restart,) = [event for event in events if event["event"] == "ranks_restarted"]
    assert (restart["rank"], restart["died_at_step"]) == (1, 14)
    assert restart["resumed_at_step"] == 12
    assert_equal(weights, train("whole", tmp_path / "never")[0])
