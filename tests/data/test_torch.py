"""The same plan under torch's own DataLoader, and under frameworks that use it."""

import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader as TorchLoader  # noqa: E402

from miniray.data import DataLoader, IndexedDataset, Mixture, ParquetDataset  # noqa: E402
from miniray.data.torch import (  # noqa: E402
    LightningLoader,
    ShardSampler,
    TorchDataset,
    TorchIterableDataset,
)


def ids(loader):
    return [i for batch in loader for i in batch["id"].tolist()]


def only_id(row):
    return {"id": row["id"]}


@pytest.fixture
def whole(parquet_folder):
    return ParquetDataset(parquet_folder, shuffle=True, seed=1)


def loader(whole, rank, world, **options):
    data = TorchDataset(whole, transform=only_id)
    sampler = ShardSampler(data, rank=rank, world_size=world)
    return TorchLoader(data, batch_size=10, sampler=sampler, **options), sampler


@pytest.mark.parametrize("workers", [0, 2])
def test_map_style_with_a_sampler(whole, workers):
    seen = []
    for rank in range(2):
        made, sampler = loader(whole, rank, 2, num_workers=workers)
        assert len(sampler) == 119 - rank
        first = ids(made)
        sampler.set_epoch(1)
        second = ids(made)
        assert first != second
        assert first == [row["id"] for row in whole.shard(rank, 2)]
        seen += first
    assert sorted(seen) == list(range(237))


def test_a_sampler_resumes_on_another_number_of_ranks(whole):
    seen, state = [], None
    for world, steps in [(3, 4), (2, 1000)]:
        for rank in range(world):
            made, sampler = loader(whole, rank, world)
            if state is not None:
                sampler.load_state_dict(state)
            for _, batch in zip(range(steps), made, strict=False):
                seen += batch["id"].tolist()
                stopped = sampler.state_dict()
        state = stopped
    assert sorted(seen) == list(range(237))


def test_sampler_state_follows_the_stateful_protocol(whole):
    """``state_dict`` has no arguments and is exact between any two indices."""
    data = TorchDataset(whole)
    sampler = ShardSampler(data, rank=0, world_size=1)
    indices = iter(sampler)
    first = [next(indices) for _ in range(50)]
    other = ShardSampler(data, rank=0, world_size=1)
    other.load_state_dict(sampler.state_dict())
    rest = list(other)
    assert rest == list(indices)
    assert sorted(first + rest) == list(range(237))
    assert len(list(other)) == 237  # the next epoch
    assert other.epoch == 2


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("stop", [1, 7])
def test_stateful_data_loader_resumes_exactly(whole, workers, stop):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def create(rank):
        data = TorchDataset(whole, transform=only_id)
        sampler = ShardSampler(data, rank=rank, world_size=2)
        return stateful(data, batch_size=10, sampler=sampler, num_workers=workers)

    seen = []
    for rank in range(2):
        loader = create(rank)
        expected = [ids(loader) for _ in range(2)]
        loader = create(rank)
        batches = iter(loader)
        first = [row for _ in range(stop) for row in next(batches)["id"].tolist()]
        resumed = create(rank)
        resumed.load_state_dict(loader.state_dict())
        assert first + ids(resumed) == expected[0]
        assert ids(resumed) == expected[1]
        seen += expected[0]
    assert sorted(seen) == list(range(237))


def test_sampler_state_warns_once_if_workers_read_ahead(whole):
    made, sampler = loader(whole, 0, 1, num_workers=1)
    batches = iter(made)
    next(batches)
    with pytest.warns(RuntimeWarning, match="StatefulDataLoader"):
        sampler.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(batches)
        sampler.state_dict()


def test_map_style_of_a_mixture_and_of_a_subset(parquet_folder):
    for dataset in [
        ParquetDataset(parquet_folder, shuffle=True, seed=1, max_samples=100),
        Mixture([(ParquetDataset(parquet_folder, shuffle=True), 2), (
            IndexedDataset([{"id": 1000 + i} for i in range(40)]), 1)], seed=3),
    ]:  # fmt: skip
        data = TorchDataset(dataset, transform=only_id)
        sampler = ShardSampler(data, rank=0, world_size=1)
        expected = [row["id"] for row in dataset]
        assert ids(TorchLoader(data, batch_size=7, sampler=sampler)) == expected


def test_indices_are_checked(whole):
    data = TorchDataset(whole)
    assert len(data) == 237
    assert data[-1]["id"] == 236
    with pytest.raises(IndexError):
        data[237]


