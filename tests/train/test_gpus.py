"""Trainers reserve GPUs: the engine assigns declared GPUs, whether the machine has them or not."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray.errors import ActorUnschedulableError
from miniray.rl import GRPOTrainer, PPOTrainer
from miniray.train import (
    BaseTrainer,
    DataParallelTrainer,
    DDPTrainer,
    ModelParallelTrainer,
    PipelineParallelTrainer,
    TorchWorker,
)


@pytest.fixture(scope="module", autouse=True)
def _engine():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with miniray.init(num_cpus=4, num_gpus=2):
            yield


class GpuReport:
    def report_gpus(self):
        return miniray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")


class PlainWorker(GpuReport):
    def train_epoch(self, epoch):
        return {"loss": 0.0}

    def get_weights(self):
        return [torch.zeros(1)]

    def set_weights(self, weights):
        pass


class NetWorker(GpuReport, TorchWorker):
    def setup(self):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.train_loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).mean()


class Trainer(DataParallelTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, progress=False, **kwargs)


class CreatingTrainer(Trainer):
    def create_worker(self, worker_id, **kwargs):
        return miniray.remote(NetWorker).remote(worker_id)


def report_gpus(trainer):
    with trainer:
        trainer.train(epochs=1)
        return trainer.call_workers("report_gpus")


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Replace the fixture of the package, which stops the engine after each test."""
    monkeypatch.chdir(tmp_path)


def test_torch_workers_get_one_gpu_each():
    assert sorted(report_gpus(Trainer(2, worker=NetWorker))) == [([0], "0"), ([1], "1")]


def test_ddp_ranks_get_one_gpu_each():
    trainer = DDPTrainer(2, worker=NetWorker, progress=False)
    assert sorted(report_gpus(trainer)) == [([0], "0"), ([1], "1")]


def test_plain_workers_get_gpus_on_request():
    assert report_gpus(Trainer(1, worker=PlainWorker)) == [([], None)]
    assert report_gpus(Trainer(1, worker=PlainWorker, use_gpu=True))[0][0] in ([0], [1])


def test_use_gpu_false_hides_gpus():
    assert report_gpus(Trainer(2, worker=NetWorker, use_gpu=False)) == [([], "")] * 2


def test_fractional_gpus_are_shared():
    trainer = Trainer(4, worker=NetWorker, resources_per_worker={"num_gpus": 0.5})
    assert sorted(ids for ids, _ in report_gpus(trainer)) == [[0], [0], [1], [1]]


def test_workers_of_create_worker_choose_their_device():
    assert report_gpus(CreatingTrainer(3)) == [([], None)] * 3
    with pytest.raises(ValueError, match="create_worker"):
        CreatingTrainer(3, use_gpu=False)


def test_options_of_the_worker_class_are_kept():
    worker = miniray.remote(num_gpus=2)(NetWorker)
    assert report_gpus(Trainer(1, worker=worker)) == [([0, 1], "0,1")]


def test_replaced_worker_gets_a_gpu():
    class Killing(Trainer):
        def on_epoch_start(self, epoch, **kwargs):
            if epoch == 0:
                miniray.kill(self.workers[1])

    trainer = Killing(2, worker=NetWorker, max_failures=1)
    assert sorted(report_gpus(trainer)) == [([0], "0"), ([1], "1")]


def make_policy():
    raise AssertionError("no worker must start")


MODEL = {
    "model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)),
    "loss": nn.functional.mse_loss,
    "optimizer": torch.optim.SGD,
    "data": [],
}
RL = {
    "policy": make_policy,
    "reward": lambda row, response: 0.0,
    "data": [{}] * 8,
    "num_workers": 3,
}


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (BaseTrainer, {"num_workers": 3, "worker": NetWorker}),
        (DataParallelTrainer, {"num_workers": 3, "worker": NetWorker}),
        (DataParallelTrainer, {"num_workers": 3, "worker": PlainWorker, "use_gpu": True}),
        (DDPTrainer, {"num_workers": 3, "worker": NetWorker}),
        (PipelineParallelTrainer, {"num_workers": 3, **MODEL}),
        (ModelParallelTrainer, {"num_workers": 3, **MODEL}),
        (PPOTrainer, RL),
        (GRPOTrainer, RL),
    ],
)
def test_fewer_gpus_than_workers_raises_before_workers_start(trainer, options, golden):
    length = {"steps": 1} if trainer in (PPOTrainer, GRPOTrainer) else {"epochs": 1}
    trainer = trainer(progress=False, **options)
    with pytest.raises(ActorUnschedulableError) as caught, trainer:
        trainer.train(**length)
    assert trainer.workers == []
    text = str(caught.value).replace(type(trainer).__name__, "Trainer")
    golden("fewer_gpus_than_workers.txt", text + "\n")


@pytest.mark.parametrize(("use_gpu", "num_gpus"), [(True, 0), (False, 0.5)])
def test_contradicting_options_raise(use_gpu, num_gpus, raises):
    resources = {"num_gpus": num_gpus}
    trainer = Trainer(1, worker=NetWorker, use_gpu=use_gpu, resources_per_worker=resources)
    with raises(ValueError), trainer:
        trainer.train(epochs=1)


@pytest.mark.parametrize("use_gpu", ["yes", 1])
def test_use_gpu_must_be_bool(use_gpu):
    with pytest.raises(ValueError, match="use_gpu"):
        Trainer(1, worker=NetWorker, use_gpu=use_gpu)
