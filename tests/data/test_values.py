"""Values cut from Arrow's buffers are those Arrow itself gives, for every type and slice."""

import datetime
import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data.arrow_rows import ArrowRows, rows_of
from miniray.data.loader.columns import from_parts
from miniray.data.sources.base import Slabs

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


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_arrow(name, copied):
    kind, values = TYPES[name]

    @settings(max_examples=12, deadline=None)
    @given(st.lists(optional | values, max_size=40), st.integers(0, 9), st.integers(1, 20))
    def check(items, skip, chunk):
        array = pa.array(items, kind)
        batches = pa.table({name: array}).slice(skip).to_batches(max_chunksize=chunk)
        rows = rows_of(batches, 0, Slabs(1 << 20) if copied else None)
        expected = array.slice(skip).to_pylist()
        assert rows.num_rows == len(expected)
        backwards = range(len(expected))[::-1]
        assert [row[name] for row in rows.rows(backwards)] == expected[::-1]

    check()


def column(array, index, parts=1):
    batches = pa.table({"x": array}).to_batches(max_chunksize=max(1, -(-len(array) // parts)))
    rows = ArrowRows(batches, 0)
    return from_parts([(rows, index, range(len(index)))], rows.layout)["x"]


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


def test_what_is_made_shares_no_memory_with_the_slab():
    slabs = Slabs(1 << 20)
    batch = pa.table({"n": [1, 2, 3], "b": [b"one", b"two", b"three"]}).to_batches()[0]
    rows = rows_of([batch], 0, slabs)
    found = from_parts([(rows, range(3), range(3))], rows.layout)
    del rows
    (slab,) = slabs._free
    slab[:] = b"\xff" * len(slab)
    assert found["n"].tolist() == [1, 2, 3]
    assert found["b"] == [b"one", b"two", b"three"]
    assert slabs.take(100) is slab  # and is used again
