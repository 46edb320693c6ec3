"""A file of which pieces are read, and a parquet file's footer read without Arrow.

Arrow's import takes longer than all else at a start. The footer is read here only of files whose
rows are large, mostly of columns that are stored plainly; and only where everything is as it should
be. Any other file is None here, and then Arrow's to read or to refuse.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from miniray.data.layout import BYTE_ARRAY, Node, UnknownError, columns_of_schema, leaves_of
from miniray.data.thrift import DAMAGED, Some, read_struct
from miniray.errors import DataError

#: Values of fewer bytes on average are held in memory; those of more are left in the file.
SMALLEST = 4096
#: Bytes of footers from which on Arrow has parsed them before we have, its import included.
LONGEST = 1 << 19

_MAGIC = b"PAR1"
_TAIL = 1 << 16  # bytes read at once: most footers are shorter
_PLAIN, _RLE = 0, 3


class Stamp(NamedTuple):
    """While this is the same, nobody has written to a file; where it is not, maybe nobody has."""

    size: int
    inode: int
    written: int
    changed: int


class ValueFile:
    """A local file of which pieces are read.

    Not through a map: pages that were touched there count as this process's memory, and one that is
    not there any more ends the process. Here that is a ``DataError``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.handle = -1
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)

    def read(self, start: int, size: int) -> bytes:
        found = os.pread(self.handle, size, start)
        if len(found) != size:
            raise has_changed(self.path)
        return found

    def stamp(self) -> Stamp:
        found = os.fstat(self.handle)
        return Stamp(found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)

    def will_need(self, start: int, size: int) -> None:
        """Let the system fetch this from the disk while we go on."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self.handle, start, size, os.POSIX_FADV_WILLNEED)


def has_changed(path: str, where: str = "") -> DataError:
    """Return the error for a file that was changed. ``where`` follows the path in the message."""
    return DataError(
        f"{path}{where}: the file has changed its size or content since the dataset was made; files"
        " of a run must not be written to",
        path,
    )


@dataclass(frozen=True)
class Chunk:
    """The values of one leaf in one row group."""

    start: int
    size: int
    values: int  # missing ones included
    type: int

    @property
    def large(self) -> bool:
        return self.type == BYTE_ARRAY and self.size >= SMALLEST * self.values


@dataclass(frozen=True)
class Footer:
    """What a file says of the columns that are wanted."""

    path: str
    stamp: Stamp  # of the file
    mark: str
    length: int  # of the footer
    names: Sequence[str]  # in the order of the file
    columns: Sequence[Node]  # those of them that are stored plainly; all others are Arrow's to read
    rows: Sequence[int]  # of row groups
    nbytes: Sequence[int]
    chunks: Sequence[dict[int, Chunk]]  # of row groups, by leaf

    @property
    def types(self) -> dict[str, str]:
        return {column.name: column.type for column in self.columns}

    @property
    def complete(self) -> bool:
        """Whether nothing is left to Arrow."""
        return len(self.columns) == len(self.names)


def read_footer(path: str, names: Sequence[str] | None, longest: int = LONGEST) -> Footer | None:
    """The footer of a local file of which ``names`` are wanted (or all); None: leave it to Arrow.

    Raises ``OSError`` for a file that cannot be read.
    """
    if sys.byteorder != "little":
        return None
    file = ValueFile(path)
    stamp = file.stamp()
    try:
        data = footer_bytes(file.read, stamp.size)
        if not 0 < len(data) <= longest or file.read(0, 4) != _MAGIC:
            return None
        return _footer(path, stamp, data, names)
    except (UnknownError, *DAMAGED):
        return None  # damaged, or of a form we do not know


def footer_bytes(read: Callable[[int, int], bytes], size: int) -> bytes:
    """The footer of a file of ``size`` bytes; none where the file does not end with one.

    ``read(start, size)`` reads from the file; once, if the footer is not a long one.
    """
    tail = read(max(0, size - _TAIL), min(size, _TAIL))
    length = int.from_bytes(tail[-8:-4], "little")
    if tail[-4:] != _MAGIC or length > size - 12:
        return b""
    if length + 8 > len(tail):
        tail = read(size - 8 - length, length + 8 - len(tail)) + tail
    return tail[-8 - length : -8]


def mark_of(footer: bytes, size: int) -> str:
    """Names a file's content by its footer, wherever the file lies and whenever it was written.

    Other rows have another footer, as that has every column chunk's place, size, least and largest
    value; unless all of these are the same, which nobody can tell without reading the file.
    """
    return f"{size}-{hashlib.blake2b(footer, digest_size=8).hexdigest()}"


def unchanged(file: ValueFile, stamp: Stamp, mark: str, where: str = "") -> Stamp:
    """The stamp of a file now; ``DataError`` if its footer is not that of ``mark`` any more.

    The footer is read only if the file has another stamp than it had.
    """
    now = file.stamp()
    if now != stamp and mark_of(footer_bytes(file.read, now.size), now.size) != mark:
        raise has_changed(file.path, where)
    return now


class ColumnChunk(NamedTuple):
    """Location and size of one leaf column in one row group."""

    start: int
    size: int
    decoded_size: int
    is_encrypted: bool


def read_chunks(footer: bytes) -> list[list[ColumnChunk]]:
    """Return the column chunks of each row group. Raise ``OSError`` for a damaged footer.

    Arrow's own accessor, ``RowGroupMetaData.column``, ends the process if the metadata of the
    column is damaged or encrypted.
    """
    try:
        wanted = {4: {1: {3: dict.fromkeys((6, 7, 9, 11)), 8: None}}}
        groups = read_struct(footer, 0, wanted, until=4)[0][4]
        return [[_chunk(described) for described in group[1]] for group in groups]
    except DAMAGED as error:
        raise OSError("the metadata of a column is damaged") from error


def _chunk(described: dict[int, Any]) -> ColumnChunk:
    if 8 in described:
        return ColumnChunk(0, 0, 0, True)
    column = described[3]
    # A dictionary, if there is one, comes before the data.
    return ColumnChunk(column.get(11) or column[9], column[7], column[6], False)


def _footer(path: str, stamp: Stamp, data: bytes, names: Sequence[str] | None) -> Footer | None:
    elements = read_struct(data, 0, {2: None}, until=2)[0][2]
    leaves = {n: own for n, own in leaves_of(elements).items() if names is None or n in names}
    if len(leaves) < len(names or ()):
        return None
    meta, _ = read_struct(data, 0, _fields({leaf for own in leaves.values() for leaf in own}))
    kept = {entry[1]: entry.get(2) for entry in meta.get(5, ())}
    known = columns_of_schema(elements, kept.get(b"ARROW:schema"))
    end = stamp.size - 8 - len(data)
    columns = [
        node
        for name, own in leaves.items()
        if (node := known[name]) is not None
        and all(_is_plain(group[1][leaf], end) for group in meta[4] for leaf in own)
    ]
    plain = [leaf for node in columns for leaf in leaves[node.name]]
    rows, nbytes, chunks = [], [], []
    for group in meta[4]:
        described = {leaf: group[1][leaf][3] for own in leaves.values() for leaf in own}
        found = {leaf: Chunk(*map(described[leaf].get, (9, 7, 5, 1))) for leaf in plain}
        total = sum(column[6] for column in described.values())
        held = total - sum(chunk.size for chunk in found.values() if chunk.large)
        # What is held is read at once, so it must be little, and every row is worth some work.
        if group[3] and (total < SMALLEST * group[3] or held > total // 4):
            return None
        rows.append(group[3])
        nbytes.append(sum(max(column[6], 4 * group[3]) for column in described.values()))
        chunks.append(found)
    if not columns or sum(rows) != meta[3]:
        return None
    mark = mark_of(data, stamp.size)
    return Footer(path, stamp, mark, len(data), list(leaves), columns, rows, nbytes, chunks)


def _fields(leaves: set[int]) -> dict[int, Any]:
    """The fields of a footer that are looked at."""
    column = dict.fromkeys((1, 2, 4, 5, 6, 7, 9, 11))
    chunks = Some(leaves, {1: None, 3: column, 8: {}, 9: None})
    return {3: None, 4: {1: chunks, 3: None}, 5: None}


def _is_plain(described: dict[int, Any], end: int) -> bool:
    """Whether a column chunk is stored plainly, in this file and before its footer."""
    column = described[3]
    return bool(
        not set(described) & {1, 8, 9}  # in another file, or encrypted
        and column[4] == 0  # not compressed
        and not column.get(11)  # has no dictionary
        and set(column[2]) <= {_PLAIN, _RLE}
        and column[6] == column[7]
        and 4 <= column[9] <= column[9] + column[7] <= end
        and column[5] >= 0
    )
