"""``data=`` of ``DDPTrainer``: each kind of data, every row once."""

import itertools
import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

import miniray
from miniray.data import DataLoader, IndexedDataset, ParquetDataset
from miniray.errors import HandlesError
from miniray.train import DataParallelTrainer, DDPTrainer, TorchWorker

torch = pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")

from pyarrow import parquet  # noqa: E402
from torch.utils import data as torch_data  # noqa: E402

from miniray.data.torch import TorchDataset, TorchIterableDataset  # noqa: E402
from miniray.train.run.state import RankState  # noqa: E402
from miniray.train.workers.data import shards  # noqa: E402
from miniray.train.workers.data.batches import count_samples  # noqa: E402
from miniray.train.workers.data.epoch_data import create_epoch_data  # noqa: E402
from miniray.train.workers.data.planned import take_share  # noqa: E402
from miniray.train.workers.data.shards import TrainData, give_data  # noqa: E402

ROWS = 22


class Numbers(torch_data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": float(index)}


class Line(TorchWorker):
    """Note the rows that it trains and evaluates on."""

    def setup(self):
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.trained, self.evaluated, self.sizes = [], [], []

    def training_step(self, batch, batch_idx):
        assert isinstance(batch["x"], torch.Tensor)
        self.trained += batch["x"].tolist()
        self.sizes.append(len(batch["x"]))
        return self.model(batch["x"][:, None].float()).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.evaluated += batch["x"].tolist()
        return self.model(batch["x"][:, None].float()).pow(2).mean()

    def get_rows(self):
        return self.trained, self.evaluated, self.sizes


class Loop(Line):
    """Train in a separate loop."""

    def train_epoch(self, epoch):
        for batch_idx, batch in enumerate(self.train_loader):
            self.optimizer.zero_grad()
            self.training_step(batch, batch_idx).backward()
            self.optimizer.step()
        return {"num_samples": len(self.trained)}


def write_parquet(folder):
    for part in range(2):
        rows = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        table = pa.table({"x": [float(row) for row in rows]})
        parquet.write_table(table, folder / f"{part}.parquet")
    return folder


def make_stream(folder):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [float(row) for row in range(ROWS)]})
    return rows.to_iterable_dataset()


def make_rows(folder):
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": [float(row) for row in range(ROWS)]})


#: Data, and whether it needs ``batch_size``.
KINDS = {
    "parquet": (lambda folder: ParquetDataset(write_parquet(folder), shuffle=True, seed=3), True),
    "miniray loader": (lambda folder: DataLoader(IndexedDataset(Numbers(), seed=3), 2), False),
    "torch dataset": (lambda folder: Numbers(), True),
    "torch loader": (
        lambda folder: torch_data.DataLoader(Numbers(), batch_size=2, shuffle=True),
        False,
    ),
    "adapter": (lambda folder: TorchDataset(IndexedDataset(Numbers())), True),
    "iterable adapter": (lambda folder: TorchIterableDataset(IndexedDataset(Numbers())), True),
    "Hugging Face rows": (make_rows, True),
    "Hugging Face stream": (make_stream, True),
}
#: Kinds whose position inside an epoch is known.
SEEKABLE = [
    *("parquet", "miniray loader", "torch dataset", "torch loader", "adapter"),
    "Hugging Face rows",
]


def make(kind, folder):
    create, needs_size = KINDS[kind]
    return {"data": create(folder), **({"batch_size": 2} if needs_size else {})}


def iter_steps(feed, state):
    """Yield the rows of each step that is left of the epoch, as the step loop takes them."""
    batches, windows, last = feed.start(state)
    if windows is None:
        for _, batch in batches:
            yield batch["x"].tolist()
        return
    for window in windows:
        assert len(window) == 1
        if window[0]:
            last = next(batches)
        assert last is not None  # it is repeated
        yield last[1]["x"].tolist() if window[0] else []


def open_ranks(options, workers):
    """Return the ``EpochData`` of all ranks."""
    given = TrainData.create(options["data"], None, options.get("batch_size"), workers)
    found = []
    for rank in range(workers):
        user = SimpleNamespace()
        give_data(user, pickle.loads(pickle.dumps(given)), rank, workers, {}, has_own_load=False)
        loader = take_share(user.train_loader, rank, workers, seed=1)
        found.append(create_epoch_data(loader, rank, workers, accumulate=1, uneven="join"))
    return found


def read_epoch(ranks, epoch, first_step=0):
    steps = [list(iter_steps(feed, RankState(0, epoch, first_step))) for feed in ranks]
    return [x for rank in steps for step in rank for x in step]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_delivered_once(kind, workers, tmp_path):
    ranks = open_ranks(make(kind, tmp_path), workers)
    for epoch in range(2):
        assert sorted(read_epoch(ranks, epoch)) == list(range(ROWS))


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("kind", SEEKABLE)
def test_resume_inside_an_epoch_delivers_the_rest(kind, before, after, tmp_path):
    """Stop after 2 steps, then after 1 step more, on a different number of ranks."""
    options = make(kind, tmp_path)
    seen, position, step = [], None, 0
    for workers, steps in ((before, 2), (after, 1), (before, None)):
        ranks = open_ranks(options, workers)
        state = RankState(step, 0, step)
        for feed in ranks:
            feed.load_position(position, state)
            seen += itertools.chain(*itertools.islice(iter_steps(feed, state), steps))
        step += steps or 0
        positions = [feed.get_position(RankState(step, 0, step)) for feed in ranks]
        assert all(found == positions[0] for found in positions)
        position = json.loads(json.dumps(positions[0]))
    assert sorted(seen) == list(range(ROWS))
    assert sorted(read_epoch(ranks, 1)) == list(range(ROWS))


