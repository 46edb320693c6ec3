"""Callbacks, driven as a trainer drives them."""

import numpy as np
import pytest
import torch

import miniray
from miniray.train import (
    Callback,
    Checkpoint,
    CheckpointStore,
    EarlyStopping,
    LRSchedule,
    RunDirectory,
)
from miniray.train.run.state import TrainState


class Trainer:
    """The trainer attributes that callbacks use, and a record of the order of hook calls."""

    def __init__(self, tmp_path, workers=()):
        self.run = RunDirectory.open(tmp_path / "run")
        self.checkpoints = CheckpointStore(self.run.checkpoints)
        self.workers = list(workers)
        self.state = TrainState()
        self.should_stop = False
        self.stop_reason = ""

    @property
    def epoch(self):
        return self.state.epoch

    @property
    def history(self):
        return self.state.history

    def save_checkpoint(self, epoch, background=False):
        return self.checkpoints.save(epoch, {"history": self.history})

    def call_workers(self, method, *args, epoch=None):
        return miniray.get([getattr(worker, method).remote(*args) for worker in self.workers])

    def train(self, callback, results, first=0, **kwargs):
        callback.on_train_start(self, **kwargs)
        for epoch, result in enumerate(results, start=first):
            callback.on_epoch_start(self, epoch, **kwargs)
            self.state.epoch = epoch
            self.state.end_epoch(epoch, {"epoch": epoch, **result})
            callback.on_epoch_end(self, epoch, self.history[-1], **kwargs)
            if self.should_stop:
                break
        callback.on_train_end(self, self.history, **kwargs)


def losses(*values):
    return [{"loss": value} for value in values]


def test_the_base_has_four_hooks_and_does_nothing(tmp_path):
    Trainer(tmp_path).train(Callback(), losses(1, 2), batch_size=3)
    assert Callback().get_state() == {}


# -- Checkpoint ------------------------------------------------------------------------------------


