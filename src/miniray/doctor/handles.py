"""Open files, sockets and the like inside a dataset, found before a loader forks its workers.

A forked worker shares the parent's file offset, socket or library state: reads come back mixed up,
deadlock or crash, and nothing says why. A spawned worker cannot be given them at all. So they are
looked for first, by type along every attribute, and then by trying to pickle what is left.

Nothing is changed, read or closed. Libraries that are not loaded stay so: no object of theirs can
be there.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import mmap
import pickle
import socket
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from miniray.errors import HandlesError

__all__ = ["Handle", "HandlesError", "check_handles", "find_handles"]

_MOST_OBJECTS = 200_000
_DEEPEST = 12
_MOST_ITEMS = 1000  # of one container: lists of a million names are not walked to their end
_MOST_BYTES = 16 << 20  # pickling is given up here: what got so far is no handle

#: Module, names in it, what to call them. Looked up only where the module is loaded.
_TYPES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("h5py", ("HLObject",), "an open HDF5 object"),
    ("lmdb", ("Environment", "Transaction", "Cursor"), "an open LMDB environment"),
    ("pyarrow.parquet", ("ParquetFile",), "an open parquet file"),
    ("pyarrow", ("NativeFile",), "an open Arrow file"),
    ("sqlite3", ("Connection", "Cursor"), "an SQLite connection"),
    ("zipfile", ("ZipFile",), "an open zip file"),
    ("tarfile", ("TarFile",), "an open tar file"),
    ("multiprocessing.connection", ("Connection", "Listener"), "a pipe to another process"),
    ("threading", ("Thread",), "a thread, which a forked worker does not have"),
    ("concurrent.futures", ("Executor",), "a pool, whose threads a forked worker does not have"),
    ("subprocess", ("Popen",), "a running program"),
)
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, types.ModuleType)


@dataclasses.dataclass(frozen=True)
class Handle:
    """One thing that does not survive the way into a loader's worker.

    Attributes:
        path: how to get to it, as ``dataset.files[0]._file``.
        what: in words, with its type.
        forks: False where it breaks in a forked worker; True where only a spawned one cannot have
            it.
    """

    path: str
    what: str
    forks: bool = False

    def __str__(self) -> str:
        return f"{self.path} is {self.what}"


def find_handles(root: Any, name: str = "dataset") -> list[Handle]:
    """All handles below ``root``, outermost first; empty where it may go to other processes."""
    found: list[Handle] = []
    suspects: list[tuple[str, Any]] = []
    for path, value in _walk(root, name):
        what = describe_handle(value) or _describe_mapping(value)
        if what is not None:
            found.append(Handle(path, what, forks=describe_handle(value) is None))
        elif _is_opaque(value):
            suspects.append((path, value))
    for path, value in suspects:
        problem = _pickling_problem(value)
        if problem is not None:
            kind = type(value)
            what = f"a {kind.__module__}.{kind.__qualname__} that cannot be pickled ({problem})"
            found.append(Handle(path, what, forks=True))
    return found


def check_handles(
    root: Any, name: str = "dataset", *, num_workers: int = 1, start_method: str = "fork"
) -> None:
    """Raise ``HandlesError`` if a loader with ``num_workers`` processes must not be given ``root``.

    With ``num_workers=0`` nothing leaves this process, and nothing is looked at.
    """
    if num_workers == 0:
        return
    found = [h for h in find_handles(root, name) if not h.forks or start_method != "fork"]
    if found:
        listed = "\n".join(f"  {handle}" for handle in found)
        raise HandlesError(
            f"{name} ({type(root).__qualname__}) cannot be shared with {num_workers} loader "
            f"process{'' if num_workers == 1 else 'es'}:\n{listed}\n"
            "Open it where it is used: in __getitem__, on first use in each process, or in the "
            "loader's worker_init_fn. Or load in this process: DataLoader(..., num_workers=0)."
        )


def describe_handle(value: Any) -> str | None:
    """What ``value`` is if it is a handle that a forked worker must not have, else None."""
    if isinstance(value, io.IOBase):
        if isinstance(value, (io.BytesIO, io.StringIO)) or value.closed:
            return None
        return f"an open file ({getattr(value, 'name', type(value).__name__)!r})"
    if isinstance(value, socket.socket):
        return None if value.fileno() < 0 else "an open socket"
    for module, names, words in _TYPES:
        loaded = sys.modules.get(module)
        kinds = tuple(k for n in names if isinstance(k := getattr(loaded, n, None), type))
        if kinds and isinstance(value, kinds):
            return f"{words} ({type(value).__qualname__})"
    return None


def _describe_mapping(value: Any) -> str | None:
    """Memory-mapped files: forked workers read the same pages, spawned ones cannot."""
    if isinstance(value, mmap.mmap):
        return None if value.closed else "a memory-mapped file"
    memmap = getattr(sys.modules.get("numpy"), "memmap", None)
    if memmap is not None and isinstance(value, memmap) and _is_mapped(value):
        return f"a numpy.memmap of {value.nbytes:,} bytes, which pickling would copy whole"
    return None


def _is_mapped(array: Any) -> bool:
    """Whether this memmap still lies over a file; arithmetic makes memmaps that do not."""
    while array is not None:
        if isinstance(array, mmap.mmap):
            return True
        array = getattr(array, "base", None)
    return False


def _walk(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every object below ``root`` with the path to it, breadth first, each once."""
    seen = {id(root)}
    level: list[tuple[str, Any]] = [(name, root)]
    for _ in range(_DEEPEST):
        following: list[tuple[str, Any]] = []
        for path, value in level:
            yield path, value
            if describe_handle(value) is not None:
                continue  # what is inside of a handle goes with it
            for step, child in _children(value):
                if id(child) in seen or isinstance(child, _LEAVES):
                    continue
                if len(seen) >= _MOST_OBJECTS:
                    return
                seen.add(id(child))
                following.append((path + step, child))
        level = following


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for _, (key, item) in zip(range(_MOST_ITEMS), value.items(), strict=False):
            yield f"[{key!r}]", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for i, item in zip(range(_MOST_ITEMS), value, strict=False):
            yield f"[{i}]", item
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        names = value.__code__.co_freevars
        for free, cell in zip(names, value.__closure__ or (), strict=True):
            try:
                yield f"<{free} of {value.__name__}>", cell.cell_contents
            except ValueError:  # not filled yet
                continue
    if _is_array(value):
        return
    for key, item in list(getattr(value, "__dict__", {}).items()):
        if isinstance(key, str):
            yield f".{key}", item
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__") and hasattr(value, slot):
                yield f".{slot}", getattr(value, slot)


def _is_array(value: Any) -> bool:
    """Arrays and tensors are data: their insides are no attributes of the dataset."""
    return type(value).__module__.partition(".")[0] in ("numpy", "torch") and hasattr(
        value, "dtype"
    )


def _is_opaque(value: Any) -> bool:
    """Whether only pickling can tell: an object of C code, with no attributes to look into."""
    if isinstance(value, (*_LEAVES, Mapping, list, tuple, set, frozenset)) or _is_array(value):
        return False
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return False
    return not hasattr(value, "__dict__") and not hasattr(type(value), "__slots__")


class _LimitError(Exception):
    """As much was pickled as one wants to see."""


class _Sink:
    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        if self.size > _MOST_BYTES:
            raise _LimitError
        return len(data)


def _pickling_problem(value: Any) -> str | None:
    try:
        pickle.Pickler(_Sink(), protocol=5).dump(value)
    except _LimitError:
        return None
    except Exception as error:  # whatever a __reduce__ raises
        return str(error) or type(error).__name__
    return None