@pytest.mark.parametrize("kind", SEEKABLE)
def test_resume_on_the_same_ranks_continues_with_the_same_batches(kind, tmp_path):
    options = make(kind, tmp_path)
    for done in range(1, 6):
        for feed, other in zip(open_ranks(options, 2), open_ranks(options, 2), strict=True):
            expected = list(iter_steps(feed, RankState(0, 0, 0)))
            other.load_position(feed.get_position(RankState(done, 0, done)), RankState(0, 0, done))
            assert list(iter_steps(other, RankState(done, 0, done))) == expected[done:]


def test_rank_without_rows_in_the_rest_of_an_epoch_repeats_a_batch(tmp_path):
    for kind in ("parquet", "torch loader"):
        options = make(kind, tmp_path)
        position = open_ranks(options, 1)[0].get_position(RankState(10, 0, 10))
        ranks = open_ranks(options, 3)
        for feed in ranks:
            feed.load_position(position, RankState(10, 0, 10))
        assert len(read_epoch(ranks, 0, 10)) == 2  # of three ranks


def collect(trainer):
    found = miniray.get([worker.get_rows.remote() for worker in trainer.workers])
    return [list(itertools.chain(*column)) for column in zip(*found, strict=True)]


def create(tmp_path, workers, **options):
    backend = "inline" if workers == 1 else "local"
    options = {"worker": Line, "seed": 1, "backend": backend, **options}
    return DDPTrainer(workers, progress=False, run_dir=tmp_path / "run", **options)


@pytest.mark.parametrize("worker", [Line, Loop])
@pytest.mark.parametrize("kind", ["parquet", "torch dataset"])
def test_trainer_trains_and_evaluates_on_each_row_once(kind, worker, tmp_path):
    options = make(kind, tmp_path)
    options |= {"val_data": options["data"], "sanity_batches": 0}
    with create(tmp_path, 2, worker=worker, **options) as trainer:
        trainer.train(epochs=2)
        trainer.evaluate()
        trained, evaluated, sizes = collect(trainer)
    assert sorted(trained) == sorted([*range(ROWS)] * 2)
    assert sorted(evaluated) == list(range(ROWS))
    assert max(sizes) == 2


