"""Stop and resume a run: the result must equal that of an uninterrupted run."""

import json
import re
import shutil

import numpy as np
import pytest

import miniray
from miniray.errors import CheckpointError
from miniray.train import Callback, Checkpoint, DataParallelTrainer, EarlyStopping
from tests.train.workers_for_tests import Counter, Noisy

pytestmark = pytest.mark.usefixtures("_light_workers")


def make(run_dir, num_workers=2, **options):
    settings = {"sync_interval": 2, "sync_strategy": "momentum", **options}
    settings.setdefault("callbacks", [Checkpoint(every=1)])
    if settings["sync_strategy"] == "momentum":
        settings["momentum"] = 0.9
    return DataParallelTrainer(
        num_workers,
        worker=Noisy,
        backend=settings.pop("backend", "inline"),
        progress=settings.pop("progress", False),
        run_dir=run_dir,
        **settings,
    )


def outcome(trainer, result):
    """Weights, bit by bit, and metrics without what depends on the clock."""
    weights = [
        w[0].tobytes() for w in miniray.get([w.get_weights.remote() for w in trainer.workers])
    ]
    history = [{k: v for k, v in r.items() if k != "seconds"} for r in result.history]
    return weights, history


@pytest.mark.parametrize("stop_after", [3, 4])  # between two syncs, and right after one
def test_going_on_gives_the_same_bits_as_never_having_stopped(tmp_path, stop_after):
    with make(tmp_path / "straight") as trainer:
        straight = outcome(trainer, trainer.train(epochs=9))
    with make(tmp_path / "broken") as trainer:
        trainer.train(epochs=stop_after)
    with make(tmp_path / "broken") as trainer:
        resumed = outcome(trainer, trainer.train(epochs=9, resume=True))
    assert resumed == straight


def test_resuming_says_where_it_looked_when_there_is_nothing(tmp_path, raises):
    with raises(CheckpointError):
        DataParallelTrainer(1, worker=Noisy, backend="inline", progress=False).train(
            epochs=1, resume=True
        )


def test_a_run_without_checkpoints_is_not_taken_for_one(tmp_path, raises):
    with make(tmp_path / "run", callbacks=[]) as trainer:
        trainer.train(epochs=1)
    with raises(CheckpointError):
        make(tmp_path / "other").train(epochs=1, resume=tmp_path / "run")


def test_resume_finds_the_newest_run_of_the_trainer_by_itself():
    with DataParallelTrainer(
        2, worker=Noisy, backend="inline", progress=False, callbacks=[Checkpoint()]
    ) as trainer:
        first = trainer.train(epochs=2)
    with DataParallelTrainer(2, worker=Noisy, backend="inline", progress=False) as trainer:
        second = trainer.train(epochs=3, resume=True)
    assert second.run_dir == first.run_dir
    assert [r["epoch"] for r in second.history] == [0, 1, 2]


def test_a_corrupt_checkpoint_is_named_and_the_one_before_it_used(tmp_path):
    with make(tmp_path / "run") as trainer:
        newest = trainer.train(epochs=4).checkpoint
    damaged = max(newest.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with make(tmp_path / "run") as trainer:
        with pytest.warns(UserWarning, match=newest.name):
            assert trainer.load_checkpoint("latest") == 2
        result = trainer.train(epochs=1)
    assert [r["epoch"] for r in result.history] == [0, 1, 2, 3]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]


def test_another_number_of_workers_goes_on_and_says_what_changed(tmp_path, warns):
    with make(tmp_path / "run", num_workers=4, sync_interval=5) as trainer:
        trainer.train(epochs=3)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
        apart = [float(w[0][0]) for w in weights]
    assert len(set(apart)) == 4
    with make(tmp_path / "run", num_workers=2, sync_interval=5) as trainer:
        with warns(UserWarning):
            trainer.train(epochs=0, resume=True)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
        assert [float(w[0][0]) for w in weights] == pytest.approx([np.mean(apart)] * 2)


def test_another_strategy_goes_on_from_the_weights_and_says_what_is_lost(tmp_path):
    with make(tmp_path / "run") as trainer:
        trainer.train(epochs=4)
        weights = trainer.model_weights()[0]
    with make(tmp_path / "run", sync_strategy="fedadam") as trainer:
        with pytest.warns(UserWarning, match="'momentum'.*'fedadam'"):
            trainer.train(epochs=0, resume=True)
        server = miniray.get(trainer.param_server.get_weights.remote())[0]
    assert server.tobytes() == weights.tobytes()
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"resumed_with_other_strategy"' in events


