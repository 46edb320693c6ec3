"""JSON lines, Arrow files and tables, and anything with len and []."""

import functools
import gzip
import json
import operator
import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.data import ArrowDataset, DataLoader, IndexedDataset, JsonlDataset
from miniray.data.sources import jsonl
from miniray.errors import DataError, RowError


def ids(dataset):
    return [row["id"] for row in dataset]


# -- JSON lines ----------------------------------------------------------------------------------


@pytest.fixture
def lines(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "_BLOCK_BYTES", 200)
    for number, count in enumerate([40, 1, 33]):
        rows = [{"id": 100 * number + i, "text": "é" * (i % 50)} for i in range(count)]
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (tmp_path / f"{number}.jsonl").write_text(text + ("\n" if number != 1 else ""), "utf-8")
    return tmp_path


EXPECTED = [*range(40), 100, *range(200, 233)]


@pytest.mark.parametrize("shuffle", [False, "window", "global"])
def test_lines_are_rows(lines, shuffle):
    whole = JsonlDataset(lines, shuffle=shuffle, seed=1)
    assert len(whole.row_set.source.list_blocks()) > 10
    parts = [whole.shard(rank, 3) for rank in range(3)]
    assert sorted(functools.reduce(operator.iadd, map(ids, parts), [])) == EXPECTED
    assert pickle.loads(pickle.dumps(parts[1]))[0] == parts[1].shard(1, 3)[0]
    batch = next(iter(DataLoader(whole, 5)))
    assert batch["id"].dtype == np.int64
    assert isinstance(batch["text"][0], str)


def test_ids_are_lines(lines):
    dataset = JsonlDataset(lines, columns=["id"])
    assert dataset.row_ids[41] == (str(lines / "2.jsonl"), 0)
    assert dataset[41] == {"id": 200}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=30),
    st.booleans(),
    st.sampled_from(["\n", "\n\n", "\r\n", "\r\n\r\n\n"]),
)
def test_lines_of_any_length_are_found(tmp_path_factory, sizes, ended, end):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes((end.join(json.dumps("x" * size) for size in sizes) + end * ended).encode())
    old, jsonl._BLOCK_BYTES = jsonl._BLOCK_BYTES, 100
    try:
        assert [len(text) for text in JsonlDataset(path)] == sizes
    finally:
        jsonl._BLOCK_BYTES = old


def test_a_line_that_is_not_json_is_named(lines):
    with open(lines / "1.jsonl", "a") as file:
        file.write("\n{broken\n")
    with pytest.raises(RowError, match=r"1\.jsonl.*\b2\b") as caught:
        ids(JsonlDataset(lines))
    assert caught.value.row == 1


def test_empty_lines_are_no_rows(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\n1\n\r\n\n2\r\n\n{broken\n\n")
    dataset = JsonlDataset(tmp_path)
    assert [dataset[0], dataset[1], len(dataset)] == [1, 2, 3]
    with pytest.raises(RowError, match=r"x\.jsonl.*\b7\b") as caught:
        dataset[2]
    assert caught.value.row == 2
    (tmp_path / "x.jsonl").write_bytes(b"\n\r")
    assert list(JsonlDataset(tmp_path)) == []


def test_other_faults_of_lines(lines, raises):
    with raises(RowError):
        JsonlDataset(lines, columns=["image"])[0]
    dataset = JsonlDataset(lines)
    (lines / "2.jsonl").write_text("{}\n")
    with raises(DataError):
        list(dataset)
    (lines / "2.jsonl").unlink()
    with pytest.raises(DataError, match=r"2\.jsonl"):
        list(dataset)
    (lines / "3.jsonl").write_bytes(b"")
    with raises(DataError):
        JsonlDataset(lines)
    (lines / "3.jsonl").write_bytes(gzip.compress(b"{}\n"))
    with raises(DataError):
        JsonlDataset(lines)


# -- Arrow ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file", "stream", "table"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrow_files_and_tables(tmp_path, form, shuffle):
    table = pa.table({"id": range(100), "data": [str(i).encode() for i in range(100)]})
    given = table
    if form != "table":
        make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
        given = tmp_path / "x.arrow"
        with make(str(given), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
    whole = ArrowDataset(given, shuffle=shuffle, seed=2)
    parts = [pickle.loads(pickle.dumps(whole)).shard(rank, 3) for rank in range(3)]
    assert sorted(functools.reduce(operator.iadd, map(ids, parts), [])) == list(range(100))
    assert ArrowDataset(given, columns=["data"])[7] == {"data": b"7"}
    for part in parts:
        part.set_epoch(0)
        for batch in DataLoader(part, 8):
            assert [str(i).encode() for i in batch["id"].tolist()] == batch["data"]


def test_tables_of_others(raises):
    columns = {"id": [4, 5, 6]}
    tables = [columns, pa.record_batch(columns), pa.table(columns).to_reader()]
    assert [ids(ArrowDataset(table)) for table in tables] == [[4, 5, 6]] * 3
    with raises(DataError):
        IndexedDataset(columns)
    with raises(DataError):
        list(DataLoader(IndexedDataset([1, 2]), 2, format="arrow"))


def test_faults_of_arrow_files(tmp_path, raises):
    (tmp_path / "x.arrow").write_bytes(b"")
    with raises(DataError):
        ArrowDataset(tmp_path)
    (tmp_path / "x.arrow").write_bytes(b"ARROW1\0\0 and nothing else")
    with pytest.raises(DataError, match=r"x\.arrow"):
        ArrowDataset(tmp_path)
    with pytest.raises(DataError, match="'b'"):
        ArrowDataset(pa.table({"a": [1]}), columns=["b"])


# -- anything ------------------------------------------------------------------------------------


def test_anything_with_len_and_brackets(raises):
    whole = IndexedDataset(np.arange(10_000) ** 2, shuffle=True, seed=1, name="squares")
    parts = [whole.shard(rank, 3) for rank in range(3)]
    values = sorted(int(value) for part in parts for value in part)
    assert values == [i * i for i in range(10_000)]
    assert parts[0].row_ids[0][0] == "squares"
    assert whole.state_dict()["order"] == ["global"]
    with raises(DataError):
        IndexedDataset(5)


def test_arrow_files_that_do_not_belong_together_are_named(tmp_path, raises):
    def write(name, **columns):
        table = pa.table(columns)
        with pa.ipc.new_file(tmp_path / name, table.schema) as file:
            file.write_table(table)

    write("a.arrow", id=[1, 2])
    write("b.arrow", id=pa.nulls(1))
    assert [row["id"] for row in ArrowDataset(tmp_path)] == [1, 2, None]
    write("b.arrow", id=["x"])
    with raises(DataError):
        ArrowDataset(tmp_path)
    write("b.arrow", id=[3], more=[0])
    with raises(DataError):
        ArrowDataset(tmp_path)
