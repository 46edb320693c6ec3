"""Loaders and datasets of miniray.data in workers: each row is read by one rank."""

import itertools

import pytest

import miniray
from miniray.data import DataLoader, IndexedDataset, Mixture
from miniray.doctor.diagnose import diagnose
from miniray.doctor.reader import read_run
from miniray.train import DataParallelTrainer, DDPTrainer, TorchWorker

torch = pytest.importorskip("torch")

from torch.utils import data as torch_data  # noqa: E402

from miniray.data.torch import ShardSampler, TorchDataset, TorchIterableDataset  # noqa: E402
from miniray.train.workers.data.planned import set_epoch, take_share  # noqa: E402

ROWS = 22


class Squares:
    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return {"x": float(i)}


def make(**options):
    return IndexedDataset(Squares(), shuffle=True, seed=3, **options)


FORMS = {
    "loader": lambda data: DataLoader(data, 4),
    "dataset": lambda data: data,
    "torch loader": lambda data: torch_data.DataLoader(TorchIterableDataset(data), batch_size=4),
}


def read(loader):
    """Return the values of an epoch, of rows or batches of rows."""
    return [x for batch in loader for x in torch.as_tensor(batch["x"]).reshape(-1).tolist()]


def share(loader, rank, world_size=4, **options):
    return take_share(loader, rank, world_size, seed=0, **options)


@pytest.mark.parametrize("form", FORMS)
def test_loader_without_rank_is_sharded(form):
    seen = []
    for rank in range(4):
        loader = share(FORMS[form](make()), rank)
        for epoch in (0, 1):
            set_epoch(loader, epoch)
            seen += read(loader)
    assert sorted(seen) == sorted([*range(ROWS), *range(ROWS)])


def test_mixture_without_rank_is_sharded():
    def shard(rank):
        return share(DataLoader(Mixture([(make(), 1)], seed=1), 4), rank)

    assert sorted(x for rank in range(4) for x in read(shard(rank))) == list(range(ROWS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_passed_rank_is_respected(form, rank, world_size):
    loader = FORMS[form](make(rank=rank, world_size=world_size))
    assert share(loader, 3) is loader
    assert len(read(loader)) == ROWS // world_size


def test_torch_loader_over_a_shard_is_not_sharded_twice():
    loader = torch_data.DataLoader(make(rank=1, world_size=4), batch_size=4)
    assert share(loader, 1) is loader
    whole = torch_data.DataLoader(make(), batch_size=4)
    assert sum(len(batch["x"]) for rank in range(4) for batch in share(whole, rank)) == ROWS


@pytest.mark.parametrize("form", FORMS)
def test_loader_that_was_iterated_raises(form, raises):
    loader = FORMS[form](make())
    next(iter(loader))
    with raises(ValueError):
        share(loader, 1)
    assert share(loader, 0, 1) is loader  # with one rank nothing is wrong


def test_loader_of_load_data_shard_is_not_changed():
    loader = DataLoader(make(), 4)
    assert share(loader, 1, sharded=True) is loader


class Line(TorchWorker):
    """Note the rows it trains and evaluates on."""

    def setup(self):
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.train_loader = DataLoader(make(), 4, format="torch")
        self.val_loader = DataLoader(make(), 4, format="torch")
        self.trained, self.evaluated = [], []

    def training_step(self, batch, batch_idx):
        self.trained += batch["x"].tolist()
        return self.model(batch["x"][:, None].float()).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.evaluated += batch["x"].tolist()
        return {"loss": self.model(batch["x"][:, None].float()).pow(2).mean()}

    def get_rows(self):
        return self.trained, self.evaluated


class Loop(Line):
    """Train in a separate loop."""

    def train_epoch(self, epoch):
        for batch_idx, batch in enumerate(self.train_loader):
            self.optimizer.zero_grad()
            self.training_step(batch, batch_idx).backward()
            self.optimizer.step()
        return {"num_samples": len(self.trained)}


class PlainLoop:
    """Train in a separate loop, without ``TorchWorker``."""

    def __init__(self, worker_id):
        Line.setup(self)

    train_epoch, training_step = Loop.train_epoch, Line.training_step
    validation_step, get_rows = Line.validation_step, Line.get_rows


def train(trainer):
    with trainer:
        trainer.train(epochs=2)
        trainer.evaluate()
        trained, evaluated = zip(
            *miniray.get([worker.get_rows.remote() for worker in trainer.workers]), strict=True
        )
    assert sorted(itertools.chain(*trained)) == sorted([*range(ROWS), *range(ROWS)])
    assert sorted(itertools.chain(*evaluated)) == list(range(ROWS))


@pytest.mark.parametrize("worker", [Line, Loop, PlainLoop])
def test_ddp_trainer_trains_and_evaluates_on_each_row_once(worker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {"sanity_batches": 0, "progress": False, "seed": 1}
    trainer = DDPTrainer(num_workers=2, worker=worker, **options)
    train(trainer)
    for record in read_run(trainer.run.path):
        assert (record.loaders[0].replicas, record.loaders[0].passes) == (2, 2)
        assert record.samples == ROWS
    assert diagnose(trainer.run.path).findings == ()


def test_data_parallel_trainer_trains_and_evaluates_on_each_row_once():
    options = {"sanity_batches": 0, "progress": False, "backend": "inline"}
    train(DataParallelTrainer(num_workers=2, worker=Line, **options))


def test_shard_sampler_takes_the_rank_of_the_worker(monkeypatch):
    monkeypatch.setenv("MINIRAY_RANK", "1")
    monkeypatch.setenv("MINIRAY_WORLD_SIZE", "4")
    data = TorchDataset(make())
    expected = list(ShardSampler(data, rank=1, world_size=4))
    assert list(ShardSampler(data)) == expected
