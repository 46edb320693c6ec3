"""The values of one leaf column in one row group, as a function from its entries to Python objects.

A column that is stored plainly is made of pages. A page has repetition levels (where lists begin),
definition levels (how much of a path is there) and the values that are there, one after the other.
Values of many kilobytes are left in the file; all others are read with one call and held. The
format: https://parquet.apache.org/docs/file-format/data-pages/
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.footer import Chunk, ValueFile, has_changed
from miniray.data.layout import Node
from miniray.data.sources.base import Getter
from miniray.data.thrift import DAMAGED, read_struct, varint
from miniray.errors import DataError

_HEADER = 1 << 15  # bytes that a page's header has at most; it may show its least and largest value
_DATA_PAGE, _DATA_PAGE_V2 = 0, 3
_PLAIN, _RLE = 0, 3
_CODES = {"int32": "i", "int64": "q", "float": "f", "double": "d"}


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


# -- values ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """An entry is a value or the place of a missing one. Outside of lists there is one a row."""

    get: Getter  # from an entry to its value, or None
    entries: int
    repetitions: bytes  # of entries; none if the leaf is in no list
    definitions: bytes  # of entries; none if nothing can be missing
    nbytes: int

    def starts(self) -> list[int]:
        """The entries with which rows begin."""
        return [entry for entry, level in enumerate(self.repetitions) if not level]


def read_leaf(file: ValueFile, chunk: Chunk, node: Node, in_list: bool) -> Leaf:
    """Raises one of ``NOT_PLAIN`` where the pages cannot be read here."""
    if chunk.large:
        file.will_need(chunk.start, chunk.size)
    held = b"" if chunk.large else file.read(chunk.start, chunk.size)
    found = list(pages(file, chunk, held, int(in_list), node.level))
    definitions = b"".join(page.definitions for page in found)
    entries = sum(page.entries for page in found)
    if entries != chunk.values:
        raise NotPlainError(f"{entries} values, and the footer says {chunk.values}")
    counts = [page.definitions.count(node.level) if node.level else page.entries for page in found]
    there = sum(counts)
    if chunk.large:
        get, nbytes = _stored(file, found, there, node.type)
        if there < entries:
            numbers = _some(list(range(there)), definitions, node.level)
            get, nbytes = _or_none(get, numbers), nbytes + 40 * entries
    else:
        parts = [held[page.begin - chunk.start : page.end - chunk.start] for page in found]
        values = _held(parts, counts, node.type)
        if len(values) != there:
            raise NotPlainError(f"{len(values)} values in place of {there}")
        get = (values if there == entries else _some(values, definitions, node.level)).__getitem__
        nbytes = len(held) + 60 * entries  # about what Python's objects take more
    repetitions = b"".join(page.repetitions for page in found)
    return Leaf(get, entries, repetitions, definitions, nbytes + len(repetitions + definitions))


def _or_none(get: Getter, numbers: Sequence[int | None]) -> Getter:
    def get_or_none(entry: int) -> Any:
        number = numbers[entry]
        return None if number is None else get(number)

    return get_or_none


def _some(values: list[Any], definitions: bytes, level: int) -> list[Any]:
    """The values that are there, and None between them."""
    there = iter(values)
    return [next(there) if found == level else None for found in definitions]


def _stored(file: ValueFile, found: Sequence[Page], count: int, kind: str) -> tuple[Getter, int]:
    values = StoredValues(file, [(page.begin, page.end) for page in found])
    if len(values) != count:
        raise NotPlainError(f"{len(values)} values in place of {count}")
    if kind.endswith("string"):
        return (lambda i: str(values(i), "utf-8")), values.nbytes
    return values, values.nbytes


def _held(parts: Sequence[bytes], counts: Sequence[int], kind: str) -> list[Any]:
    """The values of pages that are in memory."""
    if kind in _CODES:
        return memoryview(b"".join(parts)).cast(_CODES[kind]).tolist()  # type: ignore[call-overload, no-any-return]
    values: list[Any] = []
    for part, count in zip(parts, counts, strict=True):
        if kind == "bool":
            values += [bool(part[i >> 3] >> (i & 7) & 1) for i in range(count)]
        else:
            values += _bytes(part, count, kind.endswith("string"))
    return values


def _bytes(part: bytes, count: int, text: bool) -> list[Any]:
    values: list[Any] = []
    at = 0
    for _ in range(count):
        begin = at + 4
        at = begin + int.from_bytes(part[at:begin], "little")
        values.append(part[begin:at])
    if at != len(part):
        raise NotPlainError(f"values end at byte {at} of a page, which has {len(part)}")
    return [value.decode() for value in values] if text else values


class StoredValues:
    """The large values of one column chunk: where each of them lies in the file.

    They are stored one after the other, each behind its length. Once it is known where they begin,
    a row costs one copy out of the page cache, and no row group has to be held to take rows from it
    in random order.
    """

    def __init__(self, file: ValueFile, bounds: Sequence[tuple[int, int]]) -> None:
        self._file, self._handle = file, file.handle
        self._begins, self._sizes = array("q"), array("q")
        for start, stop in bounds:
            self._walk(start, stop)

    def _walk(self, start: int, stop: int) -> None:
        """Find the values between two places of the file."""
        begins, sizes, handle, read = self._begins, self._sizes, self._handle, os.pread
        while start < stop:
            size = int.from_bytes(read(handle, 4, start), "little")
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
        size = self._sizes[i]
        found = os.pread(self._handle, size, self._begins[i])
        if len(found) != size:
            raise has_changed(self._file.path)
        return found
