"""The loader: batches, formats, transforms in threads and processes, errors, and its end."""

import dataclasses
import gc
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import CancelledError

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniray.data import ArrowDataset, DataLoader, IndexedDataset, ParquetDataset
from miniray.data.loader.decode import size_of
from miniray.data.loader.threads import DaemonPool
from miniray.data.plan import shard as parts
from miniray.errors import DataError, RowError
from tests.data.conftest import write_parquet


def threads():
    own = ("miniray-read", "miniray-decode")  # not those of an engine that other tests started
    return [t.name for t in threading.enumerate() if t.name.startswith(own)]


def double(row):
    return {"id": row["id"], "twice": 2 * row["id"]}


def fail_on_13(row):
    if row["id"] == 13:
        raise ValueError("unlucky")
    return row


def whose(row):
    return {"id": row["id"], "pid": os.getpid()}


# -- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_are_columns_in_order(parquet_folder, prefetch, workers):
    if workers and not prefetch:
        return
    loader = DataLoader(
        ParquetDataset(parquet_folder), 50, prefetch=prefetch, decode_workers=workers
    )
    batches = list(loader)
    assert [len(batch["id"]) for batch in batches] == [50, 50, 50, 50, 37]
    assert len(loader) == 5
    assert np.concatenate([batch["id"] for batch in batches]).tolist() == list(range(237))
    assert batches[1]["id"].dtype == np.int64
    assert batches[1]["data"][7] == b"57" * 20
    assert threads() == []


def test_the_last_batch_can_be_left_out(parquet_folder):
    loader = DataLoader(ParquetDataset(parquet_folder), 50, drop_last=True)
    assert len(loader) == len(list(loader)) == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_transform_and_collate(parquet_folder, workers):
    loader = DataLoader(
        ParquetDataset(parquet_folder, shuffle=True, seed=1), 30, transform=double,
        decode_workers=workers,
    )  # fmt: skip
    for batch in loader:
        assert (batch["twice"] == 2 * batch["id"]).all()
    loader = DataLoader(
        ParquetDataset(parquet_folder), 100, transform=lambda row: row["id"], collate_fn=sum,
        decode_workers=workers,
    )  # fmt: skip
    assert list(loader) == [sum(range(100)), sum(range(100, 200)), sum(range(200, 237))]


def test_what_a_transform_returns_makes_columns():
    def transform(row):
        return {"image": np.full((2, 3), row["id"]), "text": str(row["id"]), "ok": row["id"] > 1}

    (batch,) = DataLoader(IndexedDataset([{"id": i} for i in range(3)]), 3, transform=transform)
    assert batch["image"].shape == (3, 2, 3)
    assert batch["text"] == ["0", "1", "2"]
    assert batch["ok"].dtype == bool


def test_rows_that_are_no_dicts():
    (batch,) = DataLoader(IndexedDataset([4, 5, 6]), 3)
    assert batch["item"].tolist() == [4, 5, 6]
    assert list(IndexedDataset("abc")) == ["a", "b", "c"]


def test_integers_that_no_array_holds_stay_what_they_are():
    for ids in ([2**63 + 5, 3], [2**63 + 5, -3]):  # numpy would make floats of them
        assert list(DataLoader(IndexedDataset(ids), 2)) == [{"item": ids}]
    (batch,) = DataLoader(IndexedDataset([1, 2.5]), 2)
    assert batch["item"].tolist() == [1.0, 2.5]


def test_torch_tensors(parquet_folder):
    torch = pytest.importorskip("torch")
    batch = next(iter(DataLoader(ParquetDataset(parquet_folder), 4, format="torch")))
    assert torch.equal(batch["id"], torch.arange(4))
    assert batch["data"][1] == b"1" * 20

    def transform(row):
        return {"x": torch.full((2,), row["id"])}

    batch = next(
        iter(DataLoader(ParquetDataset(parquet_folder), 3, format="torch", transform=transform))
    )
    assert batch["x"].tolist() == [[0, 0], [1, 1], [2, 2]]

    def words(row):
        return {"x": np.array(["a", "b"])}

    (batch,) = DataLoader(IndexedDataset([1]), 1, format="torch", transform=words)
    assert batch["x"].tolist() == [["a", "b"]]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_whose_size_nobody_can_tell(workers):
    torch = pytest.importorskip("torch")

    def sparse(rows):
        return torch.eye(len(rows)).to_sparse()

    loader = DataLoader(IndexedDataset(range(10)), 4, collate_fn=sparse, decode_workers=workers)
    assert [batch.shape[0] for batch in loader] == [4, 4, 2]


