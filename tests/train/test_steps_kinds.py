"""Every kind of trainer and loader resumes inside an epoch with the same bits."""

from functools import partial

import pytest

import miniray
from miniray.data import DataLoader as OwnLoader
from miniray.data import IndexedDataset
from miniray.train import Checkpoint, ModelParallelTrainer, PipelineParallelTrainer

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from tests.train.steps_for_tests import ROWS, Augmented, Noisy, check_equal, run  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _engine():
    """One engine for all: its first worker loads torch for the others."""
    miniray.init(backend="local", num_workers=4)
    yield
    miniray.shutdown()


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


def check_resume(step, **options):
    """Check a run that stops after ``step`` steps, and once more a step later."""
    whole = run("whole", {"epochs": 2}, **options)
    run("parts", {"steps": step}, callbacks=Checkpoint(), **options)
    options["resume"] = True
    run("parts", {"steps": step + 1}, callbacks=Checkpoint(), **options)
    check_equal(run("parts", {"epochs": 2}, **options), whole)


# -- loaders ---------------------------------------------------------------------------------------


class OwnData(Noisy):
    """Reads with a loader of ``miniray.data``."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        rows = [{"x": x.numpy(), "y": int(y)} for x, y in zip(*self._get_rows(), strict=True)]
        self.train_loader = OwnLoader(IndexedDataset(rows, shuffle=True, seed=3), batch_size=4)

    def _get_rows(self):
        data = Augmented()
        return data.x, data.y

    def training_step(self, batch, batch_idx):
        x = torch.stack([torch.as_tensor(x) for x in batch["x"]])
        return functional.cross_entropy(self.model(x), torch.as_tensor(batch["y"]))


class OwnShard(Noisy):
    """Shards its data itself, and shuffles it with the random numbers of the process."""

    def __init__(self, worker_id, loader_workers=0):
        super().__init__(worker_id)
        self.loader_workers = loader_workers

    def load_data_shard(self, shard_id, num_shards):
        rows = torch.utils.data.Subset(Augmented(), range(shard_id, ROWS, num_shards))
        self.train_loader = DataLoader(
            rows, batch_size=4, shuffle=True, num_workers=self.loader_workers
        )


class Sampled(Noisy):
    """Has a ``DistributedSampler``."""

    def __init__(self, worker_id):
        super().__init__(worker_id)
        data = Augmented()
        sampler = DistributedSampler(data, self.world_size, self.rank)
        self.train_loader = DataLoader(data, batch_size=4, sampler=sampler)


class Stateful(Noisy):
    """Has a loader of torchdata that knows its position."""

    def __init__(self, worker_id):
        from torchdata.stateful_dataloader import StatefulDataLoader

        super().__init__(worker_id)
        data = Augmented()
        sampler = DistributedSampler(data, self.world_size, self.rank)
        self.train_loader = StatefulDataLoader(data, batch_size=4, sampler=sampler)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("worker", "train_options"),
    [
        (OwnData, {}),
        (OwnShard, {}),
        pytest.param(OwnShard, {"loader_workers": 2}, marks=pytest.mark.slow),
        pytest.param(Sampled, {}, marks=pytest.mark.slow),
        pytest.param(Stateful, {}, marks=pytest.mark.slow),
    ],
)
def test_loaders_that_miniray_does_not_plan(worker, train_options):
    if worker is Stateful:
        pytest.importorskip("torchdata")
    check_resume(3, worker=worker, train_options=train_options)


# -- parts of the model ----------------------------------------------------------------------------


def create_layers():
    torch.manual_seed(3)
    layers = [nn.Linear(4, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 3))


def create_list():
    return list(create_layers())


SPLIT = {
    "worker": None,
    "data": DataLoader(Augmented(), batch_size=8, shuffle=True),
    "loss": functional.cross_entropy,
    "optimizer": partial(torch.optim.Adam, lr=1e-2),
}


def create_trainer(cls, num_workers, worker, **options):
    return cls(num_workers, **options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (None, {"shard": "full"}),
        (PipelineParallelTrainer, {"model": create_list, "microbatches": 2}),
        (ModelParallelTrainer, {"model": create_layers}),
    ],
    ids=["full", "pipeline", "tensor"],
)
@pytest.mark.slow
def test_trainers_whose_ranks_hold_parts(trainer, options):
    if trainer is not None:
        options = {**SPLIT, **options, "trainer": partial(create_trainer, trainer)}
    check_resume(5, **options)
