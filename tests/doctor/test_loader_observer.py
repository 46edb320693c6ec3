"""The doctor sees what loaders of miniray.data deliver."""

import importlib
import json
import re

import pytest

from miniray import doctor
from miniray.doctor import data_probe
from miniray.doctor.diagnose import diagnose
from miniray.doctor.reader import read_run
from tests.doctor.helpers import Ranks

torch = pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from miniray.data import DataLoader, IndexedDataset, Mixture, ParquetDataset  # noqa: E402
from miniray.data.observers import observers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 50


@pytest.fixture(scope="module", autouse=True)
def _compiler():
    """DDP imports it, which takes seconds: done once here for all forked ranks."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def ranks(tmp_path):
    """Start two ranks that run ``function(rank, step)`` in a group; return record and diagnosis."""
    started, kept = Ranks(), []

    def body(function, rank):
        torch.set_num_threads(1)
        doctor.attach(tmp_path / "run", rank=rank, world_size=2)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        model = DistributedDataParallel(torch.nn.Linear(1, 1))

        def step(batch):
            model(torch.as_tensor(batch["x"])[:, None].float()).mean().backward()

        function(rank, step)
        dist.destroy_process_group()
        # The last reference: torch joins threads of gloo when it is dropped, without releasing the
        # GIL, for which one of them may wait.
        kept.append(model)

    def run(function):
        for rank in range(2):
            started.start(body, function, rank)
        assert started.wait() == [0, 0]
        return list(read_run(tmp_path / "run")), diagnose(tmp_path / "run")

    yield run
    started.end()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": range(ROWS)}), path, row_group_size=10)
    return path


def codes(diagnosis):
    return [finding.code for finding in diagnosis.findings]


def test_batches_samples_and_ids_are_recorded(ranks, file):
    def body(rank, step):
        data = ParquetDataset(file, rank=rank, world_size=2, shuffle=True, seed=1)
        loader = DataLoader(data, 10)
        checked = DataLoader(ParquetDataset(file, rank=rank, world_size=2), 5)
        for _ in range(2):
            for batch in loader:
                step(batch)
            with torch.no_grad():
                assert sum(len(batch["x"]) for batch in checked) == 25

    records, diagnosis = ranks(body)
    assert codes(diagnosis) == []
    for rank, record in enumerate(records):
        training, validation = record.loaders
        assert (training.batch_size, training.length, training.batches) == (10, ROWS, 3)
        assert (training.replicas, training.sampler_rank, training.shuffle) == (2, rank, True)
        assert (training.passes, training.finished, training.trained) == (2, 2, True)
        assert (validation.passes, validation.finished, validation.trained) == (2, 2, False)
        assert (validation.batch_size, validation.last_batches) == (5, 5)
        assert (record.batches, record.samples, record.batch_size) == (16, ROWS, 5)
        assert [(p.loader, p.epoch, p.count) for p in record.passes] == [(0, 0, 25), (0, 1, 25)]
        assert record.passes[0].ids != record.passes[1].ids
    for epoch in range(2):  # in this file the value of a row is its number
        ids = [i for record in records for i in record.passes[epoch].ids]
        assert sorted(ids) == list(range(ROWS))


def test_ranks_with_the_same_rows_are_reported(ranks, file):
    def body(rank, step):
        for batch in DataLoader(ParquetDataset(file, shuffle=True, seed=rank), 10):
            step(batch)

    _, diagnosis = ranks(body)
    (finding,) = diagnosis.findings
    assert (finding.code, finding.ranks) == ("same-data", (0, 1))
    assert re.search(r"\brank=.*\bworld_size=", finding.fix)


def test_files_of_each_rank_with_equal_row_numbers_are_not_the_same_data(ranks, tmp_path):
    def body(rank, step):
        path = tmp_path / f"{rank}.parquet"
        pq.write_table(pa.table({"x": range(rank, rank + ROWS)}), path)
        for batch in DataLoader(ParquetDataset(path), 10):
            step(batch)

    assert codes(ranks(body)[1]) == []


def test_repeated_order_is_reported(ranks, file):
    def body(rank, step):
        data = ParquetDataset(file, shuffle=True, seed=1, rank=rank, world_size=2)
        loader = DataLoader(data, 5)
        for _ in range(2):
            loader.set_epoch(0)
            for batch in loader:
                step(batch)

    (finding,) = ranks(body)[1].findings
    assert (finding.code, finding.ranks) == ("set-epoch-forgotten", (0, 1))
    assert "DistributedSampler" not in finding.cause


def fail_on_small(row):
    if row < 10:
        raise ValueError("small")
    return {"x": row}


def test_batches_whose_rows_are_all_skipped_are_empty(ranks):
    def body(rank, step):
        loader = DataLoader(
            IndexedDataset(range(40), rank=rank, world_size=2),
            10,
            transform=fail_on_small,
            on_error="skip",
        )
        for batch in loader:
            if rank == 1 or len(batch["x"]):
                step(batch)
        if rank == 0:
            step({"x": [0.0]})  # or rank 1 would wait for it

    records, diagnosis = ranks(body)
    assert [record.loaders[0].empty_batches for record in records] == [1, 0]
    assert [record.batches for record in records] == [1, 2]
    assert "empty-batches" in codes(diagnosis)


class Events:
    """Note all events of loaders."""

    def __init__(self):
        self.events = []

    def on_pass_start(self, loader, epoch):
        self.events.append(("start", epoch))

    def on_batch(self, loader, row_ids, num_rows):
        self.events.append((list(row_ids), num_rows))

    def on_pass_end(self, loader):
        self.events.append("end")


@pytest.fixture
def events():
    observer = Events()
    observers.append(observer)
    yield observer.events
    observers.remove(observer)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_observers_receive_row_numbers_of_each_batch(events, prefetch):
    data = IndexedDataset(range(10), rank=1, world_size=2, shuffle=True, seed=4)
    loader = DataLoader(data, 4, prefetch=prefetch, transform=lambda x: {"x": x})
    for epoch in range(2):
        seen = [batch["x"].tolist() for batch in loader]
        expected = [("start", epoch), *((rows, len(rows)) for rows in seen), "end"]
        assert events == expected
        events.clear()
    next(iter(loader))
    assert [event for event in events if event == "end"] == []


def test_row_numbers_of_a_mixture_are_distinct(events):
    parts = [IndexedDataset(range(20), name=name) for name in ("a", "b")]
    assert len(list(DataLoader(Mixture([(part, 1) for part in parts], seed=1), 8))) == 5
    assert sorted(i for ids, _ in events[1:-1] for i in ids) == list(range(40))


def test_probe_stops_at_the_first_loader_of_either_kind(tmp_path, file, monkeypatch):
    """Run the part of ``miniray doctor data`` that runs in each rank, without the launcher."""
    script = tmp_path / "script.py"
    script.write_text(f"""
from miniray.data import DataLoader, ParquetDataset
loader = DataLoader(ParquetDataset({str(file)!r}, shuffle=True, seed=1), 10)
next(iter(loader))
for batch in loader:
    raise AssertionError("the loop must not start")
""")
    started = Ranks()

    def body(rank):
        doctor.attach(tmp_path / "run", rank=rank, world_size=2)
        monkeypatch.setattr("sys.argv", ["probe", str(script)])
        with pytest.raises(SystemExit):
            data_probe.main()

    for rank in range(2):
        started.start(body, rank)
    assert started.wait() == [0, 0]
    (report,) = data_probe.read(tmp_path / "run", 2)
    assert json.dumps(report.to_json())
    assert [share.samples for share in report.shares] == [ROWS, ROWS]
    assert [finding.code for finding in report.findings] == ["same-data"]
    assert re.search(r"\brank=.*\bworld_size=", report.findings[0].fix)
    assert (report.setup.batch_size, report.setup.sampler) == (10, "miniray.data")
    assert report.setup.where.endswith("script.py:5")
