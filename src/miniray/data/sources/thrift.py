"""Thrift's compact protocol, in which parquet files describe themselves: structs as dicts.

What is read may be damaged: a struct that does not end within its bytes is an ``IndexError``, a
kind of field that there is not a ``ValueError``, one without an end a ``RecursionError``. The work
is bounded by the bytes that are there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_TRUE, _FALSE, _BYTE, _I16, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (
    1, 2, 3, 4, 6, 7, 8, 9, 10, 12,
)  # fmt: skip

#: What reading a damaged struct raises, and looking for what should be in it.
DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)

#: The fields of a struct, or of the structs of a list, that are read, each with those within it;
#: None: all.
Wanted = Mapping[int, Any] | None


class Some:
    """Which items of a list are wanted; the others are None there."""

    def __init__(self, items: Collection[int], wanted: Wanted) -> None:
        self.items, self.wanted = items, wanted


def read_struct(
    data: bytes, at: int, wanted: Wanted = None, until: int | None = None
) -> tuple[dict[int, Any], int]:
    """(fields by their number, where the struct ends); not further than field ``until``."""
    fields: dict[int, Any] = {}
    number = 0
    while number != until:
        head = data[at]
        at += 1
        if not head:
            break
        kind = head & 15
        if head > 15:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        if wanted is not None and number not in wanted:
            at = _skip(data, at, kind)
        elif kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            within = None if wanted is None else wanted[number]
            fields[number], at = _value(data, at, kind, within)
    return fields, at


def _value(data: bytes, at: int, kind: int, wanted: Any) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        return _integer(data, at)
    if kind == _STRUCT:
        return read_struct(data, at, wanted)
    if kind in (_LIST, _SET):
        return _list(data, at, wanted)
    end = _skip(data, at, kind)
    if end > len(data):
        raise IndexError(f"{end - at} bytes at {at} of {len(data)}")
    if kind == _BINARY:
        _, at = varint(data, at)
    return data[at:end], end


def _list(data: bytes, at: int, wanted: Any) -> tuple[list[Any], int]:
    kind, size, at = _list_head(data, at)
    some = wanted.items if isinstance(wanted, Some) else None
    within = wanted.wanted if isinstance(wanted, Some) else wanted
    found: list[Any] = []
    for number in range(size):
        if some is not None and number not in some:
            value, at = None, _skip(data, at, kind)
        else:
            value, at = _value(data, at, kind, within)
        found.append(value)
    return found, at


def _list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """(kind of the items, how many, where the first is)."""
    kind, size = data[at] & 15, data[at] >> 4
    if size < 15:
        return kind, size, at + 1
    size, at = varint(data, at + 1)
    return kind, size, at


def _skip(data: bytes, at: int, kind: int) -> int:
    """Where a value ends. Written out, as footers have tens of thousands of them."""
    if _I16 <= kind <= _I64:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == _BINARY:
        size, at = varint(data, at)
        return at + size
    if kind == _STRUCT:
        while head := data[at]:
            at += 1
            if head < 16:
                _, at = varint(data, at)
            kind = head & 15
            if _I16 <= kind <= _I64:
                while data[at] > 127:
                    at += 1
                at += 1
            elif kind == _BINARY and data[at] < 128:
                at += 1 + data[at]
            elif kind > _FALSE:
                at = _skip(data, at, kind)
        return at + 1
    if kind in (_LIST, _SET):
        kind, size, at = _list_head(data, at)
        for _ in range(size):
            at = _skip(data, at, kind)
        return at
    if kind in (_TRUE, _FALSE, _BYTE):  # the first two within a list only
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    raise ValueError(f"a field of kind {kind}, which parquet does not use")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    coded, at = varint(data, at)
    return (coded >> 1) ^ -(coded & 1), at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """(a number of seven bits a byte, where it ends)."""
    found = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
    raise ValueError("a number of more than 64 bits")
