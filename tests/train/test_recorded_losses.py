"""The loss in a rank's record is the user's, not the one that is divided for ``backward``."""

import pytest

import miniray
from miniray.doctor.reader import read_box
from miniray.train import DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer, TorchWorker

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.shutdown()
    miniray.init(backend="local", num_workers=2)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def make_layers():
    return [nn.Linear(2, 4), nn.Linear(4, 2)]


def make_model():
    return nn.Sequential(*make_layers())


def one(output, target):
    """Return a loss that is always 1."""
    return (output.float() * 0).sum() + 1


def make_loader(n, batch_size):
    return DataLoader(TensorDataset(torch.ones(n, 2), torch.ones(n, 2)), batch_size)


class Constant:
    """13 samples: on two ranks the last batches differ, and so do their weights."""

    def __init__(self):
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.train_loader = make_loader(13, 1)

    def training_step(self, batch, batch_idx):
        return one(self.model(batch[0]), batch[1])


class Dividing(TorchWorker):
    """Accumulates gradients in a loop that divides the loss, and reports the loss itself."""

    def __init__(self):
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.train_loader = make_loader(16, 1)

    def train_epoch(self, epoch):
        from miniray import doctor

        for number, (x, y) in enumerate(self.train_loader, start=1):
            loss = one(self.model(x), y)
            (loss / 4).backward()
            if number % 4 == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                doctor.step(loss=loss, batch_size=4)
        return {"loss": loss.item()}


def recorded_losses(trainer):
    """Return the losses of all steps and the current one, by rank."""
    boxes = [read_box(trainer.run.path / "ranks" / f"{rank}.box") for rank in range(2)]
    return [([step.loss for step in box.steps], box.loss) for box in boxes]


@pytest.mark.parametrize("shard", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_loss_of_accumulated_steps_is_not_divided(shard):
    options = {"worker": Constant, "accumulate": 4, "shard": shard, "progress": False}
    with DDPTrainer(2, **options) as trainer:
        assert trainer.train(epochs=1)["loss"] == 1.0
        assert recorded_losses(trainer) == [([1.0, 1.0], 1.0)] * 2


@pytest.mark.slow
def test_loss_of_scaled_steps_is_neither_divided_nor_scaled():
    options = {"worker": Constant, "accumulate": 4, "precision": "fp16", "progress": False}
    with DDPTrainer(2, **options) as trainer:
        trainer.train(epochs=1)
        assert recorded_losses(trainer) == [([1.0, 1.0], 1.0)] * 2


@pytest.mark.slow
def test_loss_of_a_pipeline_is_that_of_the_batch():
    """Only the last stage has a loss."""
    data = make_loader(16, 8)
    options = {"model": make_layers, "data": data, "loss": one, "microbatches": 4}
    with PipelineParallelTrainer(
        2, optimizer=torch.optim.SGD, progress=False, **options
    ) as trainer:
        trainer.train(1)
        losses = sorted(recorded_losses(trainer), key=lambda record: record[1] is not None)
    assert losses == [([None, None], None), ([1.0, 1.0], 1.0)]


def test_loss_of_microbatches_of_cut_layers_is_that_of_the_batch():
    options = {"model": make_model, "data": make_loader(16, 8), "loss": one, "microbatches": 4}
    with ModelParallelTrainer(2, optimizer=torch.optim.SGD, progress=False, **options) as trainer:
        trainer.train(1)
        assert recorded_losses(trainer) == [([1.0, 1.0], 1.0)] * 2


def test_loss_reported_by_a_script_takes_precedence():
    with DDPTrainer(2, worker=Dividing, progress=False) as trainer:
        trainer.train(epochs=1)
        assert recorded_losses(trainer) == [([1.0] * 2, 1.0)] * 2
