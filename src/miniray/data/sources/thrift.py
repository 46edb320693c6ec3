"""Thrift's compact protocol, in which Parquet footers are written. Structs become dicts.

pyarrow parses footers as well, but asking it for damaged metadata of a column aborts the process.
The bytes can be damaged, so reading can raise any of ``DAMAGED``. It takes time in proportion to
the number of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRUE, _FALSE, _BYTE, _I16, _I64, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = (
    1, 2, 3, 4, 6, 7, 8, 9, 10, 12,
)  # fmt: skip

#: Errors of reading damaged bytes, and of looking for fields that they don't have.
DAMAGED = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)

#: Numbers of the fields to keep, each with the fields of its structs. None keeps all.
Wanted = Mapping[int, Any] | None


def read_struct(data: bytes, at: int, wanted: Wanted = None) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by number and the offset of its end."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        kind, step, at = head & 15, head >> 4, at + 1
        if step:
            number += step
        else:
            number, at = _read_integer(data, at)
        inner = wanted and wanted.get(number)
        if kind in (_TRUE, _FALSE):
            value: Any = kind == _TRUE
        else:
            value, at = _read_value(data, at, kind, inner)
        if wanted is None or number in wanted:
            fields[number] = value
    return fields, at + 1


def _read_value(data: bytes, at: int, kind: int, wanted: Wanted) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        return _read_integer(data, at)
    if kind == _BINARY:
        size, at = _read_varint(data, at)
        return data[at : at + size], at + size
    if kind == _STRUCT:
        return read_struct(data, at, wanted)
    if kind in (_LIST, _SET):
        item_kind, size, at = data[at] & 15, data[at] >> 4, at + 1
        if size == 15:
            size, at = _read_varint(data, at)
        items = []
        for _ in range(size):
            item, at = _read_value(data, at, item_kind, wanted)
            items.append(item)
        return items, at
    size = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}[kind]  # the first two only in lists
    if at + size > len(data):
        raise IndexError(f"{size} bytes at {at} of {len(data)}")
    return data[at : at + size], at + size


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    coded, at = _read_varint(data, at)
    return (coded >> 1) ^ -(coded & 1), at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned number, which has seven bits per byte, and the offset of its end."""
    if (byte := data[at]) < 128:  # most of them
        return byte, at + 1
    found = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
    raise ValueError("a number has more than 64 bits")
