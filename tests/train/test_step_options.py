"""``precision``, ``accumulate`` and ``clip_norm`` of ``DataParallelTrainer``."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray.train import DataParallelTrainer, DDPTrainer, TorchWorker


class Fitter(TorchWorker):
    """Fits random numbers in batches of 4; the last one of 22 rows has 2."""

    def setup(self, lr=0.1):
        torch.manual_seed(0)
        x = torch.randn(22, 3)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.train_loader = DataLoader(TensorDataset(x, x.sum(1) * 5), batch_size=4)
        self.val_loader = self.train_loader
        self.dtypes = set()

    def training_step(self, batch, batch_idx):
        output = self.model(batch[0])[:, 0]
        self.dtypes.add((self.model.training, str(output.dtype)))
        return nn.functional.mse_loss(output.float(), batch[1])

    def get_dtypes(self):
        return self.dtypes


class Scheduled(Fitter):
    scheduler_interval = "step"

    def setup(self, lr=0.1):
        super().setup(lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

    def get_rate(self):
        return self.optimizer.param_groups[0]["lr"]


class OwnSteps(Fitter):
    def optimize(self, loss):
        super().optimize(loss)


class OwnEpochs(Fitter):
    def train_epoch(self, epoch):
        return super().train_epoch(epoch)


class Plain:
    def train_epoch(self, epoch):
        return {}

    def get_weights(self):
        return [torch.zeros(1)]

    def set_weights(self, weights):
        pass


def train(worker, num_workers=1, **options):
    trainer = DataParallelTrainer(
        num_workers, worker=worker, backend="inline", progress=False, **options
    )
    with trainer:
        trainer.train(2)
        return trainer.model_weights()


@pytest.mark.parametrize(
    "options", [{"accumulate": 3}, {"clip_norm": 0.5}, {"accumulate": 2, "precision": "bf16"}]
)
def test_weights_are_those_of_ddp_trainer(options):
    with DDPTrainer(1, worker=Fitter, backend="inline", progress=False, **options) as trainer:
        trainer.train(2)
        expected = trainer.model_weights()
    found = train(Fitter, **options)
    assert any(not torch.equal(found[name], value) for name, value in train(Fitter).items())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_accumulated_batches_are_one_large_batch():
    class Large(Fitter):
        def setup(self, lr=0.1):
            super().setup(lr)
            self.train_loader = DataLoader(self.train_loader.dataset, batch_size=12)

    for name, value in train(Large).items():
        torch.testing.assert_close(train(Fitter, accumulate=3)[name], value)


def test_precision_is_that_of_training_and_evaluation():
    options = {"backend": "inline", "progress": False, "precision": "bf16"}
    with DataParallelTrainer(2, worker=Fitter, eval_interval=1, **options) as trainer:
        trainer.train(1)
        found = miniray.get([worker.get_dtypes.remote() for worker in trainer.workers])
    assert found == [{(True, "torch.bfloat16"), (False, "torch.bfloat16")}] * 2


def test_scheduler_can_step_after_each_optimizer_step():
    options = {"backend": "inline", "progress": False, "accumulate": 2}
    with DataParallelTrainer(1, worker=Scheduled, **options) as trainer:
        trainer.train(1)
        (rate,) = miniray.get([worker.get_rate.remote() for worker in trainer.workers])
    assert rate == pytest.approx(0.1 * 0.5**3)  # 6 batches


def test_scale_of_gradients_is_part_of_checkpoints(tmp_path):
    options = {"precision": "fp16", "run_dir": tmp_path, "progress": False, "backend": "inline"}
    with DataParallelTrainer(1, worker=Fitter, **options) as trainer:
        trainer.train(3)
        expected = trainer.model_weights()
    options["run_dir"] = tmp_path / "other"
    with DataParallelTrainer(1, worker=Fitter, **options) as trainer:
        trainer.train(1)
        path = trainer.save_checkpoint()
    with DataParallelTrainer(1, worker=Fitter, **options) as trainer:
        trainer.train(3, resume=path)
        found = trainer.model_weights()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("worker", [OwnSteps, OwnEpochs, Plain])
def test_worker_with_its_own_steps_raises(worker):
    with pytest.raises(ValueError, match=r"accumulate.*clip_norm.*TorchWorker"):
        train(worker, accumulate=2, clip_norm=1.0)


@pytest.mark.parametrize(
    "options", [{"precision": "half"}, {"accumulate": 0}, {"clip_norm": 0}, {"clip_norm": "1"}]
)
def test_invalid_options_raise(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        DataParallelTrainer(2, worker=Fitter, **options)


class Dying(Fitter):
    def training_step(self, batch, batch_idx):
        if batch_idx == 5 and not self.marker.exists():
            self.marker.touch()
            os._exit(1)
        return super().training_step(batch, batch_idx)

    def setup(self, marker):
        super().setup()
        self.marker = marker


def test_replacement_has_the_options(tmp_path):
    expected = train(Fitter, accumulate=3)
    options = {"backend": "local", "progress": False, "max_failures": 1, "accumulate": 3}
    with DataParallelTrainer(1, worker=Dying, **options) as trainer:
        trainer.train(2, marker=tmp_path / "died")
        found = trainer.model_weights()
    assert (tmp_path / "died").exists()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
