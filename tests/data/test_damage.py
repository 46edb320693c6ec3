"""Damaged and truncated files raise ``DataError`` with file and row and never end the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniray.data import ArrowDataset, DataLoader, ParquetDataset
from miniray.errors import DataError
from tests.data import damage_script

ROWS = 60
TABLE = pa.table(
    {
        "id": pa.array(range(ROWS), pa.int64()),
        "text": [f"<{i:03d}>" for i in range(ROWS)],
        "kind": pa.array([f"k{i % 3}" for i in range(ROWS)]).dictionary_encode(),
        "images": [[{"bytes": b"x" * i, "path": None}] * (i % 3) for i in range(ROWS)],
    }
)


def write(folder, form):
    """Write ``TABLE`` in blocks of 20 rows."""
    path = folder / f"x.{'parquet' if form.endswith('parquet') else 'arrow'}"
    if form == "parquet":
        pq.write_table(TABLE, path, row_group_size=20)
    elif form == "plain parquet":
        pq.write_table(TABLE, path, row_group_size=20, compression="none", use_dictionary=False)
    else:
        options = pa.ipc.IpcWriteOptions(compression="zstd" if form == "compressed" else None)
        create = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with create(path, TABLE.schema, options=options) as writer:
            writer.write_table(TABLE, 20)
    return path


def read_damaged(path, way, number):
    """Return what happened for each damaged copy of the file."""
    command = [sys.executable, damage_script.__file__, str(path), way, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"copy {last}: exit code {done.returncode}, {done.stderr[-2000:]}"
    return [line.split(" ", 1)[1] for line in done.stdout.splitlines()]


@pytest.mark.parametrize("form", ["file", "stream", "compressed", "parquet", "plain parquet"])
def test_random_damage_is_a_data_error_with_the_file(tmp_path, form):
    found = read_damaged(write(tmp_path, form), "random", 120)
    assert len(found) == 120
    assert set(found) == {"DataError True", f"rows {ROWS}"}


def test_random_damage_of_json_lines_is_a_data_error_with_the_file(tmp_path):
    """Damaged line ends change the number of rows."""
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": "é" * i}) + "\n" for i in range(ROWS)))
    found = read_damaged(path, "random", 120)
    assert len(found) == 120
    assert "DataError True" in found
    assert all(line == "DataError True" or line.startswith("rows ") for line in found)


def test_damaged_footer_of_parquet_is_a_data_error_with_the_file(tmp_path):
    """Arrow ends the process when it is asked for damaged metadata of a column."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"]}), path, store_schema=False)
    found = read_damaged(path, "footer", 1)
    assert "DataError True" in found
    assert not any(line.endswith("False") for line in found)


@pytest.mark.parametrize("name", [b"path\xff", b"bytes"])
@pytest.mark.parametrize("form", ["file", "stream", "parquet"])
def test_damaged_name_of_nested_field_is_an_error_with_its_file(tmp_path, form, name):
    """Rows couldn't become dicts: the name isn't text, or two fields have it."""
    table = pa.table({"images": [{"bytes": 1, "pathx": 2}]})
    path = tmp_path / f"x.{form}"
    if form == "parquet":
        pq.write_table(table, path, store_schema=False)
    else:
        create = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with create(path, table.schema) as writer:
            writer.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"pathx", name))
    with pytest.raises(DataError) as caught:
        list((ParquetDataset if form == "parquet" else ArrowDataset)(path))
    assert caught.value.file == str(path)


@pytest.mark.parametrize("form", ["file", "stream", "plain parquet"])
def test_damaged_text_is_an_error_with_its_row(tmp_path, form):
    path = write(tmp_path, form)
    path.write_bytes(path.read_bytes().replace(b"<037>", b"<0\xff7>"))
    with pytest.raises(DataError) as caught:
        list((ParquetDataset if "parquet" in form else ArrowDataset)(path))
    assert (caught.value.file, caught.value.row) == (str(path), 37)


def test_damaged_large_text_is_an_error_with_its_file(tmp_path):
    path = tmp_path / "x.parquet"
    table = pa.table({"text": [f"<{i:03d}>" * 2000 for i in range(20)]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    path.write_bytes(path.read_bytes().replace(b"<007><007>", b"<0\xff7><007>"))
    with pytest.raises(DataError) as caught:
        list(ParquetDataset(path))
    assert caught.value.file == str(path)


def test_stream_with_bytes_after_its_end_is_a_data_error(tmp_path):
    """A damaged message can look like the end, and the other rows would be missing."""
    path = write(tmp_path, "stream")
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(DataError) as caught:
        ArrowDataset(path)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("form", ["file", "stream"])
def test_file_that_shrinks_during_an_epoch_is_a_data_error(tmp_path, form):
    script = f"""
import os, sys
from miniray.data import ArrowDataset, DataLoader
from miniray.errors import DataError
loader = DataLoader(ArrowDataset({str(tmp_path)!r}, memory_budget="3MB"), 10, prefetch=0)
batches = iter(loader)
assert next(batches)["id"][0] == 0
os.truncate(sys.argv[1], 5000)
try:
    list(batches)
except DataError as error:
    print(error.file == sys.argv[1])
"""
    path = tmp_path / "x.arrow"
    table = pa.table({"id": range(40), "data": [bytes(100_000)] * 40})
    with (pa.ipc.new_stream if form == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, 10)
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_file_replaced_during_an_epoch_is_a_data_error(tmp_path, form):
    path = write(tmp_path, form)
    batches = iter(DataLoader(ArrowDataset(path, memory_budget="5KB"), 10, prefetch=0))
    next(batches)
    other = tmp_path / "other"
    other.write_bytes(path.read_bytes().replace(b"<037>", b"<O37>"))
    os.replace(other, path)
    with pytest.raises(DataError) as caught:
        list(batches)
    assert caught.value.file == str(path)


@pytest.mark.parametrize("form", ["file", "stream", "compressed"])
def test_parts_of_large_record_batches(tmp_path, form, monkeypatch):
    """Record batches larger than a block are read in parts, and columns are selected."""
    monkeypatch.setattr("miniray.data.sources.files.BLOCK_BYTES", 100)
    path = write(tmp_path, form)
    dataset = ArrowDataset(path, columns=["kind", "id"])
    assert list(dataset) == TABLE.select(["kind", "id"]).to_pylist()
    assert [dataset[i]["id"] for i in (59, 0, 25)] == [59, 0, 25]
    assert Path(path).stat().st_size > 1000
