"""Keyword arguments of ``train()`` reach what accepts them, or raise."""

import inspect

import numpy as np
import pytest

import miniray
from miniray.rl import GRPOTrainer
from miniray.train import (
    BaseTrainer,
    Callback,
    DataParallelTrainer,
    DDPTrainer,
    PipelineParallelTrainer,
    TorchWorker,
)

pytestmark = pytest.mark.usefixtures("_light_workers")

QUIET = {"backend": "inline", "progress": False}


class Worker:
    """Remembers its arguments."""

    def __init__(self, worker_id, lr=0.1):
        self.received = {"worker_id": worker_id, "lr": lr}

    def train_epoch(self, epoch):
        return {"loss": 0.0}

    def get_weights(self):
        return [np.zeros(1)]

    def set_weights(self, weights):
        pass

    def get_received(self):
        return self.received


class ShardWorker(Worker):
    def load_data_shard(self, shard_id, num_shards, **kwargs):
        self.received.update(kwargs)


class TrainerOfUser(DataParallelTrainer):
    """The trainer of the first example: its ``create_worker`` doesn't use its kwargs."""

    def create_worker(self, worker_id, **kwargs):
        return miniray.remote(ShardWorker).remote(worker_id)

    def on_epoch_end(self, epoch, result, **kwargs):
        super().on_epoch_end(epoch, result, **kwargs)
        self.losses = [*getattr(self, "losses", []), result["loss"]]


class FixedTrainer(BaseTrainer):
    """A ``create_worker`` that accepts a rate only."""

    def create_worker(self, worker_id, lr=0.1):
        return miniray.remote(ShardWorkerOfBatches).remote(worker_id, lr)


class ShardWorkerOfBatches(Worker):
    def load_data_shard(self, shard_id, num_shards, batch_size=1):
        self.received["batch_size"] = batch_size


def train(trainer, **kwargs):
    with trainer:
        trainer.train(epochs=1, **kwargs)
        return trainer.call_workers("get_received")


def get_error(trainer, **kwargs):
    with trainer, pytest.raises(TypeError) as caught:
        trainer.train(epochs=1, **kwargs)
    assert not miniray.is_initialized()
    return str(caught.value)


# -- documented examples ---------------------------------------------------------------------------


def test_kwargs_reach_create_worker_of_the_user():
    class Trainer(DataParallelTrainer):
        def create_worker(self, worker_id, **kwargs):
            return miniray.remote(Worker).remote(worker_id, **kwargs)

    received = train(Trainer(2, **QUIET), lr=0.001)
    assert received == [{"worker_id": 0, "lr": 0.001}, {"worker_id": 1, "lr": 0.001}]


def test_kwargs_reach_load_data_shard():
    received = train(TrainerOfUser(1, **QUIET), batch_size=128, dataset="cifar10")
    assert received == [{"worker_id": 0, "lr": 0.1, "batch_size": 128, "dataset": "cifar10"}]


def test_create_worker_with_unused_kwargs_accepts_all():
    class Trainer(TrainerOfUser):
        def create_worker(self, worker_id, **kwargs):
            return miniray.remote(Worker).remote(worker_id)

    assert train(Trainer(1, **QUIET), batch_size=128) == [{"worker_id": 0, "lr": 0.1}]


def test_kwargs_reach_hooks():
    seen = {}

    class Trainer(BaseTrainer):
        def on_train_start(self, **kwargs):
            seen["start"] = kwargs

        def on_epoch_start(self, epoch, dataset=None, **kwargs):
            seen["epoch"] = dataset

    train(Trainer(1, worker=Worker, **QUIET), dataset="cifar10")
    assert seen == {"start": {"dataset": "cifar10"}, "epoch": "cifar10"}


def test_kwargs_reach_callbacks():
    class Tag(Callback):
        def on_epoch_end(self, trainer, epoch, result, tag=None, **kwargs):
            result["tag"] = tag

    with BaseTrainer(1, worker=Worker, callbacks=Tag(), **QUIET) as trainer:
        assert trainer.train(epochs=1, tag="a")["tag"] == "a"


def test_kwargs_reach_setup_of_a_torch_worker():
    class Fitter(TorchWorker):
        def setup(self, width=1):
            self.width = width

        def train_epoch(self, epoch):
            return {"width": self.width}

    with BaseTrainer(1, worker=Fitter, **QUIET) as trainer:
        assert trainer.train(epochs=1, width=3)["width"] == 3


# -- errors ----------------------------------------------------------------------------------------


def test_misspelled_kwarg_raises_before_anything_starts(tmp_path, golden):
    messages = [
        get_error(BaseTrainer(1, worker=Worker, run_dir=tmp_path / "run", **QUIET), **kwargs)
        for kwargs in (
            {"learning_rate": 3},
            {"lrr": 3},
            {"max_epochs": 3},
            {"max_failures": 3},
            {"batch_size": 3},
            {"devices": 3},
            {"max_tokens": 3},
            {"sed": 3},
        )
    ]
    assert not (tmp_path / "run").exists()
    golden("train_kwargs.txt", "\n".join(messages) + "\n")