def test_the_size_of_a_batch():
    @dataclasses.dataclass
    class Sample:
        pixels: np.ndarray
        text: str

    sample = Sample(np.zeros(1000, np.uint8), "x" * 100)
    assert 1100 < size_of(sample) < 1500
    assert 8 * 1100 < size_of([sample] * 8) < 8 * 1500
    endless = []
    endless.append(endless)
    assert size_of(endless) < 1000


def test_arrow_tables(parquet_folder):
    loader = DataLoader(ParquetDataset(parquet_folder, shuffle=True, seed=2), 100, format="arrow")
    tables = list(loader)
    assert all(isinstance(table, pa.Table) for table in tables)
    columns = DataLoader(ParquetDataset(parquet_folder, shuffle=True, seed=2), 100)
    for table, batch in zip(tables, columns, strict=True):
        assert table["id"].to_pylist() == batch["id"].tolist()
        assert table["data"].to_pylist() == batch["data"]


# -- errors --------------------------------------------------------------------------------------


@pytest.fixture
def images(tmp_path):
    """Twelve JPEG images, of which row 7 is damaged."""
    image = pytest.importorskip("PIL.Image")
    encoded = []
    for i in range(12):
        buffer = io.BytesIO()
        image.new("RGB", (8, 8), (20 * i, 0, 0)).save(buffer, "JPEG")
        encoded.append(buffer.getvalue() if i != 7 else b"no image at all")
    pq.write_table(pa.table({"id": range(12), "image": encoded}), tmp_path / "i.parquet")
    return tmp_path / "i.parquet"


def decode(row):
    from PIL import Image

    with Image.open(io.BytesIO(row["image"])) as image:
        return {"id": row["id"], "pixels": np.asarray(image)}


@pytest.mark.parametrize("options", [{}, {"decode_workers": 2}, {"prefetch": 0}])
def test_a_bad_image_is_named(images, options):
    loader = DataLoader(ParquetDataset(images), 3, transform=decode, **options)
    seen = []
    with pytest.raises(RowError) as caught:
        for batch in loader:
            seen += batch["id"].tolist()
    assert (caught.value.file, caught.value.row) == (str(images), 7)
    assert type(caught.value.__cause__).__name__ == "UnidentifiedImageError"
    assert seen == list(range(6))
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 3])
def test_bad_images_are_skipped_and_counted(images, workers):
    loader = DataLoader(
        ParquetDataset(images), 3, transform=decode, on_error="skip", decode_workers=workers
    )
    with pytest.warns(RuntimeWarning) as warned:
        batches = list(loader)
    assert [batch["id"].tolist() for batch in batches] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 8],
        [9, 10, 11],
    ]
    assert batches[0]["pixels"].shape == (3, 8, 8, 3)
    assert loader.skipped.count == 1
    ((where, why),) = loader.skipped.rows.items()
    assert where == (str(images), 7)
    assert "UnidentifiedImageError" in why
    assert loader.skipped.by_file() == {str(images): 1}
    assert re.search(r"\b7\b", str(warned[0].message))
    assert re.search(r"\b0: 1\b", str(warned[-1].message))  # epoch and count


def test_a_batch_of_nothing_but_bad_rows_is_left_out_and_the_rank_is_alone(images):
    shard = ParquetDataset(images, rank=1, world_size=2)  # rows 6 .. 11
    loader = DataLoader(shard, 1, transform=decode, on_error="skip")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(loader)
        assert [next(iterator)["id"].tolist() for _ in range(2)] == [[6], [8]]
    state = loader.state_dict()
    assert state["taken"] == 3
    with pytest.raises(DataError, match=r"\b1\b.*merge_states"):
        ParquetDataset(images).load_state_dict(state)


def test_errors_of_collate_and_of_reading_reach_the_loop():
    class Broken:
        def __len__(self):
            return 5

        def __getitem__(self, i):
            if i == 3:
                raise OSError("disk gone")
            return i

    with pytest.raises(RowError) as caught:
        list(DataLoader(IndexedDataset(Broken()), 2))
    assert caught.value.row == 3
    assert type(caught.value.__cause__) is OSError
    with pytest.raises(ZeroDivisionError):
        list(DataLoader(IndexedDataset([1, 2]), 2, collate_fn=lambda rows: 1 / 0))
    assert threads() == []


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 0},
        {"prefetch": -1},
        {"transform": "double"},
        {"batch_by": "tokens", "length": "no"},
        {"prefetch": 0, "decode_workers": 2},
        {"format": "pandas"},
        {"on_error": "ignore"},
        {"on_error": "skip"},
        {"format": "arrow", "transform": double},
        {"decode_processes": True},
        {"batch_by": "bytes"},
        {"batch_by": "tokens"},
        {"length": "id"},
        {"batch_by": "tokens", "length": "id", "drop_last": True},
    ],
)
def test_bad_options_are_refused(options, raises):
    with raises(ValueError):
        DataLoader(ArrowDataset({"id": [1]}), **{"batch_size": 1, **options})


