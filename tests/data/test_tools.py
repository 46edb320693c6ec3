"""``miniray data``: inspect, repack and cache."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from miniray.cli import cli
from miniray.data import ParquetDataset, RowCache
from miniray.data.sources.parquet import ParquetSource
from miniray.data.tools.inspection import inspect_files
from miniray.data.tools.repack import repack_files
from miniray.errors import DataError
from tests.data.conftest import write_parquet
from tests.data.test_parquet import encrypted


def run(*args):
    result = CliRunner().invoke(cli, ["data", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_inspect_describes_files_and_orders(parquet_folder):
    report = json.loads(run("inspect", parquet_folder, "--ranks", 4, "--json"))
    files = report["files"]
    assert [(f["rows"], f["row_groups"]) for f in files] == [(100, 10), (0, 1), (53, 6), (84, 9)]
    assert {f["compression"] for f in files if f["rows"]} == {"snappy"}
    assert all(f["writer"].startswith("parquet-cpp") for f in files)
    by_order = {order["order"]: order for order in report["orders"]}
    assert list(by_order) == ["False", '"window"', '"global"']
    assert by_order['"global"']["cache_bytes"] == sum(f["decoded_bytes"] for f in files)
    assert not report["is_cached"]
    held = RowCache().open(ParquetSource(parquet_folder))
    assert inspect_files(parquet_folder).is_cached
    assert "part-3.parquet" in run("inspect", parquet_folder)
    del held


def test_inspect_doesnt_look_at_columns_that_are_encrypted(tmp_path):
    """Arrow ends the process when it is asked for more than the name of such a column."""
    path = encrypted(tmp_path / "x.parquet", plaintext_footer=True)
    (file,) = inspect_files(path, ["id"]).files
    assert (file.rows, file.compression) == (50, "snappy")


def test_inspect_advises_about_one_row_group_and_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr("miniray.data.tools.inspection.BLOCK_BYTES", 1000)
    monkeypatch.setattr("miniray.data.tools.inspection._SMALL_FILES", 2)
    one = write_parquet(tmp_path / "one.parquet", range(200), rows=200)
    (advice,) = inspect_files(one).advice
    assert "shuffle='global'" in advice
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(3):
        write_parquet(folder / f"{number}.parquet", range(2))
    assert len(inspect_files(folder, world_size=9).advice) == 2


def test_repack_preserves_rows_and_schema(tmp_path, monkeypatch):
    monkeypatch.setattr("miniray.data.tools.repack.BLOCK_BYTES", 2000)
    folder = tmp_path / "in"
    folder.mkdir()
    schema = pa.schema(
        [
            pa.field("id", pa.int32(), nullable=False),
            ("word", pa.dictionary(pa.int32(), pa.string())),
            ("chat", pa.list_(pa.struct([("role", pa.string())]))),
        ],
        metadata={"origin": "test"},
    )
    rows = [
        {"id": i, "word": "ab"[i % 2], "chat": [{"role": "user"}] * (i % 3)} for i in range(500)
    ]
    for number in range(10):
        table = pa.Table.from_pylist(rows[number * 50 : number * 50 + 50], schema)
        pq.write_table(table, folder / f"{number}.parquet")
    written = repack_files(folder, tmp_path / "out", file_bytes=5000)
    assert 1 < len(written) < 10
    assert list(ParquetDataset(tmp_path / "out")) == list(ParquetDataset(folder)) == rows
    for path in written:
        assert pq.read_schema(path).remove_metadata() == schema.remove_metadata()
        assert pq.read_schema(path).metadata[b"origin"] == b"test"
    assert "Wrote 1 files" in run("repack", folder, tmp_path / "once")
    assert list(ParquetDataset(tmp_path / "once")) == rows


def test_repacked_row_groups_have_at_most_8_mb(tmp_path):
    """Blocks of the input are a little smaller, so that two of them would have almost 16 MB."""
    path = tmp_path / "x.parquet"
    random = np.random.default_rng(0)
    pq.write_table(pa.table({"data": [random.bytes(10_000) for _ in range(2500)]}), path)
    (written,) = repack_files(path, tmp_path / "out")
    metadata = pq.read_metadata(written)
    rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(rows) == 2500
    assert 3 <= len(rows) <= 5
    assert max(rows) * 10_000 <= 8_000_000


def test_repack_writes_only_to_an_empty_directory(parquet_folder, raises):
    with raises(DataError):
        repack_files(parquet_folder, parquet_folder)


def test_interrupted_repack_leaves_no_file(parquet_folder, tmp_path, monkeypatch):
    original = ParquetSource.read_block

    def read_block(self, block, columns=None):
        if block == 20:
            raise KeyboardInterrupt
        return original(self, block, columns)

    monkeypatch.setattr(ParquetSource, "read_block", read_block)
    monkeypatch.setattr("miniray.data.tools.repack.BLOCK_BYTES", 100)
    with pytest.raises(KeyboardInterrupt):
        repack_files(parquet_folder, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_cache_lists_and_clears(parquet_folder):
    held = RowCache().open(ParquetSource(parquet_folder))
    RowCache().open(ParquetSource(parquet_folder, ["id"]))
    entries = json.loads(run("cache", "--json"))
    assert sorted(entry["is_in_use"] for entry in entries) == [False, True]
    assert "Deleted 1 copies" in run("cache", "--clear")
    assert "Found 1 copies" in run("cache")
    assert held.list_blocks().total_rows == 237
