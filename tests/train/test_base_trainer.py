"""BaseTrainer: lifecycle, hooks, keyword arguments, errors."""

import json

import pytest

import miniray
from miniray.train import BaseTrainer, Callback
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


class Recording(BaseTrainer):
    """Notes every hook it sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = []

    def create_worker(self, worker_id, **kwargs):
        self.seen.append(("create_worker", worker_id, kwargs))
        return Counter.remote(worker_id)

    def on_train_start(self, **kwargs):
        self.seen.append(("train_start", kwargs))

    def on_epoch_start(self, epoch, **kwargs):
        self.seen.append(("epoch_start", epoch, kwargs))

    def on_epoch_end(self, epoch, result, **kwargs):
        super().on_epoch_end(epoch, result, **kwargs)
        self.seen.append(("epoch_end", epoch, result["loss"], kwargs))

    def on_train_end(self, history, **kwargs):
        self.returned_by_super = super().on_train_end(history)
        self.seen.append(("train_end", kwargs))


def test_hooks_come_in_order_with_the_arguments_of_train():
    trainer = Recording(num_workers=2, backend="inline", progress=False)
    result = trainer.train(epochs=2, lr=0.5)
    assert trainer.seen == [
        ("create_worker", 0, {"lr": 0.5}),
        ("create_worker", 1, {"lr": 0.5}),
        ("train_start", {"lr": 0.5}),
        ("epoch_start", 0, {"lr": 0.5}),
        ("epoch_end", 0, 1.5, {"lr": 0.5}),  # mean of 1 + 0 and 1 + 1
        ("epoch_start", 1, {"lr": 0.5}),
        ("epoch_end", 1, 1.0, {"lr": 0.5}),  # mean of 0.5 + 0 and 0.5 + 1
        ("train_end", {"lr": 0.5}),
    ]
    assert trainer.returned_by_super is result is trainer.result


def test_hooks_need_not_take_what_they_do_not_use():
    class Terse(BaseTrainer):
        def create_worker(self, worker_id):
            return Counter.remote(worker_id)

        def on_epoch_end(self, epoch, result):
            self.last = epoch

    trainer = Terse(1, backend="inline", progress=False)
    trainer.train(epochs=3, lr=0.1)
    assert trainer.last == 2


def test_constructing_starts_nothing_and_training_stops_what_it_started():
    trainer = Recording(1, backend="inline", progress=False)
    assert trainer.workers == []
    assert not miniray.is_initialized()
    with trainer:
        trainer.train(epochs=1)
        assert miniray.is_initialized()
        assert len(trainer.workers) == 1
    assert not miniray.is_initialized()
    trainer.shutdown()  # again: harmless


def test_the_users_own_engine_is_left_running():
    miniray.init(backend="inline")
    with Recording(2, progress=False) as trainer:
        trainer.train(epochs=1)
        workers = list(trainer.workers)
    assert miniray.is_initialized()
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(workers[0].seen.remote())


def test_training_again_goes_on_from_where_it_was():
    with Recording(2, backend="inline", progress=False) as trainer:
        trainer.train(epochs=2)
        first = list(trainer.workers)
        result = trainer.train(epochs=3)
        assert trainer.workers == first
        assert miniray.get(first[0].seen.remote())["epochs"] == [0, 1, 2, 3, 4]
    assert [record["epoch"] for record in result.history] == [0, 1, 2, 3, 4]
    assert result.epochs == 5


def test_a_worker_class_instead_of_a_subclass():
    with BaseTrainer(2, worker=Counter, backend="inline", progress=False) as trainer:
        # Its __init__ takes lr and start, but knows no batch_size.
        trainer.train(epochs=1, lr=0.25, batch_size=8)
        assert miniray.get(trainer.workers[1].seen.remote())["lr"] == 0.25


def test_a_trainer_that_cannot_make_workers_says_so():
    with pytest.raises(NotImplementedError, match=r"must implement create_worker.*worker=MyWorker"):
        BaseTrainer(1, backend="inline", progress=False).train(epochs=1)
    assert not miniray.is_initialized()


def test_what_is_not_an_actor_is_refused():
    class Wrong(BaseTrainer):
        def create_worker(self, worker_id, **kwargs):
            return object()

    with pytest.raises(TypeError, match=r"create_worker\(0\) must return an actor handle"):
        Wrong(1, backend="inline", progress=False).train(epochs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_workers": 0}, "num_workers must be an int >= 1"),
        ({"num_workers": True}, "num_workers must be an int >= 1"),
        ({"num_workers": 2, "resources_per_worker": {"num_cpus": 1}}, "goes with worker="),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        Recording(**arguments)


@pytest.mark.parametrize("epochs", [-1, 1.5, True, "3"])
def test_bad_numbers_of_epochs_are_refused(epochs):
    with pytest.raises(ValueError, match="epochs must be an int >= 0"):
        Recording(1, backend="inline").train(epochs=epochs)


def test_an_epoch_that_returns_no_dict_is_refused():
    class Silent(Recording):
        def train_epoch(self, epoch, **kwargs):
            return None

    with pytest.raises(TypeError, match=r"Silent.train_epoch\(\) must return a dict"):
        Silent(1, backend="inline", progress=False).train(epochs=1)


def test_an_overridden_epoch_needs_no_train_epoch_in_the_worker():
    @miniray.remote
    class Asked:
        def custom_method(self, x):
            return x * 2

    class Custom(BaseTrainer):
        def create_worker(self, worker_id, **kwargs):
            return Asked.remote()

        def train_epoch(self, epoch, **kwargs):
            return {"total": sum(self.call_workers("custom_method", epoch + 1))}

    with Custom(3, backend="inline", progress=False) as trainer:
        assert trainer.train(epochs=2)["total"] == 12
    with pytest.raises(TypeError, match=r"Asked lacks train_epoch\(\)"):
        BaseTrainer(1, worker=Asked, backend="inline", progress=False).train(epochs=1)


def test_an_exception_in_a_worker_says_which_and_when_and_ends_the_run():
    @miniray.remote
    class Failing(Counter.__wrapped__):
        def train_epoch(self, epoch):
            if self.worker_id == 1 and epoch == 2:
                raise KeyError("missing column")
            return super().train_epoch(epoch)

    trainer = BaseTrainer(2, worker=Failing, backend="local", progress=False, name="broken")
    with pytest.raises(KeyError) as caught:
        trainer.train(epochs=5)
    error = caught.value
    assert (error.worker_id, error.epoch) == (1, 2)
    assert "worker 1 in epoch 2: Failing.train_epoch" in str(error)
    assert 'raise KeyError("missing column")' in str(error)
    assert not miniray.is_initialized()
    run = json.loads((trainer.run.path / "run.json").read_text())
    assert run["state"] == "failed"
    assert len((trainer.run.path / "metrics.jsonl").read_text().splitlines()) == 2


def test_callbacks_see_the_trainer_and_may_stop_it(capsys):
    class Stop(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            if epoch == 1:
                trainer.should_stop, trainer.stop_reason = True, "enough"

    with Recording(1, backend="inline", callbacks=[Stop()]) as trainer:
        assert trainer.train(epochs=10).epochs == 2
        assert capsys.readouterr().err.splitlines()[-1] == "stopped after epoch 1: enough"
        run = json.loads((trainer.run.path / "run.json").read_text())
        assert run["stop_reason"] == "enough"
        assert trainer.train(epochs=1).epochs == 3


def test_workers_are_seeded_apart_and_alike_each_time():
    @miniray.remote
    class Roller(Counter.__wrapped__):
        def train_epoch(self, epoch):
            import random

            import numpy as np

            return {f"r{self.worker_id}": random.random() + np.random.rand()}

    def rolls():
        with BaseTrainer(2, worker=Roller, backend="local", seed=7, progress=False) as trainer:
            result = trainer.train(epochs=1)
        return result["r0"], result["r1"]

    first = rolls()
    assert first[0] != first[1]
    assert rolls() == first


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    with Recording(1, backend="inline") as trainer:
        trainer.train(epochs=2)
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 2
    assert "loss" in shown[0]
    with Recording(1, backend="inline", progress=False) as trainer:
        trainer.train(epochs=2)
    assert capsys.readouterr().err == ""
