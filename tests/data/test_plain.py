"""Files read without Arrow give what Arrow gives, whatever is missing in them, or are its own."""

from __future__ import annotations

import contextlib
import io
import random
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniray.data import DataLoader, ParquetDataset
from miniray.data.footer import Footer, read_footer
from miniray.data.layout import columns_of_schema
from miniray.data.plain import PlainFile, PlainRows
from miniray.data.plan import permutation
from miniray.data.sources.parquet import ParquetSource
from miniray.data.thrift import read_struct
from miniray.errors import DataError

LARGE = random.Random(0).randbytes(40_000)
PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False}

leaves = st.sampled_from(
    [
        (pa.int32(), st.integers(-(2**31), 2**31 - 1)),
        (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
        (pa.float32(), st.floats(width=32, allow_nan=False)),
        (pa.float64(), st.floats(allow_nan=False)),
        (pa.bool_(), st.booleans()),
        (pa.binary(), st.binary(max_size=9)),
        (pa.large_binary(), st.binary(max_size=9)),
        (pa.string(), st.text(max_size=5)),
        (pa.large_string(), st.text(max_size=5)),
    ]
)


def some(values, nullable):
    return st.none() | values if nullable else values


def in_list(kind_and_values, nullable):
    kind, values = kind_and_values
    field = pa.field("element", kind, nullable)
    return pa.list_(field), st.lists(some(values, nullable), max_size=3)


def in_struct(a, b, nullable):
    kind = pa.struct([pa.field("a", a[0], nullable), pa.field("b", b[0])])
    return kind, st.fixed_dictionaries({"a": some(a[1], nullable), "b": some(b[1], True)})


flat = leaves | st.builds(in_struct, leaves, leaves, st.booleans())
listed = st.builds(in_list, flat, st.booleans())
kinds = flat | listed | st.builds(in_struct, listed, flat | listed, st.booleans())


@st.composite
def tables(draw):
    count = draw(st.integers(1, 40))
    columns = {"image": pa.array([LARGE[i : i + 20_000 + i] for i in range(count)], pa.binary())}
    fields = [pa.field("image", pa.binary(), draw(st.booleans()))]
    for name in "xyz"[: draw(st.integers(1, 3))]:
        kind, values = draw(kinds)
        nullable = draw(st.booleans())
        given_ = draw(st.lists(some(values, nullable), min_size=count, max_size=count))
        columns[name] = pa.array(given_, kind)
        fields.append(pa.field(name, kind, nullable))
    return pa.table(columns, schema=pa.schema(fields))


options = st.fixed_dictionaries(
    {
        "row_group_size": st.integers(1, 50),
        "data_page_size": st.sampled_from([1, 100, 1 << 20]),
        "write_batch_size": st.integers(1, 50),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "store_schema": st.booleans(),
        "write_statistics": st.booleans(),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tables(), options)
def test_rows_are_arrows_rows(tmp_path_factory, table, options):
    path = tmp_path_factory.mktemp("plain") / "x.parquet"
    if "bool" in str(table.schema):
        options["data_page_version"] = "1.0"  # of others Arrow itself cannot read all
    pq.write_table(table, path, **PLAIN, **options)
    source = ParquetSource(path)
    blocks = source.blocks
    found: list[Any] = []
    for block, rows in enumerate(blocks.rows):
        read = source.read(block, 0, rows)
        assert isinstance(read, PlainRows)
        found += read.rows(range(rows))
    written = pq.read_table(path)
    assert found == written.to_pylist()
    assert read.layout == tuple((field.name, str(field.type)) for field in written.schema)
    [batch] = DataLoader(ParquetDataset(path), table.num_rows, format="arrow", prefetch=0)
    assert batch.equals(written.combine_chunks())
    by_arrow = without_plain(path)
    assert (source.fingerprint, source.identity(0)) == (by_arrow.fingerprint, by_arrow.identity(0))
    assert list(blocks.nbytes) == list(by_arrow.blocks.nbytes)


def without_plain(path):
    source = ParquetSource(path)
    source._look_plainly = list
    assert source.blocks.files
    return source


@pytest.mark.parametrize("others", [False, ["i", "f", "t"]], ids=["plain", "some by Arrow"])
def test_columns_of_a_batch_are_those_of_arrow(tmp_path, monkeypatch, others):
    path = tmp_path / "x.parquet"
    count = 30
    table = pa.table(
        {
            "image": [LARGE[:8000]] * count,
            "i": pa.array(range(count), pa.int32()),
            "some": pa.array([None, 1, 2] * 10, pa.int64()),
            "f": pa.array([None, 1.5, 2.5] * 10, pa.float32()),
            "b": pa.array([True, False, None] * 10),
            "t": ["x"] * count,
            "l": [[1, 2]] * count,
        }
    )
    pq.write_table(table, path, **{**PLAIN, "use_dictionary": others}, row_group_size=7)
    [ours] = DataLoader(ParquetDataset(path), count, prefetch=0)
    monkeypatch.setattr("miniray.data.sources.parquet._plain_footer", lambda *_: None)
    [arrows] = DataLoader(ParquetDataset(path), count, prefetch=0)
    assert list(ours) == list(arrows)
    for name, column in arrows.items():
        assert type(ours[name]) is type(column)
        if isinstance(column, np.ndarray):
            assert ours[name].dtype == column.dtype
        np.testing.assert_array_equal(ours[name], column)


TYPES = [
    *(pa.int64(), pa.int32(), pa.int16(), pa.uint8(), pa.uint32(), pa.uint64(), pa.float16()),
    *(pa.bool_(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary()),
    *(pa.large_binary(), pa.binary(3), pa.date32(), pa.timestamp("us"), pa.duration("s")),
    *(pa.time32("ms"), pa.decimal128(5, 2), pa.null(), pa.dictionary(pa.int8(), pa.string())),
    *(pa.list_(pa.int64()), pa.list_(pa.list_(pa.int32())), pa.list_(pa.float32(), 3)),
    *(pa.large_list(pa.int32()), pa.map_(pa.string(), pa.int8()), pa.string_view()),
    pa.struct([("a", pa.int64()), ("l", pa.list_(pa.string()))]),
    pa.list_(pa.struct([("bytes", pa.binary()), pa.field("p", pa.string(), nullable=False)])),
]
KNOWN = {"int64", "int32", "bool", "float", "double", "string", "binary", "list", "struct"}


@pytest.mark.parametrize("kept", [True, False], ids=["Arrow's schema", "parquet's only"])
def test_types_are_arrows_or_unknown(kept):
    schema = pa.schema([pa.field(f"c{number}", kind) for number, kind in enumerate(TYPES)])
    file = io.BytesIO()
    pq.write_table(schema.empty_table(), file, store_schema=kept)
    data = file.getvalue()
    meta, end = read_struct(data[:-8], len(data) - 8 - int.from_bytes(data[-8:-4], "little"))
    assert end == len(data) - 8
    arrow = {entry[1]: entry[2] for entry in meta.get(5, ())}.get(b"ARROW:schema")
    known = columns_of_schema(meta[2], arrow)
    read = pq.read_schema(file)
    assert list(known) == read.names
    for field in read:
        node = known[field.name]
        if node is not None:
            assert node.type == str(field.type)
        elif not pa.types.is_nested(field.type):
            assert str(field.type) not in KNOWN
    assert sum(node is not None for node in known.values()) >= 11


def image_file(path: Path, **more: Any) -> Path:
    table = pa.table(
        {
            "image": [[{"bytes": LARGE[i : 9000 + i], "path": f"{i}.jpg"}] for i in range(20)],
            "id": range(20),
            "text": ["a", None] * 10,
        }
    )
    pq.write_table(table, path, **{**PLAIN, "row_group_size": 8, **more})
    return path


@pytest.mark.parametrize(
    "more",
    [
        {"compression": "zstd"},
        {"use_dictionary": True},
        {"use_dictionary": True, "dictionary_pagesize_limit": 10},  # falls back to plain pages
        {"use_dictionary": ["text"]},
        {"column_encoding": {"id": "DELTA_BINARY_PACKED"}},
        {"column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        {"use_byte_stream_split": ["id"]},
    ],
    ids=str,
)
def test_what_is_not_plain_is_left_to_arrow(tmp_path, more):
    path = image_file(tmp_path / "x.parquet", **more)
    footer = read_footer(str(path), None)
    assert footer is None or not footer.complete
    assert list(ParquetDataset(path)) == pq.read_table(path).to_pylist()
    assert (
        list(ParquetDataset(path, columns=["image"]))
        == pq.read_table(path, columns=["image"]).to_pylist()
    )


def test_files_with_small_rows_or_long_footers_are_left_to_arrow(tmp_path):
    small = tmp_path / "small.parquet"
    pq.write_table(pa.table({"id": range(100), "text": ["x" * 100] * 100}), small, **PLAIN)
    assert read_footer(str(small), None) is None
    large = image_file(tmp_path / "large.parquet")
    assert read_footer(str(large), None) is not None
    assert read_footer(str(large), ["id"]) is None
    assert read_footer(str(large), ["absent"]) is None
    assert read_footer(str(large), None, longest=100) is None


def test_other_columns_than_those_wanted_can_be_read(tmp_path):
    path = image_file(tmp_path / "x.parquet")
    source = ParquetSource(path, ["image", "id"])
    assert isinstance(source.read(0, 0, 8, ["id"]), PlainRows)
    assert source.read(0, 0, 8, ["text"]).rows([0, 1]) == [{"text": "a"}, {"text": None}]
    filtered = ParquetDataset(
        path, columns=["image"], filter=lambda row: row["text"] is None, filter_columns=["text"]
    )
    assert len(list(filtered)) == 10


def test_files_that_do_not_belong_together_are_named(tmp_path):
    image_file(tmp_path / "a.parquet")
    table = pa.table({"image": [LARGE], "id": ["one"], "text": ["x"]})
    pq.write_table(table, tmp_path / "b.parquet", **PLAIN)
    with pytest.raises(DataError, match=r"mixed schemas: column 'image' is list.*b\.parquet"):
        ParquetDataset(tmp_path)


def left_to_arrow(names: Any) -> Any:
    raise DataError(f"{names} are Arrow's to read")


def read_all(path: Path) -> Footer | None:
    footer = read_footer(str(path), None)
    if footer is not None:
        file = PlainFile(footer)
        for group, count in enumerate(footer.rows):
            rows = file.read(group, footer.names, False, left_to_arrow)
            if rows is not None:
                rows.rows(range(count))
    return footer


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damage_is_noticed_or_does_not_matter(tmp_path_factory, data):
    """A byte anywhere but within an image becomes another: no other error than ours, and an end."""
    path = image_file(tmp_path_factory.getbasetemp() / "damaged.parquet")
    content = bytearray(path.read_bytes())
    footer = read_footer(str(path), None)
    assert footer is not None
    start = data.draw(st.sampled_from([*_starts(footer), len(content) - 8 - footer.length]))
    at = min(len(content) - 1, start + data.draw(st.integers(0, footer.length)))
    content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(DataError, UnicodeDecodeError):
        read_all(path)


def _starts(footer: Footer) -> list[int]:
    return [chunk.start for chunks in footer.chunks for chunk in chunks.values()]


@pytest.mark.parametrize("left", [0, 3, 4, 11, 12, 300, -1, -9])
def test_a_file_cut_off_is_refused_by_arrow(tmp_path, left):
    path = image_file(tmp_path / "cut.parquet")
    data = path.read_bytes()
    path.write_bytes(data[:left])
    assert read_footer(str(path), None) is None
    with pytest.raises(DataError, match=r"cut\.parquet"):
        ParquetDataset(path)


def test_pages_that_are_not_what_the_footer_says_are_read_by_arrow(tmp_path, monkeypatch):
    path = image_file(tmp_path / "x.parquet")
    monkeypatch.setattr("miniray.data.plain.PlainFile.read", lambda *_: None)
    assert list(ParquetDataset(path)) == pq.read_table(path).to_pylist()


def test_a_batch_of_images_needs_neither_numpy_nor_arrow(tmp_path):
    path = image_file(tmp_path / "x.parquet")
    code = f"""
        import sys
        from miniray.data import DataLoader, ParquetDataset
        rows = ParquetDataset({str(path)!r}, columns=["image", "text"], shuffle=True, seed=1)
        loader = DataLoader(rows, 8)
        for batch in loader:
            assert all(image[0]["bytes"] for image in batch["image"])
        state = loader.state_dict()
        loader.load_state_dict(state)
        print([name for name in ("numpy", "pyarrow", "miniray.core") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@given(st.integers(0, 300), st.integers(0, 2**64 - 1))
def test_the_order_is_the_same_without_numpy(n, key):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "sys", SimpleNamespace(modules={}))
        alone = permutation._table(n, key)
    assert alone == permutation._table(n, key)
