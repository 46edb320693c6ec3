"""Rows and columns that are gathered from record batches, for every type and slice."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import DataLoader, IndexedDataset, Mixture, ParquetDataset
from miniray.data.loader.blocks import BlockBuffer
from miniray.data.loader.columns import to_columns, to_rows
from miniray.data.locations import Locations
from miniray.data.sources.arrow import ArrowSource
from miniray.errors import RowError

MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
optional = st.none()

TYPES = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint8": (pa.uint8(), st.integers(0, 255)),
    "float32": (pa.float32(), st.floats(width=32, allow_nan=False)),
    "float16": (pa.float16(), st.sampled_from([np.float16(0.5), np.float16(-2)])),
    "bool": (pa.bool_(), st.booleans()),
    "binary": (pa.binary(), st.binary(max_size=5)),
    "large_binary": (pa.large_binary(), st.binary(max_size=5)),
    "string": (pa.string(), st.text(max_size=4)),
    "large_string": (pa.large_string(), st.text(max_size=4)),
    "null": (pa.null(), st.none()),
    "tokens": (pa.list_(pa.int32()), st.lists(st.integers(0, 9), max_size=4)),
    "flags": (pa.list_(pa.bool_()), st.lists(st.booleans() | optional, max_size=3)),
    "large_list": (
        pa.large_list(pa.string()),
        st.lists(st.text(max_size=2) | optional, max_size=3),
    ),
    "vector": (pa.list_(pa.float64(), 2), st.lists(st.integers(0, 9), min_size=2, max_size=2)),
    "prompt": (
        pa.list_(MESSAGE),
        st.lists(
            st.fixed_dictionaries({"role": st.text(max_size=2), "content": st.text(max_size=2)}),
            max_size=3,
        ),
    ),
    "images": (
        pa.list_(IMAGE),
        st.lists(
            st.fixed_dictionaries({"bytes": st.binary(max_size=3), "path": optional | st.text()})
            | optional,
            max_size=3,
        ),
    ),
    "empty_struct": (pa.struct([]), st.just({})),
    "one_field": (pa.struct([("style", pa.int8())]), st.fixed_dictionaries({"style": optional})),
    "words": (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "bb"])),
    "date": (pa.date32(), st.just(datetime.date(2024, 2, 29))),
    "time": (pa.timestamp("us"), st.just(datetime.datetime(2024, 2, 29, 1))),
    "decimal": (pa.decimal128(5, 2), st.just(decimal.Decimal("1.25"))),
    "map": (pa.map_(pa.string(), pa.int8()), st.just([("a", 1)])),
}


def gather(array, index, parts=1):
    """Gather rows of a table of several record batches by their index."""
    rows = max(1, -(-len(array) // parts))
    batches = pa.table({"x": array}).to_batches(max_chunksize=rows)
    source = ArrowSource(pa.Table.from_batches(batches, pa.schema({"x": array.type})))
    index = np.array(index, dtype=np.int64)
    edges = source.list_blocks().edges
    blocks = np.searchsorted(edges, index, side="right") - 1
    locations = Locations.from_columns(0, blocks, index - edges[blocks])
    return BlockBuffer([source], 1 << 20).gather(locations)


def name_row(index):
    return "file", index


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_those_of_arrow(name):
    kind, values = TYPES[name]

    @settings(max_examples=12, deadline=None)
    @given(st.lists(optional | values, min_size=1, max_size=40), st.integers(1, 9))
    def check(items, parts):
        array = pa.array(items, kind)
        expected = array.to_pylist()
        for index in (range(len(expected)), range(len(expected))[::-1], range(0, len(expected), 3)):
            found = [row["x"] for row in to_rows(gather(array, index, parts), name_row)]
            assert found == [expected[i] for i in index]

    check()


def column(array, index, parts=1):
    return to_columns(gather(array, index, parts), name_row)["x"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint8(), pa.float32(), pa.bool_()])
@pytest.mark.parametrize("rows", [3, 60])  # few are fetched one by one, many by numpy
def test_numbers_make_numpy_arrays_of_their_type(kind, rows):
    array = pa.array([i % 2 for i in range(rows)], pa.int8()).cast(kind)
    found = column(array, range(rows)[::-1], parts=3)
    assert found.dtype == np.dtype(kind.to_pandas_dtype())
    assert found.tolist() == [i % 2 for i in range(rows)][::-1]


@pytest.mark.parametrize("rows", [3, 60])
def test_missing_numbers_are_nan(rows):
    values = [None if i % 3 == 1 else i for i in range(rows)]
    for kind, expected in [(pa.int32(), np.float64), (pa.float32(), np.float32)]:
        found = column(pa.array(values, kind), range(rows))
        assert found.dtype == expected
        assert np.isnan(found).tolist() == [value is None for value in values]
        assert found[0] == 0


def test_numbers_that_no_float_holds_stay_what_they_are_beside_missing_ones():
    values = [2**53 + 1, None, 3]
    assert column(pa.array(values), range(3)) == values
    assert column(pa.array([2**53, None]), range(2))[0] == 2**53


def test_vectors_make_an_array_of_two_dimensions():
    found = column(pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2)), [2, 0])
    assert found.dtype == np.float32
    assert found.tolist() == [[5, 6], [1, 2]]


def test_columns_share_no_memory_with_blocks():
    array = pa.array([1, 2, 3])
    found = gather(array, [0, 1, 2])
    numbers = to_columns(found, name_row)["x"]
    assert numbers.flags.writeable
    assert found.column(0).buffers()[1].address != array.buffers()[1].address
    numbers[:] = 0
    assert array.to_pylist() == found.column(0).to_pylist() == [1, 2, 3]


INTEGERS = IndexedDataset([{"day": i} for i in range(60)])


@pytest.mark.parametrize(
    "read",
    [
        lambda path: list(ParquetDataset(path)),
        lambda path: ParquetDataset(path)[41],
        lambda path: list(DataLoader(ParquetDataset(path), 8)),
        lambda path: list(DataLoader(ParquetDataset(path), 8, transform=dict)),
        lambda path: list(
            DataLoader(ParquetDataset(path), 8, batch_by="tokens", length=lambda row: 1)
        ),
        lambda path: ParquetDataset(path, filter=lambda row: True).prepare(),
        lambda path: list(DataLoader(Mixture([(ParquetDataset(path), 1), (INTEGERS, 1)]), 8)),
    ],
    ids=["rows", "row", "columns", "transform", "tokens", "filter", "mixture"],
)
def test_date_that_python_cannot_hold_is_an_error_with_its_row(tmp_path, monkeypatch, read):
    monkeypatch.setenv("MINIRAY_CACHE", str(tmp_path / "cache"))
    days = pa.array([2**30 if i == 41 else i for i in range(60)], pa.int32())
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"day": days.cast(pa.date32())}), path, row_group_size=25)
    with pytest.raises(RowError) as caught:
        read(path)
    assert (caught.value.file, caught.value.row) == (str(path), 41)
    assert type(caught.value.__cause__) is OverflowError
