"""Find and name open handles in a dataset, but not objects that can be pickled."""

import functools
import io
import socket
import sqlite3
import threading
import types

import numpy as np
import pytest

from miniray.doctor.handles import Handle, check_handles, find_handles
from miniray.errors import HandlesError


class Dataset:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def paths(dataset):
    return {handle.path: handle.forks for handle in find_handles(dataset)}


def test_handles_are_found_wherever_they_are(tmp_path):
    (tmp_path / "rows").write_text("1\n")
    with open(tmp_path / "rows") as file, socket.socket() as sock:
        connection = sqlite3.connect(":memory:")

        def transform(x):
            return x, file.read()

        dataset = Dataset(
            file=file,
            parts=[Dataset(path="x"), Dataset(sock=sock)],
            cache={"db": connection},
            transform=transform,
            collate=functools.partial(print, file=file),
        )
        assert paths(dataset) == {
            "dataset.file": False,
            "dataset.parts[1].sock": False,
            "dataset.cache['db']": False,
        }  # the others lead to the same file
        assert paths(Dataset(transform=transform)) == {
            "dataset.transform<file of transform>": False
        }
        assert paths(Dataset(call=functools.partial(print, file=file))) == {
            "dataset.call.keywords['file']": False
        }
        with pytest.raises(HandlesError, match=r"dataset\.file\b.*rows"):
            check_handles(dataset, num_workers=2)
        check_handles(dataset, num_workers=0)  # nothing leaves this process
        connection.close()
    assert paths(Dataset(file=file)) == {}  # closed


def test_what_survives_a_fork_but_no_pickling_is_told_apart(tmp_path):
    mapped = np.memmap(tmp_path / "data", dtype=np.float32, mode="w+", shape=(8,))
    dataset = Dataset(mapped=mapped, lock=threading.Lock(), items=(i for i in range(3)))
    assert paths(dataset) == {"dataset.mapped": True, "dataset.lock": True, "dataset.items": True}
    check_handles(dataset, num_workers=2)
    with pytest.raises(HandlesError, match=r"dataset\.mapped .*memmap.*\b32\b"):
        check_handles(dataset, num_workers=1, start_method="spawn")


def test_plain_data_is_let_be(tmp_path, check_message):
    class Slotted:
        __slots__ = ("missing", "rows")

        def __init__(self):
            self.rows = [1, 2]

    ring = Dataset(buffer=io.BytesIO(b"x"), array=np.zeros(3), slotted=Slotted(), f=lambda x: x)
    ring.itself = ring
    copied = np.memmap(tmp_path / "data", dtype=np.int8, mode="w+", shape=(4,)) + 1
    ring.copied = copied
    assert find_handles(ring) == []
    check_message(str(Handle("dataset.x", "an open file")))


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [("h5py", "HLObject", "an open HDF5 object"), ("lmdb", "Environment", "an open LMDB")],
)
def test_libraries_are_known_by_type(monkeypatch, module, name, words):
    """They need not be installed: a stand-in with the same names is looked up the same way."""
    kind = type(name, (), {})
    monkeypatch.setitem(__import__("sys").modules, module, types.SimpleNamespace(**{name: kind}))
    (found,) = find_handles(Dataset(file=kind()))
    assert found.path == "dataset.file"
    assert words in found.what


def test_a_parquet_file_is_found(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"x": [1, 2]})
    parquet.write_table(table, tmp_path / "x.parquet")
    dataset = Dataset(file=parquet.ParquetFile(tmp_path / "x.parquet"), table=table)
    assert paths(dataset) == {"dataset.file": False}
