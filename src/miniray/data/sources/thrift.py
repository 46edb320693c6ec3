"""Thrift's compact protocol, in which Parquet footers are written. Structs become dicts.

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

#: Numbers of the fields to read, each with the fields of its structs. None selects all.
Wanted = Mapping[int, Any] | None


def read_struct(
    data: bytes, at: int, wanted: Wanted = None, until: int | None = None
) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct by number and the offset of its end.

    Stops after field ``until``.
    """
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
            number, at = _read_integer(data, at)
        if wanted is not None and number not in wanted:
            at = _skip(data, at, kind)
        elif kind in (_TRUE, _FALSE):
            fields[number] = kind == _TRUE
        else:
            fields[number], at = _read_value(data, at, kind, wanted and wanted[number])
    return fields, at


def _read_value(data: bytes, at: int, kind: int, wanted: Wanted) -> tuple[Any, int]:
    if _I16 <= kind <= _I64:
        return _read_integer(data, at)
    if kind == _STRUCT:
        return read_struct(data, at, wanted)
    if kind in (_LIST, _SET):
        item_kind, size, at = _read_list_head(data, at)
        items = []
        for _ in range(size):
            item, at = _read_value(data, at, item_kind, wanted)
            items.append(item)
        return items, at
    end = _skip(data, at, kind)
    if end > len(data):
        raise IndexError(f"{end - at} bytes at {at} of {len(data)}")
    if kind == _BINARY:
        _, at = _read_varint(data, at)
    return data[at:end], end


def _read_list_head(data: bytes, at: int) -> tuple[int, int, int]:
    """Return the kind of the items, their number and the offset of the first one."""
    kind, size = data[at] & 15, data[at] >> 4
    if size < 15:
        return kind, size, at + 1
    size, at = _read_varint(data, at + 1)
    return kind, size, at


def _skip(data: bytes, at: int, kind: int) -> int:
    """Return the offset of the end of a value."""
    if _I16 <= kind <= _I64:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == _BINARY:
        size, at = _read_varint(data, at)
        return at + size
    if kind == _STRUCT:
        while head := data[at]:
            at += 1
            if head < 16:
                _, at = _read_varint(data, at)
            if head & 15 > _FALSE:
                at = _skip(data, at, head & 15)
        return at + 1
    if kind in (_LIST, _SET):
        kind, size, at = _read_list_head(data, at)
        for _ in range(size):
            at = _skip(data, at, kind)
        return at
    if kind in (_TRUE, _FALSE, _BYTE):  # the first two only in lists
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    raise ValueError(f"Parquet has no fields of kind {kind}")


def _read_integer(data: bytes, at: int) -> tuple[int, int]:
    coded, at = _read_varint(data, at)
    return (coded >> 1) ^ -(coded & 1), at


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return an unsigned number, which has seven bits per byte, and the offset of its end."""
    found = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7
    raise ValueError("a number has more than 64 bits")