def test_the_result_knows_a_checkpoint_written_at_the_very_end(tmp_path):
    with make(tmp_path / "run", callbacks=[Checkpoint(every=5)]) as trainer:
        assert trainer.train(epochs=2).checkpoint.name == "epoch-00000001"


def test_a_checkpoint_of_another_run_begins_a_new_one_where_one_is_named(tmp_path):
    with make(tmp_path / "first") as trainer:
        trainer.train(epochs=2)
    before = (tmp_path / "first" / "run.json").read_bytes()
    with make(tmp_path / "second") as trainer:
        result = trainer.train(epochs=3, resume=tmp_path / "first")
        assert trainer.checkpoints.newest().parent == tmp_path / "second" / "checkpoints"
    assert result.run_dir == tmp_path / "second"
    lines = (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
    assert '"started_from"' in (tmp_path / "second" / "events.jsonl").read_text()
    assert (tmp_path / "first" / "run.json").read_bytes() == before


def test_a_checkpoint_that_lies_in_no_run_begins_a_new_one(tmp_path):
    with make(tmp_path / "run") as trainer:
        newest = trainer.train(epochs=2).checkpoint
    shutil.copytree(newest, tmp_path / "kept" / "best")
    with make(None) as trainer:
        result = trainer.train(epochs=3, resume=tmp_path / "kept" / "best")
    assert result.run_dir.parent.name == "runs"
    assert result.epochs == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "run", "runs"]


def test_a_trainer_that_failed_goes_on_from_its_own_run(tmp_path, capsys):
    class Once(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            if epoch == 1 and not (trainer.run.path / "failed").exists():
                (trainer.run.path / "failed").touch()
                raise KeyboardInterrupt

    trainer = make(None, callbacks=[Checkpoint(), Once()], progress=True)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(epochs=3)
    told = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"{trainer.run.path}.*resume=True.*epoch-00000001", told)
    with make(None) as other:  # the newest of all runs
        other.train(epochs=1)
    with trainer:
        result = trainer.train(epochs=3, resume=True)
    assert result.epochs == 3
    assert result.run_dir != other.run.path


def test_callbacks_find_their_state_among_others(tmp_path):
    stopping = EarlyStopping("loss", patience=9)
    with make(tmp_path / "run", callbacks=[Checkpoint(), stopping]) as trainer:
        trainer.train(epochs=2)
    again = EarlyStopping("loss", patience=9)
    with make(tmp_path / "run", callbacks=[Callback(), again, Checkpoint()]) as trainer:
        trainer.load_checkpoint()
        trainer.train(epochs=0)
    # Also of the epoch that it had not seen yet when the checkpoint was written.
    assert (again.best, again.waited) == (stopping.best, stopping.waited) != (None, 0)
    assert again.waited == 1


def test_worker_weights_come_back_but_not_over_those_given_since(tmp_path):
    options = {"sync_strategy": "weighted"}
    with make(tmp_path / "run", **options) as trainer:
        trainer.set_worker_weight(0, 2)
        trainer.set_worker_weight(1, 3)
        trainer.train(epochs=1)
    with make(tmp_path / "run", **options) as trainer:
        trainer.set_worker_weight(1, 7)
        trainer.train(epochs=0, resume=True)
        assert trainer.get_sync_stats()["worker_weights"] == {0: 2, 1: 7}


def test_a_checkpoint_from_within_an_epoch_has_every_workers_weights(tmp_path):
    class Early(DataParallelTrainer):
        def train_epoch(self, epoch, **kwargs):
            result = super().train_epoch(epoch, **kwargs)
            self.save_checkpoint(epoch)
            return result

    with Early(2, 5, worker=Counter, backend="inline", progress=False) as trainer:
        trainer.train(epochs=1)
        weights = trainer.checkpoints.load()[1]["weights"]
    assert [float(w[0][0]) for w in weights] == [1.0, 2.0]


def test_the_newest_run_is_that_of_the_same_worker(capsys):
    """Another's weights may fit and mean something else."""

    def train(worker, epochs=1, **options):
        callbacks = [Checkpoint(every=1)]
        with DataParallelTrainer(1, worker=worker, backend="inline", callbacks=callbacks) as t:
            return t.train(epochs, **options)

    first = train(Counter)
    train(Noisy)
    again = train(Counter, 2, resume=True)
    assert (again.run_dir, again.epochs) == (first.run_dir, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if str(first.run_dir) in line]
    assert "epoch 1 of 2" in line
