"""The row cache: built once, mapped by all, bounded, and never wrong."""

import errno
import json
import multiprocessing
import os
import signal

import pyarrow as pa
import pytest

from miniray.data import CacheFullError, DataLoader, JsonlDataset, ParquetDataset, RowCache
from miniray.data.sources import row_cache
from miniray.data.sources.parquet import ParquetSource
from miniray.errors import DataError, RowError
from tests.data.conftest import write_parquet


def read_ids(dataset):
    return [row["id"] for row in dataset]


def rows_of(cached):
    blocks = range(len(cached.list_blocks()))
    return [i for block in blocks for i in cached.read_block(block).column("id").to_pylist()]


def test_copy_has_all_rows_in_order_and_is_built_once(parquet_folder, tmp_path, capsys):
    cache = RowCache(tmp_path / "rows")
    first = cache.open(ParquetSource(parquet_folder))
    assert rows_of(first) == list(range(237))
    assert first.random_access
    assert first.compute_fingerprint() == ParquetSource(parquet_folder).compute_fingerprint()
    assert capsys.readouterr().err.count("Copying 237 rows of part-0.parquet, ... to ") == 1
    again = cache.open(ParquetSource(parquet_folder))
    assert rows_of(again) == list(range(237))
    assert capsys.readouterr().err == ""
    (entry,) = cache.list_entries()
    assert entry.is_in_use
    assert entry.path.stat().st_mode & 0o777 == 0o444
    assert not list((tmp_path / "rows").glob("*.tmp"))


def test_columns_are_part_of_the_key(parquet_folder, tmp_path):
    cache = RowCache(tmp_path / "rows")
    cache.open(ParquetSource(parquet_folder))
    cache.open(ParquetSource(parquet_folder, ["id"]))
    assert len(cache.list_entries()) == 2


@pytest.mark.parametrize("split", ["contiguous", "interleaved"])
def test_global_order_is_the_same_for_any_world_size_and_budget(parquet_folder, split):
    def order(world, budget="256MB"):
        parts = [
            ParquetDataset(
                parquet_folder, shuffle="global", seed=1, rank=r, world_size=world, split=split,
                memory_budget=budget,
            )
            for r in range(world)
        ]  # fmt: skip
        found = [read_ids(part) for part in parts]
        if split == "contiguous":
            return [i for ids in found for i in ids]
        longest = max(map(len, found))
        return [ids[k] for k in range(longest) for ids in found if k < len(ids)]

    expected = order(1)
    assert sorted(expected) == list(range(237))
    assert expected != sorted(expected)
    assert order(3) == order(5) == order(2, "20KB") == expected


def test_global_order_of_json_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"id": i}) for i in range(100)]
    path.write_text("\n".join([*lines[:50], "{broken", *lines[50:]]))
    dataset = JsonlDataset(path, shuffle="global", seed=1)
    loader = DataLoader(dataset, 1, collate_fn=list)
    seen = []
    with pytest.raises(RowError, match=r"x\.jsonl.*\b51\b") as caught:
        for (row,) in loader:
            seen.append(row["id"])
    assert caught.value.row == 50
    assert len(seen) == [row for _, row in dataset.shard(0, 1).row_ids].index(50)


def test_filter_and_subset_apply_to_the_copy(parquet_folder):
    def is_odd(row):
        return row["id"] % 2 == 1

    options = {"filter": is_odd, "filter_columns": ["id"], "max_samples": 50, "seed": 3}
    whole = ParquetDataset(parquet_folder, shuffle="global", **options)
    ids = read_ids(whole)
    assert len(set(ids)) == 50
    assert all(i % 2 for i in ids)
    assert sorted(ids) == sorted(read_ids(ParquetDataset(parquet_folder, **options)))


def open_copy(folder, directory, queue):
    source = ParquetSource(folder)
    original, count = source.read_block, [0]

    def read_block(block, columns=None):
        count[0] += 1
        return original(block, columns)

    source.read_block = read_block
    cached = RowCache(directory).open(source)
    queue.put((count[0] > 0, rows_of(cached)))