def test_another_kind_of_dataset_is_refused():
    with pytest.raises(TypeError, match="IndexedDataset"):
        DataLoader([1, 2, 3], 2)


# -- processes -----------------------------------------------------------------------------------


def test_transforms_in_processes():
    data = IndexedDataset([{"id": i} for i in range(40)])
    loader = DataLoader(data, 10, transform=whose, decode_workers=2, decode_processes=True)
    batches = list(loader)
    assert np.concatenate([batch["id"] for batch in batches]).tolist() == list(range(40))
    pids = {pid for batch in batches for pid in batch["pid"].tolist()}
    assert os.getpid() not in pids
    loader.close()
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")
    loader = DataLoader(data, 20, transform=fail_on_13, decode_workers=1, decode_processes=True)
    with pytest.raises(RowError, match="unlucky") as caught:
        list(loader)
    assert caught.value.row == 13
    loader.close()


def kill_process_once(row):
    """End the process at row 25 by SIGKILL, as often as there are files to delete."""
    if row["id"] == 25 and (marks := os.listdir(row["marks"])):
        os.unlink(os.path.join(row["marks"], marks[0]))
        os.kill(os.getpid(), signal.SIGKILL)
    return {"id": row["id"], "pid": os.getpid()}


@pytest.mark.parametrize("workers", [0, 2])
def test_lost_decode_process_is_replaced(tmp_path, workers):
    (tmp_path / "once").touch()
    data = IndexedDataset([{"id": i, "marks": str(tmp_path)} for i in range(40)])
    loader = DataLoader(
        data, 10, transform=kill_process_once, decode_workers=workers, decode_processes=True
    )
    with pytest.warns(RuntimeWarning, match=r"\brow 2\d\b"):
        batches = list(loader)
    loader.close()
    assert not os.listdir(tmp_path)
    assert [i for batch in batches for i in batch["id"].tolist()] == list(range(40))
    pids = {pid for batch in batches for pid in batch["pid"].tolist()}
    assert len(pids) in (2, 3)  # with two decode threads the third batch may come first
    for pid in pids:
        assert not os.path.exists(f"/proc/{pid}")


def test_rows_that_end_two_processes_are_named_and_the_loader_still_works(tmp_path):
    for name in ("once", "twice"):
        (tmp_path / name).touch()
    data = IndexedDataset([{"id": i, "marks": str(tmp_path)} for i in range(40)], name="numbers")
    loader = DataLoader(data, 10, transform=kill_process_once, decode_processes=True)
    seen = []
    with pytest.raises(DataError) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for batch in loader:
            seen += batch["id"].tolist()
    assert (caught.value.file, caught.value.row) == ("numbers", 20)
    loader.load_state_dict(loader.state_dict())
    assert seen + [i for batch in loader for i in batch["id"].tolist()] == list(range(40))
    loader.close()


