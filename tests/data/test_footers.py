"""Metadata of many files: cached, validated by stat, and never wrong."""

import json
import os

import pytest

from miniray.data import ParquetDataset
from miniray.data.sources import footers
from miniray.data.sources.footers import FileMetadata, MetadataIndex
from miniray.data.sources.parquet import ParquetSource
from tests.data.conftest import write_parquet


@pytest.fixture
def many(tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(20):
        path = write_parquet(folder / f"{number:02}.parquet", range(number * 10, number * 10 + 10))
        os.utime(path, ns=(1, 1))
    return folder


@pytest.fixture(autouse=True)
def _settled(monkeypatch):
    monkeypatch.setattr(footers, "_RACY_NS", -(10**12))  # files of the tests have just been written


@pytest.fixture
def reads(monkeypatch):
    paths = []
    original = ParquetSource._read_footer
    monkeypatch.setattr(
        ParquetSource, "_read_footer", lambda self, path: paths.append(path) or original(self, path)
    )
    return paths


def test_footers_are_read_once(many, reads):
    first = ParquetDataset(many)
    assert len(reads) == 20
    reads.clear()
    second = ParquetDataset(many)
    assert reads == []
    assert second.fingerprint == first.fingerprint
    assert [row["id"] for row in second] == list(range(200))
    ParquetDataset(many, columns=["id"])  # estimates differ
    assert len(reads) == 20


def test_changed_file_is_read_again(many, reads):
    ParquetDataset(many)
    reads.clear()
    path = many / "07.parquet"
    content = write_parquet(many / "other", range(500, 510)).read_bytes()
    (many / "other").unlink()
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # only the change time differs
    ids = [row["id"] for row in ParquetDataset(many)]
    assert reads == [str(path)]
    assert ids[70:80] == list(range(500, 510))


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"null"])
def test_damaged_index_is_ignored(many, reads, tmp_path, damage):
    ParquetDataset(many)
    (path,) = (tmp_path / "cache" / "metadata").glob("*.json")
    path.write_bytes(damage)
    reads.clear()
    assert len(ParquetDataset(many)) == 200
    assert len(reads) == 20
    assert json.loads(path.read_bytes())["files"]


def test_file_that_was_just_written_has_no_entry(tmp_path, monkeypatch):
    """It could change again without a change of its times."""
    monkeypatch.setattr(footers, "_RACY_NS", 10**12)
    path = tmp_path / "x"
    path.write_text("1")
    index, calls = MetadataIndex(tmp_path / "index", min_files=1), []

    def read(name):
        calls.append(name)
        return FileMetadata([1], [2], "mark")

    for _ in range(2):
        assert index.load([str(path)], "key", read) == [FileMetadata([1], [2], "mark")]
    assert len(calls) == 2


def test_unwritable_directory_is_no_error(many, reads, monkeypatch):
    monkeypatch.setenv("MINIRAY_CACHE", "/proc/none")
    assert len(ParquetDataset(many)) == len(ParquetDataset(many)) == 200
    assert len(reads) == 40