def test_concurrent_processes_build_one_copy(parquet_folder, tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [
        context.Process(target=open_copy, args=(parquet_folder, tmp_path / "rows", queue))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [queue.get(timeout=50) for _ in processes]
    for process in processes:
        process.join()
    assert [rows for _, rows in found] == [list(range(237))] * 4
    assert sum(built for built, _ in found) == 1


def test_killed_builder_is_replaced(parquet_folder, tmp_path):
    directory = tmp_path / "rows"
    pid = os.fork()
    if pid == 0:
        source = ParquetSource(parquet_folder)
        original = source.read_block

        def read_block(block, columns=None):
            if block == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(block, columns)

        source.read_block = read_block
        try:
            RowCache(directory).open(source)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(list(directory.glob("*.tmp"))) == 1
    assert rows_of(RowCache(directory).open(ParquetSource(parquet_folder))) == list(range(237))
    assert not list(directory.glob("*.tmp"))


def test_least_recently_used_copy_is_evicted_unless_in_use(tmp_path):
    folders = []
    for number in range(3):
        path = write_parquet(tmp_path / f"{number}.parquet", range(2000), payload=100 + number)
        folders.append(ParquetSource(path))
    sizes = []
    for number, source in enumerate(folders):
        cache = RowCache(tmp_path / f"alone-{number}")
        cache.open(source)
        sizes.append(cache.list_entries()[0].nbytes)
    cache = RowCache(tmp_path / "rows", max_bytes=int(2.6 * max(sizes)))
    held = cache.open(folders[0])
    os.utime(cache.list_entries()[0].path, (1, 1))
    cache.open(folders[1])
    cache.open(folders[2])  # evicts the second: the first is older, but in use
    kept = {entry.path.name for entry in cache.list_entries()}
    assert kept == {f"{row_cache.compute_key(folders[i])}.arrow" for i in (0, 2)}
    third = cache.open(folders[2])
    with pytest.raises(CacheFullError, match=r"1\.parquet.*\d+ MB.*\d+ MB"):
        cache.open(folders[1])
    assert rows_of(held) == rows_of(third) == list(range(2000))
    assert not list((tmp_path / "rows").glob("*.tmp"))


def test_full_disk_is_a_clear_error_and_leaves_nothing(parquet_folder, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(row_cache.os, "fsync", fail)
    cache = RowCache(tmp_path / "rows")
    with pytest.raises(CacheFullError, match="cache_dir=") as caught:
        cache.open(ParquetSource(parquet_folder))
    assert isinstance(caught.value, DataError)
    assert not [p for p in (tmp_path / "rows").iterdir() if p.suffix in (".tmp", ".arrow")]


@pytest.mark.parametrize("damage", ["truncated", "empty", "other"])
def test_damaged_copy_is_built_again(parquet_folder, tmp_path, damage):
    cache = RowCache(tmp_path / "rows")
    cache.open(ParquetSource(parquet_folder))
    path = cache.list_entries()[0].path
    content = path.read_bytes()
    os.chmod(path, 0o644)
    if damage == "other":
        with pa.ipc.new_file(str(path), pa.schema({"id": pa.int64()})) as writer:
            writer.write(pa.record_batch({"id": pa.array([1], pa.int64())}))
    else:
        path.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"")
    assert rows_of(cache.open(ParquetSource(parquet_folder))) == list(range(237))


def test_clear_deletes_unused_copies(parquet_folder, tmp_path):
    cache = RowCache(tmp_path / "rows")
    held = cache.open(ParquetSource(parquet_folder))
    cache.open(ParquetSource(parquet_folder, ["id"]))
    assert len(cache.clear()) == 1
    assert rows_of(held) == list(range(237))
    del held
    assert len(cache.clear()) == 1
    assert cache.list_entries() == []


def test_dictionaries_are_decoded_in_small_steps(tmp_path):
    """200 MB of two distinct values in 100 MB of memory."""
    import pyarrow.parquet as pq

    table = pa.table({"s": ["a" * 1000, "b" * 1000] * 10_000, "id": range(20_000)})
    pq.write_table(table, tmp_path / "x.parquet")
    cached = RowCache(tmp_path / "rows").open(ParquetSource(tmp_path / "x.parquet"))
    sizes = [cached.read_block(b).nbytes for b in range(len(cached.list_blocks()))]
    assert sum(sizes) > 20_000_000
    assert max(sizes) < 12_000_000
    assert cached.read_rows(0, 1, 1).column("s").to_pylist() == ["b" * 1000]


def test_trainers_build_the_copy_before_training(parquet_folder):
    """Not at the first batch, when the other ranks wait at a barrier."""
    data = pytest.importorskip("miniray.train.workers.data.planned")
    from miniray.train.workers.actor import WorkerActor
    from miniray.train.workers.data.shards import TrainData

    class Worker:
        def load_data_shard(self, shard_id, num_shards, data):
            self.entries = RowCache().list_entries()

    worker = Worker()
    dataset = ParquetDataset(parquet_folder, shuffle="global", seed=1)
    WorkerActor(worker).assign_data(TrainData(DataLoader(dataset, 4)), 0, 2)
    assert len(worker.entries) == 1
    narrow = ParquetDataset(parquet_folder, columns=["id"], shuffle="global", seed=1)
    data.shard_data(DataLoader(narrow, 4), 1, 2)
    assert len(RowCache().list_entries()) == 2