# -- ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [list, lambda data: list(DataLoader(data, 10))])
@pytest.mark.parametrize(
    ("options", "world_size", "count"),
    [({}, "4", 1), ({}, "1", 0), ({"rank": 0, "world_size": 1}, "4", 0)],
)
def test_data_without_rank_under_torchrun_warns_once(monkeypatch, read, options, world_size, count):
    monkeypatch.setattr(parts, "_has_warned", False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            data = IndexedDataset(range(40), **options)
            read(data), read(data)
    found = [(w.category, w.filename) for w in caught]
    assert found == [(RuntimeWarning, __file__)] * count
    assert all("rank=" in str(w.message) for w in caught)


# -- memory --------------------------------------------------------------------------------------


def test_decoded_batches_in_flight_are_counted_in_bytes():
    made = []

    def large(row):
        made.append(row)
        return {"pixels": np.zeros(100_000, np.uint8)}

    data = IndexedDataset(range(100), memory_budget="4MB")
    loader = DataLoader(data, 5, transform=large, prefetch=50)
    iterator = iter(loader)
    next(iterator)
    deadline = time.monotonic() + 30
    # Half of the budget is four batches of 500 KB; the first one shows how large they are.
    while time.monotonic() < deadline and len(made) < 5 * 5:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(made) == 5 * 5
    assert sum(len(batch["pixels"]) for batch in iterator) == 95


# -- the end -------------------------------------------------------------------------------------


def test_leaving_the_loop_ends_the_threads(parquet_folder):
    loader = DataLoader(
        ParquetDataset(parquet_folder), 5, transform=double, decode_workers=2, prefetch=3
    )
    for _ in loader:
        assert len(threads()) == 3
        break
    assert threads() == []

    def loop():
        for _ in loader:
            raise RuntimeError("training failed")

    with pytest.raises(RuntimeError):
        loop()
    gc.collect()  # the traceback held the iterator
    assert threads() == []
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert threads() == []
    assert list(iterator) == []


def test_a_loop_within_a_loop_is_not_taken_for_the_end_of_the_outer_one(parquet_folder, raises):
    loader = DataLoader(ParquetDataset(parquet_folder), 50)
    first = iter(loader)
    next(first)
    assert len(list(iter(loader))) == 5
    with raises(RuntimeError):
        next(first)
    second = iter(loader)
    next(second)
    loader.set_epoch(7)
    with pytest.raises(RuntimeError, match="set_epoch"):
        next(second)
    third = iter(loader)
    assert len(list(third)) == 5
    assert len(list(loader)) == 5
    assert list(third) == []


def test_work_for_closed_threads_is_cancelled():
    pool = DaemonPool("miniray-read", 2)
    assert pool.submit(lambda: 5).result(30) == 5
    pool.close()
    assert pool.join(time.monotonic() + 30) == []
    with pytest.raises(CancelledError):
        pool.submit(lambda: 5).result(30)


HANGS = """
    import os, sys, time
    from miniray.data import DataLoader, IndexedDataset
    from miniray.data.loader import stream

    stream._CLOSE_TIMEOUT_S = 0.3

    def transform(x):
        if x == 5:
            os.write(1, b"stuck\\n")  # whole lines: a print may come between another's parts
            time.sleep(1000)
        return x

    if __name__ == "__main__":
        options = {"decode_workers": 2, "decode_processes": "processes" in sys.argv}
        loader = DataLoader(IndexedDataset(range(40)), 4, transform=transform, **options)
        for batch in loader:
            os.write(1, f"{batch['item'].tolist()}\\n".encode())
"""


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_ctrl_c_ends_a_loop_whose_transform_does_not_come_back(tmp_path, where):
    script = tmp_path / "hangs.py"
    script.write_text(textwrap.dedent(HANGS))
    with subprocess.Popen(
        [sys.executable, str(script), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert {process.stdout.readline() for _ in range(2)} == {"[0, 1, 2, 3]\n", "stuck\n"}
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=50)  # all that have its output are gone by then
    assert process.returncode == -signal.SIGINT
    assert "a transform hasn't returned" in errors


def test_an_abandoned_loader_does_not_hold_up_the_interpreter(parquet_folder):
    code = """
        import sys
        from miniray.data import DataLoader, ParquetDataset
        loader = DataLoader(ParquetDataset(sys.argv[1]), 5, decode_workers=2, prefetch=4)
        iterator = iter(loader)
        print(next(iterator)["id"].tolist())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(parquet_folder)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2, 3, 4]\n", "")


def test_an_iterator_is_not_used_across_a_fork(parquet_folder):
    loader = DataLoader(ParquetDataset(parquet_folder), 5)
    iterator = iter(loader)
    next(iterator)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            try:
                next(iterator)
            except RuntimeError as error:
                again = list(loader)
                status = 0 if "fork" in str(error) and len(again) == 48 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(list(iterator)) == 47


def test_importing_it_loads_neither_torch_nor_pandas(tmp_path):
    write_parquet(tmp_path / "x.parquet", range(100))
    code = """
        import sys
        import miniray.data
        light = [m for m in ("numpy", "pyarrow", "torch") if m in sys.modules]
        from miniray.data import DataLoader, ParquetDataset
        batches = list(DataLoader(ParquetDataset(sys.argv[1], shuffle=True), 10))
        heavy = [m for m in ("torch", "pandas", "pyarrow.compute", "tqdm") if m in sys.modules]
        print(light, len(batches), heavy)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert done.stdout == "[] 10 []\n"


def test_how_large_a_batch_becomes_is_known_before_more_are_decoded() -> None:
    others = threading.Event()
    ahead = []

    def transform(row: int) -> int:
        if row == 0:
            ahead.append(others.wait(0.3))
        else:
            others.set()
        return row

    loader = DataLoader(
        IndexedDataset(range(20)),
        1,
        transform=transform,
        collate_fn=list,
        decode_workers=4,
        prefetch=8,
    )
    assert [row for batch in loader for row in batch] == list(range(20))
    assert ahead == [False]
