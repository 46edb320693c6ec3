"""The values of one leaf column in one row group, as a function from its entries to Python objects.

Values of many kilobytes are left in the file; all others are read with one call and held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.footer import Chunk
from miniray.data.layout import Node
from miniray.data.pages import NotPlainError, Page, pages
from miniray.data.source import Getter
from miniray.data.value_file import StoredValues, ValueFile

_CODES = {"int32": "i", "int64": "q", "float": "f", "double": "d"}


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
