"""Large values of parquet files taken from where they lie, one copy a value.

Images and other values of many kilobytes are stored one after the other in a page, each behind its
length, where a column is neither compressed nor dictionary encoded. Once it is known where they
begin, a row costs one copy out of the page cache, and no row group has to be held in memory to take
rows from it in random order. All other columns, and all columns of other files, are Arrow's.

The format: https://parquet.apache.org/docs/file-format/data-pages/ and, for page headers, Thrift's
compact protocol.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Any

from miniray.errors import DataError

#: Values of fewer bytes on average are left to Arrow, which is quicker at many small ones.
SMALLEST = 4096
_HEADER = 1 << 15  # bytes that a page's header has at most; it may show its least and largest value

_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_PLAIN, _RLE = 0, 3


class ValueFile:
    """A local file of which pieces are read.

    Not through a map: pages that were touched there count as this process's memory, and one that is
    not there any more ends the process. Here that is a ``DataError``.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._handle = -1
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def read(self, start: int, size: int) -> bytes:
        found = os.pread(self._handle, size, start)
        if len(found) != size:
            raise has_changed(self.path)
        return found

    def header(self, start: int) -> bytes:
        """What stands at ``start``: a page's header, and more."""
        return os.pread(self._handle, _HEADER, start)

    def length(self, start: int) -> int:
        """The number at ``start``, with its own four bytes."""
        return int.from_bytes(self.read(start, 4), "little") + 4

    def will_need(self, start: int, size: int) -> None:
        """Let the system fetch this from the disk while we go on."""
        if hasattr(os, "posix_fadvise"):  # macOS has none
            os.posix_fadvise(self._handle, start, size, os.POSIX_FADV_WILLNEED)


def has_changed(where: str) -> DataError:
    return DataError(
        f"{where}: the file has changed its size while it was read; files of a run must not be"
        " written to"
    )


class StoredValues:
    """The values of one column chunk: where each of them lies in the file."""

    def __init__(self, file: ValueFile, bounds: Sequence[tuple[int, int]]) -> None:
        self._file = file
        self._begins, self._sizes = array("q"), array("q")
        for start, stop in bounds:
            self._walk(start, stop)

    def _walk(self, start: int, stop: int) -> None:
        """Find the values between two places of the file."""
        begins, sizes, read = self._begins, self._sizes, self._file.read
        while start < stop:
            size = int.from_bytes(read(start, 4), "little")
            start += 4
            begins.append(start)
            sizes.append(size)
            start += size
        if start != stop:
            raise DataError(
                f"{self._file.path}: a value ends at byte {start}, after its page ({stop}); the"
                " file is damaged"
            )

    def __len__(self) -> int:
        return len(self._begins)

    @property
    def nbytes(self) -> int:
        return 16 * len(self)

    def __call__(self, i: int) -> bytes:
        return self._file.read(self._begins[i], self._sizes[i])


def may_be_stored(chunk: Any) -> bool:
    """Whether a column chunk, as its footer describes it, has values that can be taken directly."""
    return bool(
        chunk.physical_type == "BYTE_ARRAY"
        and chunk.compression == "UNCOMPRESSED"
        and not chunk.has_dictionary_page
        and set(chunk.encodings) <= {"PLAIN", "RLE"}
        and chunk.num_values
        and chunk.total_compressed_size >= SMALLEST * chunk.num_values
    )


def stored_values(file: ValueFile, chunk: Any, levels: tuple[int, int]) -> StoredValues | None:
    """The values of a chunk that may be stored; None if its pages say that they are not.

    ``levels`` are the column's highest repetition and definition level. Missing values are not
    among those found.
    """
    at, end = chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size
    file.will_need(at, end - at)
    bounds = []
    while at < end:
        try:
            header, size = read_struct(file.header(at), 0)
        except IndexError:
            return None  # longer than any header we know, or damaged: Arrow will say
        at += size
        if header[1] == _DATA_PAGE:
            page, values = header[5], at
            if page[2] != _PLAIN:
                return None
            for level, encoding in zip(levels, (page[4], page[3]), strict=True):
                if level and encoding != _RLE:
                    return None
                if level:
                    values += file.length(values)
        elif header[1] == _DATA_PAGE_V2:
            page = header[8]
            if page[4] != _PLAIN:
                return None
            values = at + page[5] + page[6]
        else:
            return None
        at += header[3]
        bounds.append((values, at))
    return StoredValues(file, bounds)


# -- Thrift's compact protocol ---------------------------------------------------------------------


def read_struct(data: Any, at: int) -> tuple[dict[int, Any], int]:
    """(fields by their number, where the struct ends). Bytes and lists are passed over."""
    fields: dict[int, Any] = {}
    number = 0
    while True:
        head = data[at]
        at += 1
        if not head:
            return fields, at
        kind = head & 15
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        fields[number], at = _value(data, at, kind)


def _value(data: Any, at: int, kind: int) -> tuple[Any, int]:
    if kind in (1, 2):  # a boolean is its kind
        return kind == 1, at
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 8:
        size, at = _varint(data, at)
        return None, at + size
    if kind == 12:
        return read_struct(data, at)
    raise DataError(f"a page header has a field of kind {kind}, which no page header has")


def _integer(data: Any, at: int) -> tuple[int, int]:
    coded, at = _varint(data, at)
    return (coded >> 1) ^ -(coded & 1), at


def _varint(data: Any, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
