"""``DataParallelTrainer(data=...)``: every row of an epoch once, whatever befalls the workers."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import miniray
from miniray.data import DataLoader, IndexedDataset
from miniray.errors import DataError
from miniray.train import DataParallelTrainer

pytestmark = pytest.mark.usefixtures("_light_workers")

ROWS = 20


def numbers(**kwargs):
    return IndexedDataset([{"x": i} for i in range(ROWS)], **kwargs)


@miniray.remote
class Reader:
    """Takes ``batches`` batches of two an epoch, all by default, and writes down the rows."""

    def __init__(self, worker_id, log):
        self.worker_id, self.log = worker_id, Path(log)

    def load_data_shard(self, shard_id, num_shards, data, die_in=None, batches=None):
        self.loader = data if isinstance(data, DataLoader) else DataLoader(data, 2)
        self.shard, self.die_in, self.batches = (shard_id, num_shards), die_in, batches

    def train_epoch(self, epoch):
        rows = []
        source = iter(self.loader)
        for _ in range(self.batches or len(self.loader)):
            rows += next(source)["x"].tolist()
        if self.batches is None:
            assert next(source, None) is None  # the end of the pass begins the next epoch
        marker = self.log.with_suffix(".died")
        if self.die_in == (self.worker_id, epoch) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with open(self.log, "a") as file:
            file.writelines(f"{epoch} {row}\n" for row in rows)
        return {"loss": float(len(rows)), "num_samples": len(rows)}

    def get_weights(self):
        return [np.zeros(1)]

    def set_weights(self, weights):
        pass


def delivered(log, *epochs):
    lines = [tuple(map(int, line.split())) for line in Path(log).read_text().splitlines()]
    return sorted(row for epoch, row in lines if epoch in epochs)


@pytest.fixture
def run(tmp_path):
    """Trains readers; gives the log and the trainer of the last run."""
    log = tmp_path / "rows.log"
    trainers = []

    def start(workers, epochs, data, resume=False, max_failures=0, save=False, **kwargs):
        trainer = DataParallelTrainer(
            worker=Reader,
            num_workers=workers,
            data=data,
            run_dir=tmp_path / "run",
            progress=False,
            max_failures=max_failures,
            resume=resume,
        )
        trainers.append(trainer)
        trainer.train(epochs, log=str(log), **kwargs)
        if save:
            trainer.save_checkpoint()
        trainer.shutdown()
        return log

    yield start
    for trainer in trainers:
        trainer.shutdown()


def test_each_worker_gets_its_shard_and_each_row_comes_once_an_epoch(run):
    log = run(3, 2, numbers(shuffle=True, seed=1))
    assert delivered(log, 0) == delivered(log, 1) == list(range(ROWS))


def test_a_loader_is_dealt_out_as_it_is(run):
    log = run(2, 1, DataLoader(numbers(), 5, prefetch=0))
    assert delivered(log, 0) == list(range(ROWS))


def test_a_replaced_worker_reads_the_same_part_again(run):
    log = run(2, 3, numbers(shuffle=True, seed=2), max_failures=1, die_in=(1, 1))
    for epoch in range(3):
        assert delivered(log, epoch) == list(range(ROWS))


@pytest.mark.filterwarnings("ignore:resuming a run of")
@pytest.mark.parametrize("then", [1, 2, 3])
def test_the_rest_of_an_epoch_goes_to_however_many_workers(run, then):
    """Two batches of two on two workers are 8 rows; the other 12 go to ``then`` workers."""
    data = numbers(shuffle=True, seed=3)
    run(2, 1, data, save=True, batches=2)
    log = run(then, 2, data, resume=True)
    assert delivered(log, 0, 1) == list(range(ROWS))
    assert len(delivered(log, 1)) == 12


def test_load_data_shard_without_data_raises(tmp_path, raises):
    @miniray.remote
    class Plain:
        def load_data_shard(self, shard_id, num_shards):
            pass

        def train_epoch(self, epoch):
            return {}

        def get_weights(self):
            return [np.zeros(1)]

        def set_weights(self, weights):
            pass

    trainer = DataParallelTrainer(
        worker=Plain, num_workers=1, data=numbers(), backend="inline", run_dir=tmp_path / "run"
    )
    with raises(TypeError):
        trainer.train(1)


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(TypeError, match="IndexedDataset"):
        DataParallelTrainer(worker=Reader, data=[1, 2, 3])
    with pytest.raises(ValueError, match="mode="):
        DataParallelTrainer(worker=Reader, data=numbers(), mode="async")


def test_other_data_than_the_checkpoints_is_refused(run, raises):
    run(1, 1, numbers(), save=True, batches=2)
    with raises(DataError):
        run(1, 2, IndexedDataset([{"x": 0}] * 3), resume=True)