def test_kwargs_of_hooks_that_only_call_super_accept_nothing():
    class Trainer(BaseTrainer):
        def on_train_start(self, **kwargs):
            pass

        def train_epoch(self, epoch, **kwargs):
            return super().train_epoch(epoch, **kwargs)

        def on_epoch_end(self, epoch, result, **kwargs):
            super().on_epoch_end(epoch, result, **kwargs)

    class Quiet(Callback):
        def on_epoch_end(self, trainer, epoch, result, **kwargs):
            pass

    trainer = Trainer(1, worker=Worker, callbacks=[Quiet()], **QUIET)
    assert "'learning_rate'" in get_error(trainer, learning_rate=3)


def test_kwargs_of_a_hook_in_a_base_class_count():
    seen = {}

    class Base(BaseTrainer):
        def on_epoch_end(self, epoch, result, **kwargs):
            seen.update(kwargs)

    class Derived(Base):
        def on_epoch_end(self, epoch, result, **kwargs):
            super().on_epoch_end(epoch, result, **kwargs)

    train(Derived(1, worker=Worker, **QUIET), tag="a")
    assert seen == {"tag": "a"}


def test_hook_without_source_accepts_all():
    scope = {"BaseTrainer": BaseTrainer}
    exec(
        "class Trainer(BaseTrainer):\n"
        "    __module__ = 'typed'\n"
        "    def on_train_start(self, **kwargs): pass\n",
        scope,
    )
    scope["Trainer"].on_train_start.__module__ = "typed"
    with pytest.raises(OSError):
        inspect.getsource(scope["Trainer"].on_train_start)
    train(scope["Trainer"](1, worker=Worker, **QUIET), tag="a")


def test_create_worker_without_kwargs_raises_for_unknown_names():
    assert train(FixedTrainer(1, **QUIET), lr=0.5) == [{"worker_id": 0, "lr": 0.5}]
    assert train(FixedTrainer(1, **QUIET), batch_size=4)  # a worker method has this parameter
    assert "'learning_rate'" in get_error(FixedTrainer(1, **QUIET), learning_rate=0.5)


def test_second_call_is_checked_too():
    with FixedTrainer(1, **QUIET) as trainer:
        trainer.train(epochs=1, lr=0.5)
        with pytest.raises(TypeError, match="'ls'"):
            trainer.train(epochs=1, ls=0.5)
        assert trainer.train(epochs=1).epochs == 2


def test_ddp_worker_gets_no_kwargs_in_train_epoch():
    class Own(Worker):
        def train_epoch(self, epoch, momentum=0.0):
            return {"loss": 0.0}

    assert "'momentum'" in get_error(DDPTrainer(1, worker=Own, **QUIET), momentum=0.9)


def test_trainers_with_their_own_workers_accept_kwargs_of_hooks_only():
    parts = {"model": [], "loss": abs, "optimizer": abs, "data": abs}
    trainer = PipelineParallelTrainer(2, **parts, progress=False)
    assert "'lr'" in get_error(trainer, lr=0.1)
    trainer = GRPOTrainer(lambda: None, lambda row, response: 0.0, [{"prompt": "a"}])
    with pytest.raises(TypeError, match=r"'lr'.*GRPOConfig"):
        trainer.train(steps=1, lr=0.1)


# -- worker ids ------------------------------------------------------------------------------------


class Base:
    def train_epoch(self, epoch):
        return {"first": self.first}


class Warmup(Base):
    def __init__(self, warmup=500):
        self.first = warmup


class First(Base):
    def __init__(self, number):
        self.first = number


class Rank(Base):
    def __init__(self, lr=0.5, *, rank=None):
        self.first = rank


class Id(Base):
    def __init__(self, folder, id=-1):
        self.first = (folder, id)


class WorkerId(Base):
    def __init__(self, worker_id=0):
        self.first = worker_id


class Any(Base):
    def __init__(self, *args):
        self.first = args[0]


@pytest.mark.parametrize(
    ("worker", "kwargs", "received"),
    [
        (Warmup, {}, [500, 500]),
        (Warmup, {"warmup": 5}, [5, 5]),
        (First, {}, [0, 1]),
        (First, {"number": 7}, [7, 7]),
        (Rank, {}, [0, 1]),
        (Rank, {"rank": 3}, [3, 3]),
        (Id, {"folder": "a"}, [("a", 0), ("a", 1)]),
        (WorkerId, {}, [0, 1]),
        (Any, {}, [0, 1]),
    ],
)
def test_worker_id_is_passed_to_its_parameter_only(worker, kwargs, received):
    with BaseTrainer(2, worker=worker, **QUIET) as trainer:
        trainer.train(epochs=1, **kwargs)
        results = trainer.call_workers("train_epoch", 0)
    assert [result["first"] for result in results] == received
