"""The pages of a column that is stored plainly: what is missing, and where the values lie.

A page has repetition levels (where lists begin), definition levels (how much of a path is there)
and the values that are there, one after the other. The format:
https://parquet.apache.org/docs/file-format/data-pages/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from miniray.data.footer import Chunk
from miniray.data.thrift import DAMAGED, read_struct, varint
from miniray.data.value_file import ValueFile

_HEADER = 1 << 15  # bytes that a page's header has at most; it may show its least and largest value
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_PLAIN, _RLE = 0, 3


class NotPlainError(Exception):
    """The pages are not what the footer says: damaged, or of an encoding that Arrow may know."""


#: What reading pages raises where they are not as they should be.
NOT_PLAIN = (NotPlainError, *DAMAGED)


@dataclass(frozen=True)
class Page:
    """An entry is a value or the place of a missing one; the values are in ``begin`` to ``end``."""

    entries: int
    repetitions: bytes  # of entries; none if the column is in no list
    definitions: bytes  # of entries; none if nothing can be missing
    begin: int
    end: int


def pages(
    file: ValueFile, chunk: Chunk, held: bytes, repetition: int, definition: int
) -> Iterator[Page]:
    """The pages of ``chunk``, of which ``held`` are the bytes if they have been read.

    ``repetition`` and ``definition`` are the column's highest levels. Raises one of ``NOT_PLAIN``.
    """
    at, stop = chunk.start, chunk.start + chunk.size

    def piece(start: int, size: int) -> bytes:
        if not chunk.start <= start <= start + size <= stop:
            raise NotPlainError(f"{size} bytes at {start}, behind the end of the column ({stop})")
        if held:
            return held[start - chunk.start : start - chunk.start + size]
        return file.read(start, size)

    while at < stop:
        header, size = read_struct(piece(at, min(stop - at, _HEADER)), 0)
        at += size
        end = at + header[3]
        if header[1] == _DATA_PAGE:
            page = header[5]
            begin, levels = at, []
            for highest, encoding in ((repetition, page[4]), (definition, page[3])):
                if highest and encoding != _RLE:
                    raise NotPlainError(f"levels of encoding {encoding}")
                if highest:
                    size = int.from_bytes(piece(begin, 4), "little")
                    begin += 4
                    levels.append(piece(begin, size))
                    begin += size
                else:
                    levels.append(b"")
            encoding = page[2]
        elif header[1] == _DATA_PAGE_V2:
            page = header[8]
            levels = [piece(at, page[6]), piece(at + page[6], page[5])]
            begin, encoding = at + page[6] + page[5], page[4]
        else:
            raise NotPlainError(f"a page of type {header[1]}")
        entries = page[1]
        if encoding != _PLAIN or not begin <= end <= stop or not 0 <= entries <= chunk.values:
            raise NotPlainError(f"a page of encoding {encoding} from {at} to {end}")
        yield Page(
            entries,
            _levels(levels[0], repetition, entries),
            _levels(levels[1], definition, entries),
            begin,
            end,
        )
        at = end


def _levels(data: bytes, highest: int, count: int) -> bytes:
    """``count`` numbers up to ``highest``: runs of one number, and groups of eight packed."""
    if not highest:
        return b""
    found = bytearray()
    width, at = highest.bit_length(), 0
    mask = (1 << width) - 1
    while len(found) < count:
        head, at = varint(data, at)
        if not head >> 1:
            raise NotPlainError("a run of nothing")
        if head & 1:
            groups = min(head >> 1, -(-(count - len(found)) // 8))
            if at + groups * width > len(data):
                raise NotPlainError("levels end too early")
            for _ in range(groups):
                packed = int.from_bytes(data[at : at + width], "little")
                found += bytes(packed >> shift & mask for shift in range(0, 8 * width, width))
                at += width
        else:
            found += bytes([data[at]]) * min(head >> 1, count - len(found))
            at += 1
    if max(found[:count], default=0) > highest:
        raise NotPlainError(f"levels above {highest}")
    return bytes(found[:count])
