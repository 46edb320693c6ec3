"""Parquet in place: sharding by stable ids, locality, memory, pickling, wrong files."""

import base64
import io
import json
import os
import pickle

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import DataLoader, IndexedDataset, Mixture, ParquetDataset
from miniray.data.datasets import SourceDataset
from miniray.data.sources.parquet import ParquetSource
from miniray.errors import DataError
from tests.data.conftest import write_parquet


def shards(folder, world, **options):
    whole = ParquetDataset(folder, **options)
    return [whole.shard(rank, world) for rank in range(world)]


def test_2099_rows_on_two_workers(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", range(2099), rows=100)
    first = ParquetDataset(path, rank=0, world_size=2)
    second = ParquetDataset(path, rank=1, world_size=2)
    assert list(first.row_ids) == [(str(path), row) for row in range(1050)]
    assert list(second.row_ids) == [(str(path), row) for row in range(1050, 2099)]
    assert [row["id"] for row in first] == list(range(1050))
    assert second[0] == {"id": 1050, "data": b"1050" * 20}
    assert second[-1]["id"] == 2098
    with pytest.raises(IndexError):
        first[1050]


@pytest.mark.parametrize("shuffle", [False, "window", "global"])
@pytest.mark.parametrize("world", [1, 2, 7, 300])
def test_every_row_of_every_file_once(parquet_folder, world, shuffle):
    options = {"memory_budget": "30KB", "window_bytes": "4KB"}
    parts = shards(parquet_folder, world, shuffle=shuffle, seed=3, **options)
    ids = [row_id for part in parts for row_id in part.row_ids]
    assert len(ids) == len(set(ids)) == 237
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    rows = [row["id"] for part in parts for row in part]
    assert sorted(rows) == list(range(237))


def test_ids_are_those_of_the_rows(parquet_folder):
    dataset = ParquetDataset(parquet_folder, shuffle=True, seed=1)
    firsts = {"part-0.parquet": 0, "part-2.parquet": 100, "part-3.parquet": 153}
    for (file, row), content in zip(dataset.row_ids, dataset, strict=True):
        assert firsts[os.path.basename(file)] + row == content["id"]


def test_ids_can_be_sliced(parquet_folder):
    ids = ParquetDataset(parquet_folder).row_ids
    assert ids[98:101] == [ids[98], ids[99], ids[100]]
    assert ids[-1] == (str(parquet_folder / "part-3.parquet"), 83)
    assert len(ids) == 237


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(0, 300), st.integers(), st.sampled_from([False, True]))
def test_max_samples_is_one_subset(pytestconfig, world, most, seed, shuffle):
    folder = pytestconfig.cache_folder
    parts = shards(folder, world, max_samples=most, seed=seed, shuffle=shuffle, columns=["id"])
    ids = [row_id for part in parts for row_id in part.row_ids]
    assert len(ids) == len(set(ids)) == min(most, 237)
    other = shards(folder, 2, max_samples=most, seed=seed, columns=["id"])
    assert {i for part in other for i in part.row_ids} == set(ids)


