"""``data=`` and ``batch_size=`` of trainers that split a model."""

import pytest

import miniray
from miniray.data import DataLoader, ParquetDataset
from miniray.train import ModelParallelTrainer, PipelineParallelTrainer

torch = pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")

from pyarrow import parquet  # noqa: E402
from torch.utils.data import DataLoader as TorchLoader  # noqa: E402

from miniray.train.parallel.feed import split_batch  # noqa: E402
from miniray.train.parallel.plan import job as jobs  # noqa: E402
from miniray.train.parallel.samples import make_loader  # noqa: E402
from tests.parallel.split_for_tests import PARTS, make_data, make_layers, make_model  # noqa: E402

ROWS = 40
PAIRS = [(x.tolist(), y.item()) for x, y in make_data(ROWS).dataset]
COLUMNS = {"x": [x for x, _ in PAIRS], "y": [y for _, y in PAIRS]}


def write_parquet(folder):
    columns = {"x": pa.array(COLUMNS["x"], pa.list_(pa.int64(), 4)), "y": COLUMNS["y"]}
    parquet.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def make_hugging_face(folder, *, is_stream=False):
    rows = pytest.importorskip("datasets").Dataset.from_dict(COLUMNS)
    return rows.to_iterable_dataset() if is_stream else rows


KINDS = {
    "torch dataset": lambda folder: make_data(ROWS).dataset,
    "parquet": lambda folder: ParquetDataset(write_parquet(folder)),
    "miniray loader": lambda folder: DataLoader(ParquetDataset(write_parquet(folder)), 8),
    "Hugging Face rows": make_hugging_face,
    "Hugging Face stream": lambda folder: make_hugging_face(folder, is_stream=True),
}


@pytest.mark.parametrize("argument", ["data", "val_data"])
@pytest.mark.parametrize("kind", KINDS)
def test_loader_yields_inputs_and_targets_of_each_row(kind, argument, tmp_path):
    evaluates = argument == "val_data"
    size = 8 if evaluates or kind != "miniray loader" else None
    loader = make_loader(KINDS[kind](tmp_path), argument, size, evaluates=evaluates)
    found = []
    for batch in loader:
        (inputs,), target = split_batch(batch)
        assert len(target) == 8
        found += zip(inputs.tolist(), target.tolist(), strict=True)
    assert sorted(found) == sorted(PAIRS)


def train(data, trainer=ModelParallelTrainer, workers=1, length=None, **options):
    backend = "inline" if workers == 1 else "local"
    parts = {**PARTS, "model": make_model, "data": data, "backend": backend, **options}
    with trainer(workers, **parts) as made:
        result = made.train(epochs=2, **(length or {}))
        return [record["loss"] for record in result.history], made.state.step


def test_dataset_with_batch_size_trains_like_a_loader(tmp_path):
    expected = train(make_data(ROWS, batch_size=8))
    assert expected[1] == 10
    assert train(make_data(ROWS).dataset, batch_size=8) == expected
    losses, steps = train(ParquetDataset(write_parquet(tmp_path), shuffle=False), batch_size=8)
    assert (losses, steps) == (pytest.approx(expected[0]), 10)


def test_batch_size_of_train_wins():
    assert train(make_data(ROWS).dataset, batch_size=8, length={"batch_size": 4})[1] == 20


def test_batch_size_with_a_loader_raises():
    loader = TorchLoader(make_data(ROWS).dataset, batch_size=8)
    with pytest.raises(ValueError, match="batch_size"):
        train(loader, batch_size=4)
    with pytest.raises(ValueError, match="batch_size"):
        train(loader, length={"batch_size": 4})


def test_data_is_put_into_the_object_store_once(monkeypatch):
    dataset, put, puts = make_data(ROWS).dataset, miniray.put, []
    monkeypatch.setattr(jobs.miniray, "put", lambda value: puts.append(value) or put(value))
    train(dataset, PipelineParallelTrainer, 2, batch_size=8, model=make_layers)
    assert sum(value is dataset for value in puts) == 1
