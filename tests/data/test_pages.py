"""Large values are taken from where they lie in the file, and rows are as Arrow gives them."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from miniray.data import DataLoader, ParquetDataset
from miniray.data.arrow_rows import ArrowRows
from miniray.data.sources.parquet import ParquetSource
from miniray.errors import DataError

ROWS = 50
_rng = random.Random(0)
IMAGES = [_rng.randbytes(_rng.randrange(3_000, 9_000)) for _ in range(ROWS)]
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def image(i: int) -> dict[str, Any]:
    return {"bytes": IMAGES[i], "path": None if i % 3 else f"{i}.jpg"}


def write(path: Path, column: pa.Array, **options: Any) -> list[dict[str, Any]]:
    table = pa.table(
        {"id": range(ROWS), "image": column, "text": [f"row {i}" for i in range(ROWS)]}
    )
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "row_group_size": 20}
    pq.write_table(table, path, **{**plain, **options})
    return table.to_pylist()


def read(path: Path, block: int = 0) -> ArrowRows:
    return ParquetSource(path).read(block, 0, 20)


def left_in_file(path: Path) -> bool:
    """Whether a block takes far less memory than its images."""
    return read(path).nbytes < 20_000


BINARY = pa.array(IMAGES, pa.binary())
STRUCTS = pa.array([image(i) for i in range(ROWS)], IMAGE)
LISTS = pa.array([[image(i)] for i in range(ROWS)], pa.list_(IMAGE))
SOME_EMPTY = pa.array([[image(i)] * (i % 3) for i in range(ROWS)], pa.list_(IMAGE))
SOME_NULL = pa.array([None if i == 7 else image(i) for i in range(ROWS)], IMAGE)
NO_BYTES = pa.array([{"bytes": None if i == 7 else b"x" * 8000} for i in range(ROWS)], IMAGE)
ALONE = pa.array([[IMAGES[i], IMAGES[-i]] for i in range(ROWS)], pa.list_(pa.binary()))
TEXT = pa.array(["long " * 2000] * ROWS)


@pytest.mark.parametrize(
    ("column", "options", "direct"),
    [
        pytest.param(BINARY, {}, True, id="bytes"),
        pytest.param(BINARY.cast(pa.large_binary()), {}, True, id="large bytes"),
        pytest.param(STRUCTS, {}, True, id="structs"),
        pytest.param(LISTS, {}, True, id="lists of structs"),
        pytest.param(LISTS, {"data_page_version": "2.0"}, True, id="pages of version 2"),
        pytest.param(LISTS, {"data_page_size": 10_000, "write_batch_size": 4}, True, id="pages"),
        pytest.param(SOME_EMPTY, {}, True, id="lists of several and none"),
        pytest.param(SOME_NULL, {}, True, id="missing structs"),
        pytest.param(NO_BYTES, {}, True, id="missing values"),
        pytest.param(ALONE, {}, True, id="lists of bytes"),
        pytest.param(TEXT, {}, True, id="text"),
        pytest.param(BINARY, {"use_dictionary": ["text"]}, True, id="bytes, and Arrow"),
        pytest.param(LISTS, {"use_dictionary": ["text"]}, True, id="lists of structs, and Arrow"),
        pytest.param(SOME_EMPTY, {"use_dictionary": ["id"]}, True, id="several, none, and Arrow"),
        pytest.param(SOME_NULL, {"use_dictionary": ["id"]}, True, id="missing, and Arrow"),
        pytest.param(LISTS, {"use_dictionary": ["image.list.element.path"]}, False, id="a field"),
        pytest.param(LISTS, {"compression": "snappy"}, False, id="compressed"),
        pytest.param(LISTS, {"use_dictionary": True}, False, id="dictionary"),
    ],
)
def test_rows_are_as_arrow_gives_them(tmp_path, column, options, direct):
    path = tmp_path / "rows.parquet"
    expected = write(path, column, **options)
    assert left_in_file(path) == direct
    dataset = ParquetDataset(path, shuffle=True, seed=3)
    assert sorted(dataset, key=lambda row: row["id"]) == expected
    [table] = DataLoader(ParquetDataset(path), ROWS, format="arrow")
    assert table.to_pylist() == expected
    assert table.schema.equals(pq.read_schema(path))


def test_columns_are_chosen_as_ever(tmp_path):
    path = tmp_path / "rows.parquet"
    expected = write(path, LISTS)
    for columns in (["image"], ["id"], ["text", "image"]):
        rows = list(ParquetDataset(path, columns=columns))
        assert rows == [{name: row[name] for name in columns} for row in expected]
    write(path, BINARY)
    assert [row["image"] for row in ParquetDataset(path, columns=["image"])] == IMAGES


def test_a_row_group_larger_than_the_budget_is_read_in_slices(tmp_path):
    path = tmp_path / "rows.parquet"
    expected = write(path, LISTS, row_group_size=ROWS)
    loader = DataLoader(ParquetDataset(path, memory_budget="100KB"), 8, prefetch=1)
    found = [number for batch in loader for number in batch["id"].tolist()]
    assert found == list(range(ROWS))
    shuffled = ParquetDataset(path, memory_budget="100KB", shuffle=True, seed=1)
    assert sorted(shuffled, key=lambda row: row["id"]) == expected


def test_a_file_cut_off_after_its_block_was_read_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    write(path, LISTS)
    rows = read(path)
    assert rows.rows(range(2))[1]["image"] == [image(1)]
    os.truncate(path, 5_000)
    with pytest.raises(DataError, match=r"rows\.parquet: the file has changed its size"):
        rows.rows(range(2))


def test_a_damaged_length_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    write(path, BINARY)
    data = bytearray(path.read_bytes())
    at = data.index(IMAGES[5])
    data[at - 4 : at] = (2_000_000).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rows\.parquet, row group 0 cannot be read"):
        read(path)


def test_pages_that_were_read_do_not_stay_in_memory(tmp_path):
    path = tmp_path / "rows.parquet"
    images = pa.array([_rng.randbytes(1 << 20) for _ in range(ROWS)], pa.binary())
    write(path, images, row_group_size=ROWS)
    rows = read(path)
    for i in range(ROWS):
        assert rows.rows([i])[0]["image"] == images[i].as_py()
    kept, name = 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line[0] in "0123456789abcdef" and "-" in line.split()[0]:
            name = line
        elif line.startswith("Rss:") and name.endswith(str(path)):
            kept += int(line.split()[1]) * 1024
    assert kept <= 6 << 20
