"""Stopping and going on: nothing may differ from never having stopped."""

import json

import numpy as np
import pytest

import miniray
from miniray.errors import CheckpointError
from miniray.train import Checkpoint, DataParallelTrainer
from tests.train.workers_for_tests import Noisy

pytestmark = pytest.mark.usefixtures("_light_workers")


def make(run_dir, num_workers=2, **options):
    settings = {"sync_interval": 2, "sync_strategy": "momentum", **options}
    if settings["sync_strategy"] == "momentum":
        settings["momentum"] = 0.9
    return DataParallelTrainer(
        num_workers,
        worker=Noisy,
        backend=settings.pop("backend", "inline"),
        progress=False,
        run_dir=run_dir,
        callbacks=[Checkpoint(every=1)],
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
        resumed = outcome(trainer, trainer.train(epochs=9 - stop_after, resume=True))
    assert resumed == straight


def test_resuming_says_where_it_looked_when_there_is_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run of DataParallelTrainer with a checkpoint"):
        DataParallelTrainer(1, worker=Noisy, backend="inline", progress=False).train(
            epochs=1, resume=True
        )


def test_resume_finds_the_newest_run_of_the_trainer_by_itself():
    with DataParallelTrainer(
        2, worker=Noisy, backend="inline", progress=False, callbacks=[Checkpoint()]
    ) as trainer:
        first = trainer.train(epochs=2)
    with DataParallelTrainer(2, worker=Noisy, backend="inline", progress=False) as trainer:
        second = trainer.train(epochs=1, resume=True)
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


def test_another_number_of_workers_goes_on_and_says_what_changed(tmp_path):
    with make(tmp_path / "run", num_workers=4, sync_interval=5) as trainer:
        trainer.train(epochs=3)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
        apart = [float(w[0][0]) for w in weights]
    assert len(set(apart)) == 4
    with make(tmp_path / "run", num_workers=2, sync_interval=5) as trainer:
        with pytest.warns(UserWarning, match="a run of 4 workers on 2.*averaged"):
            trainer.train(epochs=0, resume=True)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
        assert [float(w[0][0]) for w in weights] == pytest.approx([np.mean(apart)] * 2)


def test_another_strategy_goes_on_from_the_weights_and_says_what_is_lost(tmp_path):
    with make(tmp_path / "run") as trainer:
        trainer.train(epochs=4)
        weights = trainer.model_weights()[0]
    with make(tmp_path / "run", sync_strategy="fedadam") as trainer:
        with pytest.warns(
            UserWarning, match="was made with sync_strategy='momentum'; .* 'fedadam'"
        ):
            trainer.train(epochs=0, resume=True)
        server = miniray.get(trainer.param_server.get_weights.remote())[0]
    assert server.tobytes() == weights.tobytes()
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '"resumed_with_other_strategy"' in events
