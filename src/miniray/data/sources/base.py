"""What a dataset reads from: rows in blocks, which is how disks and formats give them.

A block is what can be read on its own (a row group, a record batch, a run of lines). A source says
where its blocks are without reading them, and reads one, or part of one, on request.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from miniray.errors import DataError

_ROUND = 1 << 16
_POPULATE_WRITE = 23  # all pages in one call, at half the cost; mmap has no name for it yet
_HUGE = 1 << 21
_WASTE = 1.25  # a free slab is used for a request if it is at most this much too large


@dataclass(frozen=True)
class Blocks:
    """Where the rows of a source are; one entry a block, in the order of the data."""

    files: Sequence[str]
    file: Sequence[int]  # which file, as an index into ``files``
    number: Sequence[int]  # which block within its file
    first: Sequence[int]  # its first row within the file
    rows: Sequence[int]
    nbytes: Sequence[int]  # in memory, of the columns that are read

    def __len__(self) -> int:
        return len(self.rows)

    def fingerprint(self, extra: Sequence[Any] = ()) -> str:
        """Changes when rows are added, removed or moved; not when the folder is."""
        digest = hashlib.blake2b(digest_size=8)
        for name in self.files:
            digest.update(name.replace("\\", "/").rsplit("/", 1)[-1].encode() + b"\0")
        digest.update(array("q", self.file).tobytes() + array("q", self.rows).tobytes())
        digest.update(repr(list(extra)).encode())
        return digest.hexdigest()


#: From a row, or within a list from an entry, to a value.
Getter = Callable[[int], Any]

#: Names of columns and their types, as Arrow names them.
Layout = tuple[tuple[str, str], ...]


class Rows(ABC):
    """Rows of one block in memory. ``start`` is the block's row that is row 0 here."""

    start: int
    nbytes: int
    #: None where rows may be any Python objects.
    layout: Layout | None = None

    @abstractmethod
    def rows(self, index: Sequence[int]) -> list[Any]:
        """Rows at ``index`` as Python objects, usually dicts."""

    def getter(self, name: str) -> Getter:
        """A function from a row to its value in a column of the layout."""
        return lambda row: self.rows([row])[0][name]

    def numbers(self, name: str, index: Sequence[int]) -> Any:
        """An array of a column's numbers where that is quicker and none is missing; or None."""
        return None

    def arrow(self, index: Sequence[int]) -> Any:
        """Rows at ``index`` as an Arrow table."""
        import pyarrow as pa

        rows = self.rows(index)
        if not all(isinstance(row, Mapping) for row in rows):
            raise DataError("format='arrow' makes tables of rows that are dicts; these are none")
        return pa.Table.from_pylist(rows)


class Slabs:
    """Memory for blocks that is given back at once, or used again while it is warm.

    Arrow's memory pools keep what is freed, in pieces that fit nothing, and end at twice the memory
    in use. So what Arrow decodes is copied, a chunk at a time, into slabs of our own that are
    counted. ``budget`` limits what free slabs may add to those in use.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._free: list[mmap.mmap] = []
        self._total = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> mmap.mmap:
        with self._lock:
            fitting = [
                slab for slab in self._free if size <= len(slab) <= max(size * _WASTE, _ROUND)
            ]
            if fitting:
                best = min(fitting, key=len)
                self._free = [slab for slab in self._free if slab is not best]
                return best
            size = -(-size // _ROUND) * _ROUND
            while self._free and self._total + size > self._budget:
                self._total -= len(self._free.pop(0))
            self._total += size
        # Private: a forked child gets a copy, not a share.
        slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            if size >= _HUGE:  # first touch of large pages costs a fifth
                slab.madvise(mmap.MADV_HUGEPAGE)
            slab.madvise(_POPULATE_WRITE)
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or before 5.14: then pages come one by one as they are written
        return slab

    def give(self, slab: mmap.mmap) -> None:
        with self._lock:
            if self._total > self._budget:
                self._total -= len(slab)  # and the system has it back when the caller lets go
            else:
                self._free.append(slab)


class Source(ABC):
    """Something with blocks. Cheap to make, picklable, opened when needed and again in a fork."""

    #: Names the kind in states and messages.
    kind: str

    #: Whether any row can be read at the cost of one row; then a global shuffle costs nothing.
    random_access = False

    @property
    @abstractmethod
    def blocks(self) -> Blocks:
        """Where the rows are; looked up once in a process. Raises ``DataError`` for bad files."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Identifies the data in states; the same wherever the files lie."""

    @abstractmethod
    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> Rows:
        """Rows ``start`` to ``stop`` of a block, or more; ``columns`` instead of the usual ones.

        The memory may be taken from ``slabs``; then it is given back when the rows are dropped.

        Raises ``DataError`` with file and block where that fails. May be called by several threads.
        """

    @abstractmethod
    def column_names(self) -> list[str] | None:
        """Names of what ``read`` gives, or None where only reading can tell."""

    def identity(self, file: int) -> str:
        """Names a file in what is cached about it."""
        return f"{self.fingerprint}-{file}"

    @property
    def lasting(self) -> bool:
        """Whether ``identity`` changes whenever the content may have: not that of objects."""
        return False

    def folder(self, file: int) -> str | None:
        """The folder a file lies in, if it is one of this machine."""
        return None


def parse_bytes(value: Any) -> int:
    """A budget: ``"256MB"``, ``"1.5 GiB"`` or a number as bytes. KB, MB, GB are powers of 1000."""
    if isinstance(value, str):
        text = value.strip().lower().removesuffix("b")
        binary = text.endswith("i")
        text = text.removesuffix("i").strip()
        power = "kmgt".find(text[-1:]) + 1 if text else 0
        try:
            amount = float(text[:-1] if power else text) * (1024 if binary else 1000) ** power
        except ValueError:
            raise ValueError(
                f"memory_budget={value!r} is no number of bytes; try '256MB'"
            ) from None
    elif isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"memory_budget must be bytes or text like '256MB', not {value!r}")
    else:
        amount = float(value)
    if not 1 <= amount < 2**62:
        raise ValueError(f"memory_budget={value!r} is no usable number of bytes")
    return int(amount)


def struct_getter(fields: Sequence[tuple[str, Getter]]) -> Getter:
    """The values of fields as a dict."""
    if len(fields) == 2:  # images and chat messages are this
        (a, get_a), (b, get_b) = fields
        return lambda i: {a: get_a(i), b: get_b(i)}
    return lambda i: {name: get(i) for name, get in fields}


def column_list(name: str, columns: Iterable[str] | None) -> list[str] | None:
    """The names of columns as a list; a single name, and none at all, are refused."""
    if isinstance(columns, (str, bytes)):
        raise ValueError(f"{name} must be a list of names: [{columns!r}]")
    found = None if columns is None else list(columns)
    if found == []:
        raise ValueError(f"{name}=[] names no column; leave it out for all")
    return found


def wanted(names: Sequence[str], columns: Sequence[str] | None, where: str) -> list[str]:
    """``columns``, or all; a missing one is refused with those there are."""
    if columns is None:
        return list(names)
    missing = [name for name in columns if name not in names]
    if missing:
        raise DataError(f"{where} has no column {missing[0]!r}; it has {', '.join(names)}")
    return list(columns)
