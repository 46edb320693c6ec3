"""Trainers with `worker=` reserve one GPU per worker, and train on it."""

import pytest

from miniray.errors import ActorUnschedulableError
from miniray.rl import GRPOConfig, GRPOTrainer
from miniray.rl.worker import RLWorker
from miniray.train import DataParallelTrainer, DDPTrainer, TorchWorker
from tests.gpu.gpu_for_tests import DEVICE, ON_GPU, OWN_BACKEND, OnGpu
from tests.rl.trainers_for_tests import SMALL, make

torch = pytest.importorskip("torch")


class Net(TorchWorker):
    def setup(self):
        self.model = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        data = torch.utils.data.TensorDataset(torch.ones(8, 4))
        self.train_loader = torch.utils.data.DataLoader(data, batch_size=2)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).mean()

    def find_devices(self):
        state = next(iter(self.optimizer.state.values()))
        return self.model.weight.device.type, state["exp_avg"].device.type


@pytest.mark.parametrize(("use_gpu", "device"), [(None, DEVICE), (False, "cpu")])
def test_torch_worker(use_gpu, device):
    with DataParallelTrainer(1, worker=Net, use_gpu=use_gpu, progress=False) as trainer:
        trainer.train(epochs=1)
        assert trainer.call_workers("find_devices") == [(device, device)]


class DeviceWorker(RLWorker):
    def find_device(self):
        return self.device.type


class DeviceTrainer(GRPOTrainer):
    worker_class = DeviceWorker


@pytest.mark.parametrize("use_gpu", [None, False])
def test_ddp(use_gpu):
    device, backend = (DEVICE, OWN_BACKEND) if use_gpu is None else ("cpu", "gloo")
    with DDPTrainer(1, worker=OnGpu, use_gpu=use_gpu, progress=False) as trainer:
        trainer.train(epochs=1)
        assert trainer.call_workers("whereabouts")[0][:3] == (device, device, backend)


@pytest.mark.parametrize(("use_gpu", "device"), [(None, DEVICE), (False, "cpu")])
def test_rl(use_gpu, device):
    options = {"config": GRPOConfig(**SMALL), "use_gpu": use_gpu, "backend": "local"}
    with make(DeviceTrainer, num_workers=1, **options) as trainer:
        trainer.train(steps=1)
        assert trainer.call_workers("find_device") == [device]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_more_workers_than_gpus_raises():
    count = torch.cuda.device_count() + 1
    with (
        DDPTrainer(count, worker=OnGpu, progress=False) as trainer,
        pytest.raises(ActorUnschedulableError, match="use_gpu=False"),
    ):
        trainer.train(epochs=1)