@pytest.mark.filterwarnings("ignore:resuming a run of")
@pytest.mark.parametrize(
    ("kind", "before", "after", "shard"),
    [
        ("parquet", 2, 3, "none"),
        ("torch loader", 2, 1, "none"),
        pytest.param("parquet", 3, 2, "full", marks=pytest.mark.slow),
        pytest.param("torch loader", 2, 3, "full", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_inside_an_epoch_contains_the_position(kind, before, after, shard, tmp_path):
    options = {**make(kind, tmp_path), "shard": shard}
    with create(tmp_path, before, **options) as trainer:
        trainer.train(steps=3)
        trainer.save_checkpoint()
        first = collect(trainer)[0]
    assert len(first) == 6 * before
    with create(tmp_path, after, resume=True, **options) as trainer:
        trainer.train(epochs=2)
        rest = collect(trainer)[0]
    assert sorted([*first, *rest]) == sorted([*range(ROWS)] * 2)


# -- DataParallelTrainer ---------------------------------------------------------------------------


class Plain:
    """Not a ``TorchWorker``; its loader is ``self.train_loader``."""

    def __init__(self, worker_id):
        self.trained, self.evaluated, self.sizes = [], [], []

    def train_epoch(self, epoch):
        for batch in self.train_loader:
            self.trained += list(map(float, batch["x"]))
            self.sizes.append(len(batch["x"]))
        return {"num_samples": len(self.trained)}

    def evaluate(self):
        for batch in self.val_loader:
            self.evaluated += list(map(float, batch["x"]))
        return {"num_samples": len(self.evaluated)}

    def get_weights(self):
        return [np.zeros(1)]

    def set_weights(self, weights):
        pass

    get_rows = Line.get_rows


class Sharding(Plain):
    """Gets its shard in ``load_data_shard``."""

    def load_data_shard(self, shard_id, num_shards, data):
        self.train_loader = data


@pytest.mark.parametrize("worker", [Line, Plain, Sharding])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_data_parallel_trainer_delivers_each_row_once(kind, workers, worker, tmp_path):
    options = make(kind, tmp_path)
    options = {**options, "val_data": options["data"], "worker": worker, "progress": False}
    options["sanity_batches"] = 0  # it would deliver rows, too
    with DataParallelTrainer(
        workers, backend="inline", run_dir=tmp_path / "run", **options
    ) as trainer:
        trainer.train(epochs=2)
        trainer.evaluate()
        trained, evaluated, sizes = collect(trainer)
    assert sorted(trained) == sorted([*range(ROWS)] * 2)
    assert sorted(evaluated) == list(range(ROWS))
    assert max(sizes) == 2


# -- what is sent, and errors ----------------------------------------------------------------------


def test_data_is_put_into_the_object_store_once(tmp_path, monkeypatch):
    puts = []
    put = miniray.put
    monkeypatch.setattr(shards.miniray, "put", lambda value: puts.append(value) or put(value))
    rows = torch_data.StackDataset(x=torch.arange(float(ROWS)))
    options = {"data": rows, "batch_size": 2}
    with create(tmp_path, 3, **options) as trainer:
        trainer.train(epochs=1)
        assert sorted(collect(trainer)[0]) == list(range(ROWS))
    assert [type(value).__name__ for value in puts].count("TrainData") == 1
    puts.clear()
    with DataParallelTrainer(
        3, worker=Line, run_dir=tmp_path / "other", backend="inline", progress=False, **options
    ) as other:
        other.train(epochs=1)
    assert [type(value).__name__ for value in puts].count("TrainData") == 1


def test_samples_of_a_batch_with_lists():
    lists = [[1.0, 2.0], [3.0]]
    assert count_samples({"x": lists, "y": torch.zeros(3)}) == 3  # not the length of a list
    assert count_samples({"x": lists * 2}) == 4
    assert count_samples({"x": [torch.zeros(5), torch.zeros(5)]}) == 5  # columns collated by torch
    assert count_samples({"x": ["a", "b", "c"]}) == 3


@pytest.mark.parametrize("trainer", [DDPTrainer, DataParallelTrainer])
def test_order_follows_from_the_seed_of_the_trainer(trainer, tmp_path):
    found = []
    for seed in (None, 7):  # of the dataset
        data = ParquetDataset(write_parquet(tmp_path), shuffle=True, seed=seed)
        options = {"batch_size": 4, "progress": False, "backend": "inline", "seed": 7}
        with trainer(1, worker=Line, data=data, **options) as made:
            made.train(epochs=1)
            found.append(made.call_workers("get_rows")[0][0])
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(ROWS))


def test_batch_size_of_train_wins(tmp_path):
    with create(tmp_path, 1, data=Numbers(), batch_size=2) as trainer:
        trainer.train(epochs=1, batch_size=11)
        assert collect(trainer)[2] == [11, 11]


def test_format_of_a_loader_wins():
    loader = DataLoader(IndexedDataset(Numbers()), 2, format="numpy")
    assert isinstance(
        next(iter(shards.create_loader("data", loader, None, 0, 1, format="torch")))["x"],
        np.ndarray,
    )


class SetsLoader(Line):
    def setup(self):
        super().setup()
        self.train_loader = torch_data.DataLoader(Numbers(), batch_size=2)


class Frame:
    """A data frame, by the name of its class and module."""


Frame.__module__, Frame.__name__ = "pandas.core.frame", "DataFrame"


class Opened(Numbers):
    def __init__(self, path):
        self.file = open(path)


class Stream(torch_data.IterableDataset):
    def __iter__(self):
        return iter(range(ROWS))


def test_messages(tmp_path, golden):
    path = tmp_path / "rows.txt"
    path.write_text("")
    opened = Opened(path)
    loader = torch_data.DataLoader(Numbers(), batch_size=2)
    sampler = torch_data.DistributedSampler(Numbers(), 2, 0)
    cases = [
        ({"data": Frame(), "batch_size": 2}, TypeError),
        ({"data": [1, 2], "batch_size": 2}, TypeError),
        ({"data": Stream(), "batch_size": 2}, TypeError),
        ({"data": loader, "batch_size": 2}, ValueError),
        ({"data": torch_data.DataLoader(Numbers(), sampler=sampler)}, ValueError),
        ({"data": opened, "batch_size": 2}, HandlesError),
        ({"batch_size": 2}, TypeError),
        ({"data": Numbers(), "batch_size": 0}, ValueError),
        ({"val_data": 3}, TypeError),
    ]
    lines = []
    for options, kind in cases:
        with pytest.raises(kind) as caught:
            DDPTrainer(2, worker=Line, **options)
        lines.append(str(caught.value).replace(str(path), "rows.txt"))
        with pytest.raises(kind):
            DataParallelTrainer(2, worker=Line, **options)
    opened.file.close()
    for options, arguments in [
        ({"worker": SetsLoader, "data": Numbers(), "batch_size": 2}, {}),
        ({"worker": Line, "data": Numbers()}, {}),
        ({"worker": Line, "data": loader}, {"batch_size": 2}),
    ]:
        with create(tmp_path, 1, **options) as trainer, pytest.raises(ValueError) as caught:
            trainer.train(epochs=1, **arguments)
        lines.append(re.search("ValueError: .*", str(caught.value))[0])
    golden("data_option.txt", "\n".join(lines) + "\n")