@pytest.mark.parametrize("workers", [0, 3])
def test_iterable_style_is_split_over_worker_processes(whole, workers):
    seen = []
    for rank in range(2):
        data = TorchIterableDataset(whole.shard(rank, 2), transform=only_id)
        made = TorchLoader(data, batch_size=10, num_workers=workers)
        part = ids(made)
        assert len(part) == len(set(part)) == 119 - rank
        seen += part
    assert sorted(seen) == list(range(237))


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_iterable_style_hear_of_epochs(persistent):
    dataset = IndexedDataset(range(40), shuffle=True, seed=1)
    data = pickle.loads(pickle.dumps(TorchIterableDataset(dataset)))
    made = TorchLoader(data, batch_size=10, num_workers=1, persistent_workers=persistent)
    for epoch in (0, 3, 1):
        data.set_epoch(epoch)
        expected = dataset.shard(0, 1)
        expected.set_epoch(epoch)
        assert [row for batch in made for row in batch.tolist()] == list(expected)


def test_iterable_style_resumes(whole):
    data = TorchIterableDataset(whole.shard(0, 1), transform=only_id)
    iterator = iter(data)
    first = [next(iterator)["id"] for _ in range(50)]
    other = TorchIterableDataset(whole.shard(0, 1), transform=only_id)
    other.load_state_dict(data.state_dict())
    assert len(other) == 187
    assert sorted(first + [row["id"] for row in other]) == list(range(237))


def test_the_rank_of_the_process_group_is_taken(whole, tmp_path, raises):
    with raises(ValueError):
        ShardSampler(TorchDataset(whole))
    with raises(ValueError):
        ShardSampler(TorchDataset(whole), rank=0)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        assert len(ShardSampler(TorchDataset(whole))) == 237
    finally:
        torch.distributed.destroy_process_group()


def test_a_loader_that_counts_the_whole_epoch(whole):
    def made(rank, world):
        return LightningLoader(DataLoader(whole.shard(rank, world), 10, transform=only_id))

    first = made(0, 1)
    assert len(first) == 24
    seen = [row for _, batch in zip(range(5), first, strict=False) for row in batch["id"].tolist()]
    state = first.state_dict()
    assert (state["batches"], state["taken"]) == (5, 50)
    rest = []
    for rank in range(2):
        second = made(rank, 2)
        second.load_state_dict(state)
        assert len(second) == 5 + 10  # 187 rows are left, 94 and 93 of them for a rank
        batches = list(second)
        assert len(batches) == 10
        rest += [row for batch in batches for row in batch["id"].tolist()]
        assert len(second) == 12  # of the next epoch: 119 and 118 rows
        assert second.state_dict()["batches"] == 0
    assert sorted(seen + rest) == list(range(237))


@pytest.mark.slow
def test_under_lightning(whole, tmp_path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, _):
            self.seen += batch["id"].tolist()
            return self.layer(batch["id"][:, None].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-9)

    quiet = {
        "accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": str(tmp_path), "use_distributed_sampler": False,
    }  # fmt: skip
    for made in [loader(whole, 0, 1)[0], DataLoader(whole, 10, transform=only_id, format="torch")]:
        module = Module()
        lightning.Trainer(**quiet).fit(module, made)
        assert sorted(module.seen) == sorted([*range(237)] * 2)
        assert module.seen[:237] != module.seen[237:]

    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 30:
                trainer.save_checkpoint(tmp_path / "30.ckpt")

    def stateful():
        shard = whole.shard(0, 1)
        shard.set_epoch(0)
        return LightningLoader(DataLoader(shard, 10, transform=only_id, format="torch"))

    begun, resumed = Module(), Module()
    lightning.Trainer(**quiet, max_steps=30, callbacks=[Save()]).fit(begun, stateful())
    lightning.Trainer(**quiet).fit(resumed, stateful(), ckpt_path=tmp_path / "30.ckpt")
    assert begun.seen + resumed.seen == module.seen  # 24 batches of the first epoch and 6 more


@pytest.mark.slow
def test_under_accelerate(whole):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = torch.nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-9))
    shard = whole.shard(accelerator.process_index, accelerator.num_processes)
    seen = []
    for batch in DataLoader(shard, 10, transform=only_id, format="torch"):
        loss = model(batch["id"][:, None].float()).mean()
        accelerator.backward(loss)
        optimizer.step()
        seen += batch["id"].tolist()
    assert sorted(seen) == list(range(237))
