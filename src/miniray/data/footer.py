"""A parquet file's footer read without Arrow, whose import takes longer than all else at a start.

Only for files whose rows are large, mostly of columns that are stored plainly; and only where
everything is as it should be. Any other file is None here, and then Arrow's to read or to refuse.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.layout import BYTE_ARRAY, Node, UnknownError, columns_of_schema, leaves_of
from miniray.data.thrift import DAMAGED, Some, read_struct

#: Values of fewer bytes on average are held in memory; those of more are left in the file.
SMALLEST = 4096
#: Bytes of footers from which on Arrow has parsed them before we have, its import included.
LONGEST = 1 << 19

_MAGIC = b"PAR1"
_PLAIN, _RLE = 0, 3


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
    size: int  # of the file
    length: int  # of the footer
    names: Sequence[str]  # in the order of the file
    columns: Sequence[Node]  # those of them that are stored plainly; all others are Arrow's to read
    rows: Sequence[int]  # of row groups
    nbytes: Sequence[int]
    chunks: Sequence[dict[int, Chunk]]  # of row groups, by leaf
    created_by: str | None

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
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(handle).st_size
        end = os.pread(handle, 8, max(0, size - 8))
        length = int.from_bytes(end[:4], "little")
        if (
            os.pread(handle, 4, 0) != _MAGIC
            or end[4:] != _MAGIC
            or length > min(size - 12, longest)
        ):
            return None
        data = os.pread(handle, length, size - 8 - length)
    finally:
        os.close(handle)
    try:
        return _footer(path, size, data, names)
    except (UnknownError, *DAMAGED):
        return None  # damaged, or of a form we do not know


def _footer(path: str, size: int, data: bytes, names: Sequence[str] | None) -> Footer | None:
    elements = read_struct(data, 0, {2: None}, until=2)[0][2]
    leaves = {n: own for n, own in leaves_of(elements).items() if names is None or n in names}
    if len(leaves) < len(names or ()):
        return None
    meta, _ = read_struct(data, 0, _fields({leaf for own in leaves.values() for leaf in own}))
    kept = {entry[1]: entry.get(2) for entry in meta.get(5, ())}
    known = columns_of_schema(elements, kept.get(b"ARROW:schema"))
    end = size - 8 - len(data)
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
    by = meta[6].decode() if 6 in meta else None
    return Footer(path, size, len(data), list(leaves), columns, rows, nbytes, chunks, by)


def _fields(leaves: set[int]) -> dict[int, Any]:
    """The fields of a footer that are looked at."""
    column = dict.fromkeys((1, 2, 4, 5, 6, 7, 9, 11))
    chunks = Some(leaves, {1: None, 3: column, 8: {}, 9: None})
    return {3: None, 4: {1: chunks, 3: None}, 5: None, 6: None}


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
