"""Two validation batches before the first step: what they find, and that they change nothing."""

import os
import signal
from functools import partial

import pytest

import miniray
from miniray.train import Checkpoint, DDPTrainer, ModelParallelTrainer, PipelineParallelTrainer

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from tests.train.ddp_for_tests import make_data  # noqa: E402
from tests.train.steps_for_tests import Augmented, Noisy, check_equal, run  # noqa: E402

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=2)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


class Counting(nn.Module):
    """Counts its forward passes in a buffer, in evaluation too, and uses the number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * (1 + 0.01 * self.calls)


class Validating(Noisy):
    """Draws random numbers in validation, from every source."""

    def __init__(self, worker_id, fatal_step=None):
        super().__init__(worker_id)
        self.model.insert(0, Counting())
        generator = torch.Generator().manual_seed(4)
        data = Augmented(29)
        self.val_loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
        self.calls, self.fatal_step = {"training": 0, "validation": 0}, fatal_step

    def training_step(self, batch, batch_idx):
        self.calls["training"] += 1
        if self.rank == 1 and self.global_step == self.fatal_step and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.calls["validation"] += 1
        torch.rand(3)
        return super().validation_step(batch, batch_idx)

    def get_calls(self):
        return self.calls


class Broken(Validating):
    """Fails on one rank only."""

    def validation_step(self, batch, batch_idx):
        if self.rank == 1:
            raise KeyError("no such column")
        return super().validation_step(batch, batch_idx)


def count(trainer_options=None, length=None, **train_options):
    """Train; return the calls of each rank."""
    options = {"progress": False, "worker": Validating, **(trainer_options or {})}
    with DDPTrainer(2, **options) as trainer:
        trainer.train(**(length or {"steps": 1}), **train_options)
        return trainer.call_workers("get_calls")


def create_layers():
    torch.manual_seed(3)
    return [nn.Linear(4, 8), nn.Dropout(0.2), Counting(), nn.Tanh(), nn.Linear(8, 3)]


def create_model():
    """Return a model with the same outputs in each call, as its derived plan needs."""
    return nn.Sequential(*(layer for layer in create_layers() if not isinstance(layer, Counting)))


def create_loader():
    generator = torch.Generator().manual_seed(4)
    return DataLoader(Augmented(29), batch_size=4, shuffle=True, generator=generator)


def create_trainer(cls, num_workers, worker, **options):
    return cls(num_workers, **options)


SPLIT = {
    "worker": None,
    "data": DataLoader(Augmented(), batch_size=8, shuffle=True),
    "val_data": create_loader(),
    "loss": functional.cross_entropy,
    "optimizer": partial(torch.optim.Adam, lr=1e-2),
}
PIPELINE = {**SPLIT, "model": create_layers, "microbatches": 2, "layers_per_stage": [3, 2]}


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (None, {}),
        pytest.param(None, {"shard": "full"}, marks=pytest.mark.slow),
        (PipelineParallelTrainer, PIPELINE),
        pytest.param(
            ModelParallelTrainer, {**SPLIT, "model": create_model}, marks=pytest.mark.slow
        ),
    ],
    ids=["replicated", "sharded", "pipeline", "tensor"],
)
def test_run_has_the_same_bits_with_and_without(trainer, options):
    options = {"worker": Validating, **options, "eval_interval": 1}
    if trainer is not None:
        options["trainer"] = partial(create_trainer, trainer)
    with_pass = run("with", {"epochs": 2}, **options)
    check_equal(with_pass, run("without", {"epochs": 2}, **options, sanity_batches=0))
    scores = [miniray.train.RunDirectory(name).read_metrics() for name in ("with", "without")]
    assert [r["val_loss"] for r in scores[0]] == [r["val_loss"] for r in scores[1]]


def test_broken_validation_ends_the_run_before_the_first_step():
    hooks = []

    class Hooked(DDPTrainer):
        def on_train_start(self, **kwargs):
            hooks.append("on_train_start")

    trainer = Hooked(2, worker=Broken, progress=False)
    with trainer, pytest.raises(KeyError) as caught:
        trainer.train(epochs=1)
    assert (caught.value.rank, caught.value.epoch) == (1, None)
    assert "validation_step" in str(caught.value)
    assert not hooks
    assert trainer.state.step == 0
    assert trainer.run.read_metrics() == []


def test_broken_validation_of_a_pipeline_ends_the_run_before_the_first_step():
    wrong = [(x, y + 0.5) for x, y in make_data(8)]
    trainer = PipelineParallelTrainer(
        2, **{k: v for k, v in PIPELINE.items() if k != "worker"} | {"val_data": wrong},
        progress=False,
    )  # fmt: skip
    with trainer, pytest.raises(RuntimeError):
        trainer.train(epochs=1)
    assert trainer.state.step == 0


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, 2),
        ({"sanity_batches": 0}, 0),
        ({"sanity_batches": 3}, 3),
        ({"limit_val_batches": 1}, 1),
    ],
)
def test_number_of_batches_on_every_rank(options, batches):
    assert count(options) == [{"training": 1, "validation": batches}] * 2


def test_neither_a_resumed_nor_a_restarted_run_validates_first():
    assert count({"run_dir": "run", "callbacks": Checkpoint()})[0]["validation"] == 2
    resumed = {"run_dir": "run", "resume": True}
    assert count(resumed, {"steps": 3}) == [{"training": 2, "validation": 0}] * 2
    restarted = {"max_failures": 1, "snapshot_every": 1}
    found = count(restarted, {"steps": 4}, fatal_step=2)
    assert [calls["validation"] for calls in found] == [0, 0]


class WithoutData(Validating):
    def __init__(self, worker_id):
        super().__init__(worker_id)
        del self.val_loader


class OwnEvaluate(Validating):
    """Its evaluation has nothing to do with ``validation_step``."""

    def evaluate(self):
        return {"loss": 1.0}

    def validation_step(self, batch, batch_idx):
        raise AssertionError


@pytest.mark.parametrize("worker", [WithoutData, OwnEvaluate])
def test_workers_without_validation_train(worker):
    assert count({"worker": worker})[0] == {"training": 1, "validation": 0}