def test_checkpoints_every_so_many_epochs_and_at_the_end(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.train(Checkpoint(every=2, keep_last=None), losses(*range(5)))
    assert [found.epoch for found in trainer.checkpoints.list()] == [1, 3, 4]


def test_checkpoints_keep_the_last_and_the_best(tmp_path):
    trainer = Trainer(tmp_path)
    callback = Checkpoint(keep_last=1, keep_best=True)
    trainer.train(callback, losses(0.5, 0.1, 0.9, 0.7))
    assert [found.epoch for found in trainer.checkpoints.list()] == [1, 3]


def test_what_the_trainer_was_told_to_keep_is_kept(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.checkpoints.configure(keep_last=2, keep_best=("loss", "min"))
    trainer.train(Checkpoint(), losses(0.5, 0.1, 0.9, 0.7, 0.8))
    assert [found.epoch for found in trainer.checkpoints.list()] == [1, 3, 4]
    trainer.train(Checkpoint(keep_last=1), losses(0.5), first=5)
    assert [found.epoch for found in trainer.checkpoints.list()] == [1, 5]


def test_a_best_one_by_a_metric_that_never_came_is_warned_of(tmp_path, warns):
    callback = Checkpoint(keep_best=True, monitor="val_loss")
    with warns(UserWarning):
        Trainer(tmp_path).train(callback, losses(0.5))


def test_best_by_name_or_by_choice():
    assert Checkpoint(keep_best=True, monitor="accuracy").keep_best == ("accuracy", "max")
    assert Checkpoint(keep_best=True, monitor="accuracy", mode="min").keep_best[1] == "min"
    assert Checkpoint().keep_best is None
    for bad in ({"every": 0}, {"mode": "best", "keep_best": True}):
        with pytest.raises(ValueError):
            Checkpoint(**bad)


# -- EarlyStopping ---------------------------------------------------------------------------------


def test_it_stops_after_patience_epochs_without_improvement(tmp_path, check_message):
    trainer = Trainer(tmp_path)
    trainer.train(EarlyStopping("loss", patience=2), losses(0.5, 0.4, 0.45, 0.4, 0.1))
    assert len(trainer.history) == 4
    assert trainer.should_stop
    check_message(trainer.stop_reason)
    assert trainer.history[-1]["stop_reason"] == trainer.stop_reason


def test_it_goes_on_while_it_improves_by_enough(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.train(EarlyStopping("loss", 1, min_delta=0.1), losses(1.0, 0.8, 0.65, 0.6, 0.1))
    assert [record["loss"] for record in trainer.history] == [1.0, 0.8, 0.65, 0.6]


def test_highest_is_best_for_an_accuracy(tmp_path):
    trainer = Trainer(tmp_path)
    values = [{"accuracy": torch.tensor(v)} for v in (0.1, 0.2, 0.3, 0.3)]
    trainer.train(EarlyStopping("accuracy", 1), values)
    assert len(trainer.history) == 4


def test_nan_is_no_improvement_and_the_first_number_is(tmp_path, check_message):
    trainer = Trainer(tmp_path)
    nan = float("nan")
    trainer.train(EarlyStopping("loss", 2), losses(nan, 5.0, nan, np.float32("nan"), 1.0))
    assert len(trainer.history) == 4
    other = Trainer(tmp_path / "b")
    other.train(EarlyStopping("loss", 2), losses(nan, nan, 1.0))
    check_message(other.stop_reason)


def test_epochs_without_the_metric_do_not_count(tmp_path):
    trainer = Trainer(tmp_path)
    results = [{"val_loss": 1.0}, {}, {}, {"val_loss": 2.0}, {}, {"val_loss": 0.5}, {}]
    trainer.train(EarlyStopping("val_loss", 2), results)
    assert not trainer.should_stop


def test_a_metric_that_never_comes_is_warned_of_and_one_that_is_no_number_refused(
    tmp_path, warns, raises
):
    trainer = Trainer(tmp_path)
    with warns(UserWarning):
        trainer.train(EarlyStopping("lss"), losses(1, 2))
    with raises(TypeError):
        trainer.train(EarlyStopping("loss"), losses([1]))


def test_its_memory_survives_a_resume():
    first = EarlyStopping("loss", 3)
    first.best, first.waited = 0.25, 2
    second = EarlyStopping("loss", 3)
    second.set_state(first.get_state())
    assert (second.best, second.waited) == (0.25, 2)


def test_bad_arguments_are_refused():
    for bad in ({"patience": 0}, {"min_delta": -1}, {"min_delta": float("nan")}, {"mode": "x"}):
        with pytest.raises(ValueError):
            EarlyStopping("loss", **bad)


# -- LRSchedule ------------------------------------------------------------------------------------


@miniray.remote
class Worker:
    def __init__(self):
        self.rates = []

    def set_lr(self, lr):
        self.rates.append(lr)

    def seen(self):
        return self.rates


@miniray.remote
class Fixed:
    def ping(self):
        return 1


@pytest.fixture
def engine():
    with miniray.init(backend="inline"):
        yield


def test_every_worker_gets_the_rate_before_each_epoch(tmp_path, engine):
    workers = [Worker.remote(), Worker.remote()]
    schedule = LRSchedule(lambda epoch: 0.5 ** (epoch + 1))
    Trainer(tmp_path, workers).train(schedule, losses(1, 1))
    assert miniray.get([w.seen.remote() for w in workers]) == [[0.5, 0.25]] * 2
    assert schedule.lr == 0.25


def test_workers_without_set_lr_are_refused_before_training(tmp_path, engine, raises):
    trainer = Trainer(tmp_path, [Worker.remote(), Fixed.remote()])
    with raises(TypeError):
        trainer.train(LRSchedule(lambda epoch: 0.1), losses(1))
    assert trainer.history == []


@pytest.mark.parametrize("bad", [None, -1, float("nan"), "fast"])
def test_a_rate_is_a_number_from_zero(tmp_path, engine, bad):
    with pytest.raises(ValueError, match=r"schedule\(0\)"):
        Trainer(tmp_path, [Worker.remote()]).train(LRSchedule(lambda epoch: bad), losses(1))


def test_a_schedule_is_a_function(raises):
    with raises(TypeError):
        LRSchedule(0.1)