@pytest.fixture(autouse=True, scope="module")
def _folder_for_properties(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("properties")
    write_parquet(folder / "a.parquet", range(100))
    write_parquet(folder / "b.parquet", range(100, 237), rows=13)
    pytestconfig.cache_folder = folder


def test_a_subset_is_drawn_evenly(parquet_folder):
    counts = np.zeros(237)
    for seed in range(300):
        for _, row in shards(parquet_folder, 1, max_samples=100, seed=seed)[0].row_ids:
            counts[row] += 1  # by row within the file: three files' rows fall together
    expected = np.zeros(237)
    for rows in (100, 53, 84):
        expected[:rows] += 300 * 100 / 237
    z = (counts[:100] - expected[:100]) / np.sqrt(expected[:100] * (1 - 100 / 237))
    assert np.abs(z).max() < 4.5
    assert z.std() < 1.3


def test_several_ranks_need_a_seed(parquet_folder, monkeypatch):
    with pytest.raises(ValueError, match="MINIRAY_RUN_SEED"):
        ParquetDataset(parquet_folder, shuffle=True, rank=0, world_size=2)
    with pytest.raises(ValueError, match="MINIRAY_RUN_SEED"):
        ParquetDataset(parquet_folder, max_samples=10, rank=0, world_size=2)
    ParquetDataset(parquet_folder, max_samples=500, rank=0, world_size=2)  # nothing to draw
    monkeypatch.setenv("MINIRAY_RUN_SEED", "12")
    assert ParquetDataset(parquet_folder, shuffle=True, rank=0, world_size=2).seed == 12


def test_a_seed_drawn_by_the_driver_holds_for_all_ranks(parquet_folder):
    whole = ParquetDataset(parquet_folder, shuffle=True, max_samples=99)
    parts = [pickle.loads(pickle.dumps(whole)).shard(rank, 3) for rank in range(3)]
    ids = [i for part in parts for i in part.row_ids]
    assert len(set(ids)) == len(ids) == 99


def test_seed_of_the_run_replaces_a_random_one(parquet_folder, monkeypatch):
    """The dataset was created before the run, as ``data=`` of a trainer."""
    options = {"shuffle": True, "max_samples": 99}
    drawn, fixed = (ParquetDataset(parquet_folder, seed=seed, **options) for seed in (None, 5))
    restored = ParquetDataset(parquet_folder, **options)
    restored.load_state_dict(fixed.state_dict())
    mixture = Mixture([(ParquetDataset(parquet_folder, shuffle=True), 1)])
    monkeypatch.setenv("MINIRAY_RUN_SEED", "12")
    expected = ParquetDataset(parquet_folder, seed=12, **options)
    assert list(drawn.shard(1, 3).row_ids) == list(expected.shard(1, 3).row_ids)
    assert list(drawn.shard(1, 3).shard(0, 1).row_ids) == list(expected.row_ids)
    assert fixed.shard(0, 2).seed == restored.shard(0, 2).seed == 5
    assert mixture.shard(0, 2).seed == 12


# -- locality ------------------------------------------------------------------------------------


class Counting(ParquetSource):
    """Notes which blocks are read."""

    def read_block(self, block, columns=None):
        self.__dict__.setdefault("blocks_read", []).append(block)
        return super().read_block(block, columns)


@pytest.mark.parametrize("shuffle", [False, "window"])
@pytest.mark.parametrize("world", [1, 3, 5])
def test_ranks_read_their_own_blocks_and_two_more_at_most(parquet_folder, world, shuffle):
    total = 0
    for rank in range(world):
        source = Counting(parquet_folder)
        part = SourceDataset(
            source, rank=rank, world_size=world, shuffle=shuffle, seed=4, window_bytes="4KB"
        )
        assert len(
            [row for batch in DataLoader(part, 7) for row in batch["id"]]
        ) == 237 // world + (rank < 237 % world)
        assert len(source.blocks_read) == len(set(source.blocks_read))
        own = len(part.row_ids) / 10
        assert len(source.blocks_read) <= own + 8  # parts of two windows of up to five blocks
        total += len(source.blocks_read)
    assert total <= 25 + (world - 1) * (5 if shuffle else 1)  # shared at each border


def test_windows_mix_blocks_and_the_whole_is_shuffled(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", range(4000), rows=100)
    window_bytes = 5 * 100 * 110  # five of the 40 blocks
    dataset = ParquetDataset(path, shuffle=True, seed=1, window_bytes=window_bytes)
    first, second = ([row["id"] for row in dataset] for _ in range(2))
    blocks = np.array(first) // 100
    assert (np.diff(blocks) != 0).mean() > 0.5  # neighbours come from different blocks
    assert abs(np.corrcoef(first, np.arange(4000))[0, 1]) < 0.5
    assert sorted(first) == sorted(second)
    assert (np.array(first) == np.array(second)).mean() < 0.02


# -- memory --------------------------------------------------------------------------------------


def test_row_group_larger_than_budget_is_read_in_blocks(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", range(6000), rows=6000, payload=1000)
    blocks = ParquetSource(path).list_blocks()
    assert len(blocks) == 3
    assert blocks.nbytes.max() <= 8_000_000
    assert len(set(blocks.rows.tolist()[:-1])) == 1
    for shuffle in (False, "window"):
        dataset = ParquetDataset(
            path, shuffle=shuffle, seed=1, memory_budget="17MB", window_bytes="8MB"
        )
        loader = DataLoader(dataset, 10)
        iterator = iter(loader)
        buffer = iterator._stream.buffer
        rows = [i for batch in iterator for i in batch["id"].tolist()]
        assert sorted(rows) == list(range(6000))
        assert 0 < buffer.peak <= 9_500_000  # one window: two don't fit
    counting = Counting(path)
    for block in (0, 1, 2, 1):
        counting.read_block(block)
    assert counting.read_block(2).column("id")[0].as_py() == blocks[2].first_row


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_blocks_are_read_in_any_order(tmp_path, monkeypatch, rows):
    monkeypatch.setattr("miniray.data.sources.files.BLOCK_BYTES", 1000)
    path = write_parquet(tmp_path / "x.parquet", range(200), rows=rows)
    source = ParquetSource(path)
    blocks = source.list_blocks()
    assert blocks.total_rows == 200
    for block in [*range(len(blocks)), *range(len(blocks))[::-1], *range(0, len(blocks), 3)]:
        first, count = blocks[block].first_row, blocks[block].rows
        found = source.read_block(block).column("id").to_pylist()
        assert found == list(range(first, first + count))


@pytest.mark.parametrize(("limit", "expected"), [(2_000_000, 40), (100, 10)])
def test_small_blocks_are_decoded_at_once(tmp_path, monkeypatch, limit, expected):
    """Large ones are decoded in four parts, which takes less memory."""
    sizes = []
    original = pq.ParquetFile.iter_batches

    def iter_batches(self, batch_size, **options):
        sizes.append(batch_size)
        return original(self, batch_size, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
    monkeypatch.setattr("miniray.data.sources.parquet._BATCH_BYTES", limit)
    path = write_parquet(tmp_path / "x.parquet", range(80), rows=40)
    assert [row["id"] for row in ParquetDataset(path)] == list(range(80))
    assert sizes == [expected] * 2


def test_window_that_does_not_fit_raises(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", range(1000), rows=1000, payload=1000)
    with pytest.raises(ValueError, match=r"memory_budget=\d+.*window_bytes="):
        ParquetDataset(path, shuffle=True, seed=1, memory_budget="1MB")


def test_dictionary_column_is_estimated_and_read_small(tmp_path):
    """200 MB of two distinct values, which are encoded in 48 KB."""
    path = tmp_path / "x.parquet"
    table = pa.table({"s": ["a" * 1000, "b" * 1000] * 100_000, "id": range(200_000)})
    pq.write_table(table, path)
    source = ParquetSource(path)
    held = sum(source.read_block(block).nbytes for block in range(len(source.list_blocks())))
    assert held < 10_000_000
    loader = DataLoader(ParquetDataset(path, shuffle=True, seed=1, memory_budget="64MB"), 4000)
    batch = next(iter(loader))
    loader.close()
    assert all(s[0] == "ab"[i % 2] for s, i in zip(batch["s"], batch["id"].tolist(), strict=True))
    tables = DataLoader(ParquetDataset(path, memory_budget="64MB"), 8, format="arrow")
    assert next(iter(tables)).schema.field("s").type == pa.string()
    tables.close()


def test_order_does_not_depend_on_memory_budget(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", range(3000), rows=100, payload=100)
    orders = [
        list(
            ParquetDataset(
                path, shuffle=True, seed=1, window_bytes="100KB", memory_budget=budget
            ).row_ids
        )
        for budget in ("1MB", "64MB", "1GB")
    ]
    assert orders[0] == orders[1] == orders[2]


def test_only_wanted_columns_are_read(parquet_folder):
    dataset = ParquetDataset(parquet_folder, columns=["id"])
    assert dataset[5] == {"id": 5}
    assert dataset.column_names == ["id"]
    every = ParquetDataset(parquet_folder).sources[0].list_blocks().nbytes.sum()
    assert dataset.sources[0].list_blocks().nbytes.sum() < every / 3


def test_names_with_dots_in_them(tmp_path):
    columns = {
        "a": [{"b": i, "c": [i]} for i in range(10)],
        "a.b": range(100, 110),
        "a.b.c": ["x" * 100] * 10,
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    rows = {name: ParquetDataset(tmp_path, columns=[name])[3] for name in ("a", "a.b", "a.b.c")}
    assert rows == {
        "a": {"a": {"b": 3, "c": [3]}},
        "a.b": {"a.b": 103},
        "a.b.c": {"a.b.c": "x" * 100},
    }
    parts = [int(ParquetSource(tmp_path, [name]).list_blocks().nbytes.sum()) for name in columns]
    assert sum(parts) == ParquetSource(tmp_path).list_blocks().nbytes.sum()
    assert min(parts) > 0


def test_rows_by_slices_and_by_numpys_integers(parquet_folder):
    dataset = ParquetDataset(parquet_folder, columns=["id"])
    assert dataset[3:6] == [{"id": 3}, {"id": 4}, {"id": 5}]
    assert dataset[-2:] == [dataset[np.int64(235)], dataset[-1]]
    assert dataset[500:] == []
    with pytest.raises(TypeError, match="'float'"):
        dataset[1.5]


def test_numpys_integers_are_as_good(parquet_folder):
    rank, world, most, seed = np.array([1, 2, 100, 7])
    dataset = ParquetDataset(
        parquet_folder, rank=rank, world_size=world, max_samples=most, seed=seed, shuffle=True
    )
    dataset.set_epoch(np.int64(3))
    loader = DataLoader(dataset, np.int64(8), prefetch=np.int64(1))
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    assert (state["taken"], state["rank"], state["epoch"], state["seed"]) == (8, 1, 3, 7)


# -- travel --------------------------------------------------------------------------------------


def test_a_pickled_dataset_is_small_and_opens_again(parquet_folder):
    dataset = ParquetDataset(parquet_folder, shuffle=True, seed=1, rank=1, world_size=2)
    expected = [row["id"] for row in dataset]
    dataset.set_epoch(0)
    data = pickle.dumps(dataset)
    assert len(data) < 2000
    assert [row["id"] for row in pickle.loads(data)] == expected


def test_thousands_of_files_pickle_small(tmp_path):
    content = write_parquet(tmp_path / "x", range(3)).read_bytes()
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(3000):
        (folder / f"part-{number:05}-of-03000.parquet").write_bytes(content)
    files = sorted(map(str, folder.iterdir()))
    for chosen in (folder, files, files[::2]):
        dataset = ParquetDataset(chosen, columns=["id"])
        data = pickle.dumps(dataset)
        assert len(data) < 10_000
        assert pickle.loads(data).sources[0].files == dataset.sources[0].files


def test_a_dataset_works_on_in_a_forked_child(parquet_folder):
    dataset = ParquetDataset(parquet_folder)
    assert dataset[0]["id"] == 0  # open in the parent
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = [dataset[i]["id"] for i in range(0, 237, 50)]
            os.write(writes, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        assert json.load(pipe) == [0, 50, 100, 150, 200]
    os.waitpid(pid, 0)
    assert dataset[236]["id"] == 236


def test_files_that_change_between_pickling_and_use_are_noticed(parquet_folder, raises):
    data = pickle.dumps(ParquetDataset(parquet_folder))
    write_parquet(parquet_folder / "part-3.parquet", range(153, 236))
    with raises(DataError):
        len(pickle.loads(data))


# -- where files are -----------------------------------------------------------------------------


def test_globs_folders_lists_and_hidden_files(parquet_folder):
    (parquet_folder / ".hidden.parquet").write_bytes(b"not parquet")
    (parquet_folder / "sub").mkdir()
    write_parquet(parquet_folder / "sub" / "z.parquet", range(237, 240))
    assert len(ParquetDataset(parquet_folder)) == 240
    assert len(ParquetDataset(str(parquet_folder / "*.parquet"))) == 237
    assert len(ParquetDataset(str(parquet_folder / "**" / "*.parquet"))) == 240
    two = [parquet_folder / "part-3.parquet", parquet_folder / "part-0.parquet"]
    assert ParquetDataset(two)[0]["id"] == 153  # as given


def test_folders_behind_links_are_looked_into_once(parquet_folder, tmp_path):
    top = tmp_path / "top"
    (top / "real").mkdir(parents=True)
    write_parquet(top / "real" / "x.parquet", range(237, 240))
    (top / "linked").symlink_to(parquet_folder)
    (top / "real" / "circle").symlink_to(top)
    assert sorted(row["id"] for row in ParquetDataset(top)) == list(range(240))


def test_fsspec_addresses(parquet_folder):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for path in sorted(parquet_folder.iterdir()):
        memory.pipe(f"/miniray-test/{path.name}", path.read_bytes())
    try:
        for address in ["memory://miniray-test", "memory://miniray-test/part-*.parquet"]:
            dataset = ParquetDataset(address, shuffle=True, seed=1)
            assert sorted(row["id"] for row in dataset) == list(range(237))
    finally:
        memory.rm("/miniray-test", recursive=True)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("nowhere.parquet", "nowhere.parquet"),
        ("no-*.parquet", None),
        ([], None),
        (".", "."),
    ],
)
def test_files_that_are_not_there(spec, name, tmp_path, monkeypatch, raises):
    file = "" if name is None else str(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    with raises(DataError) as caught:
        ParquetDataset(spec)
    assert caught.value.file == file


# -- files that are wrong ------------------------------------------------------------------------


def test_a_truncated_file_is_named_when_the_dataset_is_made(parquet_folder):
    path = parquet_folder / "part-2.parquet"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match="truncated") as caught:
        ParquetDataset(parquet_folder)
    assert caught.value.file == str(path)


def test_a_file_of_no_bytes_is_named(parquet_folder, raises):
    (parquet_folder / "part-9.parquet").write_bytes(b"")
    with raises(DataError):
        ParquetDataset(parquet_folder)


def test_something_else_is_named(parquet_folder):
    (parquet_folder / "part-9.parquet").write_text("id,data\n1,x\n" * 10)
    with pytest.raises(DataError) as caught:
        ParquetDataset(parquet_folder)
    assert caught.value.file == str(parquet_folder / "part-9.parquet")


def test_damage_within_a_row_group_is_named_when_it_is_read(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", range(2000), rows=1000, payload=100)
    meta = pq.read_metadata(path)
    start = meta.row_group(1).column(1).data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    dataset = ParquetDataset(path)
    assert dataset[999]["id"] == 999
    with pytest.raises(DataError) as caught:
        dataset[1000]
    assert (caught.value.file, caught.value.row) == (str(path), 1000)


def test_mixed_schemas_are_named(parquet_folder, raises):
    write_parquet(parquet_folder / "part-9.parquet", range(5), extra=[1] * 5)
    with raises(DataError):
        ParquetDataset(parquet_folder)
    assert len(ParquetDataset(parquet_folder, columns=["id"])) == 242
    pq.write_table(pa.table({"id": ["a"], "data": [b""]}), parquet_folder / "part-9.parquet")
    with raises(DataError):
        ParquetDataset(parquet_folder)


_TEXT = ["a", None, "b"]
_IMAGE = [{"bytes": b"1", "path": "p"}] * 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array(_TEXT), pa.nulls(3)),
        (pa.nulls(3), pa.array(_TEXT)),
        (pa.array(_TEXT), pa.array(_TEXT, pa.large_string())),
        (pa.array(_TEXT), pa.array(_TEXT).dictionary_encode()),
        (pa.array(_TEXT).dictionary_encode(), pa.array(_TEXT, pa.dictionary(pa.int8(), "string"))),
        (pa.array(_IMAGE), pa.array([{"bytes": b"1", "path": None}] * 3)),
        (pa.array([[1], [], None]), pa.array([[1], None, []], pa.large_list(pa.int64()))),
        (pa.array([[]] * 3, pa.list_(pa.null())), pa.array([_IMAGE, [], None])),
        (
            pa.array([[1, 2]] * 3, pa.list_(pa.float32(), 2)),
            pa.array([[1, 2]] * 3, pa.list_(pa.field("x", pa.float32(), nullable=False), 2)),
        ),
        (pa.array([1, None, 2], pa.int32()), pa.nulls(3)),
    ],
    ids=lambda array: str(array.type),
)
def test_writers_that_keep_a_column_differently_go_together(tmp_path, one, other):
    pq.write_table(pa.table({"x": one}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": other}), tmp_path / "b.parquet")
    dataset = ParquetDataset(tmp_path)
    assert [row["x"] for row in dataset] == one.to_pylist() + other.to_pylist()
    # A batch has the same type whichever file its rows are of.
    batches = [next(iter(DataLoader(dataset.shard(r, 3), 2))) for r in range(3)]
    assert len({(type(b["x"]), getattr(b["x"], "dtype", None)) for b in batches}) == 1
    tables = list(DataLoader(dataset.shard(0, 1), 2, format="arrow"))
    assert len({table.schema for table in tables}) == 1
    assert [v for t in tables for v in t["x"].to_pylist()] == one.to_pylist() + other.to_pylist()


def test_a_filter_may_look_at_other_columns_than_those_that_are_read(tmp_path):
    pq.write_table(pa.table({"x": _TEXT, "id": [0, 1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.nulls(3), "id": [3, 4, 5]}), tmp_path / "b.parquet")
    odd = {"filter": lambda row: row["id"] % 2, "filter_columns": ["id"]}
    assert list(ParquetDataset(tmp_path, columns=["x"], **odd)) == [{"x": None}] * 3


def test_columns_in_another_order_or_never_missing(tmp_path):
    """A batch across the border of two such files has the types of all others."""
    ids, weights = pa.array(range(3), pa.int32()), pa.array([None, 0.5, 1], pa.float32())
    pq.write_table(pa.table({"id": ids, "w": weights}), tmp_path / "a.parquet")
    required = pa.schema([("w", pa.float32()), pa.field("id", pa.int32(), nullable=False)])
    pq.write_table(pa.table([weights, ids], schema=required), tmp_path / "b.parquet")
    batches = list(DataLoader(ParquetDataset(tmp_path), 2))
    assert [list(batch) for batch in batches] == [["id", "w"]] * 3
    assert {(b["id"].dtype.name, b["w"].dtype.name) for b in batches} == {("int32", "float32")}
    tables = list(DataLoader(ParquetDataset(tmp_path), 2, format="arrow"))
    assert [t["id"].to_pylist() for t in tables] == [[0, 1], [2, 0], [1, 2]]


def test_two_columns_of_one_name_are_named(tmp_path, raises):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["x", "x", "y"])
    pq.write_table(table, tmp_path / "a.parquet")
    with raises(DataError):
        ParquetDataset(tmp_path)
    assert list(ParquetDataset(tmp_path, columns=["y"])) == [{"y": 3}]


def test_a_missing_column_is_named(parquet_folder, raises):
    with raises(DataError):
        ParquetDataset(parquet_folder, columns=["id", "image"])
    with raises(DataError):
        ParquetDataset(parquet_folder, group_by="who")


def test_a_file_deleted_in_mid_epoch_is_named(parquet_folder, raises):
    loader = DataLoader(ParquetDataset(parquet_folder, memory_budget="8KB"), 5, prefetch=1)
    iterator = iter(loader)
    seen = next(iterator)["id"].tolist()
    (parquet_folder / "part-3.parquet").unlink()
    with raises(DataError):
        for batch in iterator:
            seen += batch["id"].tolist()
    assert seen == list(range(len(seen)))  # what came before it was delivered, in order
    assert len(seen) >= 100


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_crash(parquet_folder):
    dataset = ParquetDataset(parquet_folder)
    assert dataset[153]["id"] == 153
    os.truncate(parquet_folder / "part-3.parquet", 100)
    with pytest.raises(DataError) as caught:
        dataset[236]
    assert caught.value.file == str(parquet_folder / "part-3.parquet")


def test_a_file_replaced_before_it_is_opened_is_an_error(parquet_folder, raises):
    """With the metadata of the old file, rows of the new one would be wrong."""
    dataset = ParquetDataset(parquet_folder)
    write_parquet(parquet_folder / "new", range(500, 600))
    os.replace(parquet_folder / "new", parquet_folder / "part-3.parquet")
    assert dataset[152]["id"] == 152
    with raises(DataError):
        dataset[153]


def same_size(path, ids, other_ids):
    """A file of ``ids``, and the content of one of ``other_ids`` of as many bytes and rows."""
    content = write_parquet(path, other_ids, compression="none").read_bytes()
    path.unlink()
    write_parquet(path, ids, compression="none")
    assert len(content) == path.stat().st_size
    return content


def remote(path):
    return f"local://{path}"  # for fsspec, with the system's own files behind it


@pytest.mark.parametrize("way", [str, remote])
@pytest.mark.parametrize("in_place", [True, False])
def test_another_file_of_the_same_size_is_noticed(tmp_path, way, in_place):
    """Before it is opened, after pickling and in a state: its rows are not those it had."""
    path = tmp_path / "x.parquet"
    content = same_size(path, range(100, 150), range(200, 250))
    dataset = ParquetDataset(way(path))
    pickled, state = pickle.dumps(dataset), dataset.state_dict()
    if in_place:
        path.write_bytes(content)
    else:
        (tmp_path / "new").write_bytes(content)
        os.replace(tmp_path / "new", path)
    with pytest.raises(DataError, match=r"x\.parquet"):
        dataset[0]
    with pytest.raises(DataError):
        len(pickle.loads(pickled))
    with pytest.raises(DataError, match="fingerprint"):
        ParquetDataset(way(path)).load_state_dict(state)


def test_another_file_written_over_one_that_is_open_is_noticed(tmp_path):
    path = tmp_path / "x.parquet"
    content = same_size(path, range(100, 150), range(200, 250))
    source = ParquetDataset(path).sources[0]
    assert source.read_block(0).column("id")[0].as_py() == 100
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.parquet"):
        source.read_block(1)


@pytest.mark.parametrize("way", [str, remote])
def test_a_copy_is_as_good_as_the_file(tmp_path, way):
    path, copy = tmp_path / "a" / "x.parquet", tmp_path / "b" / "x.parquet"
    for folder in (path.parent, copy.parent):
        folder.mkdir()
    write_parquet(path, range(50))
    dataset = ParquetDataset(way(path))
    loader = DataLoader(dataset, 5)
    assert next(iter(loader))["id"].tolist() == [0, 1, 2, 3, 4]
    copy.write_bytes(path.read_bytes())
    os.utime(copy, (1, 1))
    elsewhere = DataLoader(ParquetDataset(way(copy)), 5)
    elsewhere.load_state_dict(loader.state_dict())
    assert next(iter(elsewhere))["id"].tolist() == [5, 6, 7, 8, 9]
    pickled = pickle.dumps(dataset)
    os.replace(copy, path)  # another inode and time: for one before, for one while it is read
    assert pickle.loads(pickled)[7]["id"] == 7
    assert [row["id"] for row in dataset] == list(range(50))


def test_the_footer_of_a_remote_file_is_read_once_to_open_it(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "x.parquet", range(50))
    footer = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[-8:-4], "little")
    reads = []
    system = fsspec.filesystem("memory")
    system.pipe("/data/x.parquet", path.read_bytes())
    handle = type(system.open("/data/x.parquet"))
    monkeypatch.setattr(
        handle,
        "read",
        lambda self, n=-1: reads.append((self.tell(), n)) or io.BytesIO.read(self, n),
    )
    dataset = ParquetDataset("memory://data/x.parquet")
    assert len(reads) == 1
    assert dataset[49]["id"] == 49
    assert sum(at + n > footer for at, n in reads) == 2  # once when it was made, once to read rows


def encrypted(path, **options):
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):
        def wrap_key(self, key, master):
            return base64.b64encode(key)

        def unwrap_key(self, wrapped, master):
            return base64.b64decode(wrapped)

    properties = encryption.CryptoFactory(lambda _: Keys()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(
            "footer", column_keys={"key": ["secret"]}, double_wrapping=False, **options
        ),
    )
    table = pa.table({"id": range(50), "secret": [str(i) for i in range(50)]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=10)
    return path


def test_encrypted_columns_are_refused_and_others_are_read(tmp_path):
    """Arrow ends the process when it is asked for more than the name of such a column."""
    path = encrypted(tmp_path / "x.parquet", plaintext_footer=True)
    with pytest.raises(DataError, match=r"x\.parquet.*secret.*columns=\["):
        ParquetDataset(path)
    assert [row["id"] for row in ParquetDataset(path, columns=["id"])] == list(range(50))
    path = encrypted(tmp_path / "y.parquet", plaintext_footer=False)
    with pytest.raises(DataError, match=r"y\.parquet.*encrypted"):
        ParquetDataset(path, columns=["id"])


def test_no_rows_at_all(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [])
    for shuffle in (False, True, "global"):
        dataset = ParquetDataset(path, shuffle=shuffle, seed=1, rank=1, world_size=2)
        assert (len(dataset), list(dataset), list(DataLoader(dataset, 4))) == (0, [], [])


def test_tables_are_not_files():
    pd = pytest.importorskip("pandas")
    for table in (pd.DataFrame({"a": [1]}), pa.table({"a": [1]}), {"a": [1]}):
        with pytest.raises(TypeError, match=r"ArrowDataset\(df\)"):
            ParquetDataset(table)


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 3, "world_size": 3},
        {"shuffle": "some"},
        {"memory_budget": "lots"},
        {"memory_budget": 0},
        {"even": "odd"},
        {"max_samples": -7},
        {"max_samples": 7.0},
        {"rank": "0"},
        {"seed": "x"},
        {"filter": "id > 3"},
        {"filter_workers": 0},
        {"filter_columns": "id"},
        {"columns": "id"},
        {"columns": []},
        {"group_by": "id", "even": "pad"},
        {"split": "interleaved"},
        {"cache": 1, "cache_dir": "x"},
        {"window_bytes": "wide"},
    ],
)
def test_bad_options_are_refused(parquet_folder, options, raises):
    with raises(ValueError):
        ParquetDataset(parquet_folder, **options)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256MB", 256_000_000), ("1.5 GiB", 3 << 29), ("10k", 10_000), (77, 77), ("5", 5)],
)
def test_budgets_in_words(text, expected):
    assert IndexedDataset([1], memory_budget=text).memory_budget == expected
