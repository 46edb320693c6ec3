"""How the columns of a parquet file are made up, for those that are read without Arrow.

Known are bytes, text, booleans, integers and floats of 32 and 64 bits, structs of these, and lists
that are in no other list. A column with anything else has no ``Node``: it is left to Arrow. Types
are named as Arrow names them. The schema that Arrow keeps in its files decides what stored numbers
are (a duration, say, is stored as an integer); what it says that we do not know is left to Arrow.

The formats: https://parquet.apache.org/docs/file-format/ and Arrow's ``Schema.fbs``.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

BOOLEAN, INT32, INT64, FLOAT, DOUBLE, BYTE_ARRAY = 0, 1, 2, 4, 5, 6
_REQUIRED, _REPEATED = 0, 2
_TYPE = 1  # the field of an element that only leaves have
_UTF8, _LIST, _INT_32, _INT_64 = 0, 3, 17, 18  # of converted types

#: By (physical type, converted type) what Arrow makes of it.
_LEAVES = {
    (BOOLEAN, None): "bool",
    (INT32, None): "int32",
    (INT32, _INT_32): "int32",
    (INT64, None): "int64",
    (INT64, _INT_64): "int64",
    (FLOAT, None): "float",
    (DOUBLE, None): "double",
    (BYTE_ARRAY, None): "binary",
    (BYTE_ARRAY, _UTF8): "string",
}
_LARGE = {"large_binary": "binary", "large_string": "string"}


@dataclass(frozen=True)
class Node:
    """A column, or a field of one.

    Where the values of its leaves have a definition level of at least ``level``, it is there. A
    list's elements are there from ``level + 1`` on.
    """

    name: str
    type: str  # as Arrow names it; ``list`` and ``struct`` with what is in them
    level: int
    required: bool
    leaf: int | None = None  # its number among the leaves of the file
    element: Node | None = None  # of a list
    fields: tuple[Node, ...] = ()  # of a struct

    def leaves(self, in_list: bool = False) -> Iterator[tuple[Node, bool]]:
        """Those below, or itself, and whether each is in a list."""
        if self.leaf is not None:
            yield self, in_list
        if self.element is not None:
            yield from self.element.leaves(True)
        for field in self.fields:
            yield from field.leaves(in_list)


class UnknownError(Exception):
    """Something that is left to Arrow."""


def columns_of_schema(
    elements: Sequence[dict[int, Any]], arrow: bytes | None
) -> dict[str, Node | None]:
    """Columns by name: None for one that only Arrow can read.

    ``elements`` are the schema of the footer, ``arrow`` what Arrow has kept of its own. Raises
    ``UnknownError`` where the two do not go together.
    """
    walk, count = _Walk(elements), elements[0][5]
    own: Sequence[_ArrowField | None] = walk.nothing_known(count)
    if arrow is not None:
        own = _arrow_fields(arrow)
    if len(own) != count:
        raise UnknownError("Arrow's schema has other columns")
    found: dict[str, Node | None] = {}
    for field in own:
        name = elements[walk.at][4].decode()
        if name in found:
            raise UnknownError("two columns have one name")
        found[name] = walk.column(field)
    return found


def leaves_of(elements: Sequence[dict[int, Any]]) -> dict[str, range]:
    """The numbers of the leaves of each column."""
    found: dict[str, range] = {}
    walk = _Walk(elements)
    for _ in range(elements[0][5]):
        name, first = elements[walk.at][4].decode(), walk.leaf
        walk.pass_over()
        found[name] = range(first, walk.leaf)
    return found


class _Walk:
    """Through the schema, in which a group comes before what is in it."""

    def __init__(self, elements: Sequence[dict[int, Any]]) -> None:
        self._elements = elements
        self._leaves = list(accumulate((_TYPE in e for e in elements), initial=0))  # before each
        self.at = 1

    def column(self, arrow: _ArrowField | None) -> Node | None:
        start = self.at
        try:
            return self._node(0, arrow, False)
        except UnknownError:
            self.at = start
            self.pass_over()
            return None

    def nothing_known(self, count: int) -> Sequence[_ArrowField | None]:
        """What Arrow has kept of ``count`` fields where it has kept nothing."""
        if not 0 <= count <= len(self._elements):
            raise UnknownError(f"{count} fields, of {len(self._elements)} elements in all")
        return [None] * count

    @property
    def leaf(self) -> int:
        """The number of the next leaf."""
        return self._leaves[self.at]

    def pass_over(self) -> None:
        """Go on behind an element and all in it."""
        left = 1
        while left:
            left += self._next().get(5, 0) - 1

    def _node(self, level: int, arrow: _ArrowField | None, in_list: bool) -> Node:
        element = self._next()
        name, count = element[4].decode(), element.get(5, 0)
        required = element.get(3) == _REQUIRED
        level += not required
        if element.get(3) == _REPEATED:
            raise UnknownError("a list without a group around it")
        if _TYPE in element:
            leaf = self.leaf - 1
            kind = _LEAVES.get((element[_TYPE], element.get(6)))
            if kind is None or (element.get(6) is None and 10 in element):
                raise UnknownError("a leaf of another type")
            if arrow is not None and arrow.type != kind:
                if arrow.children or _LARGE.get(arrow.type) != kind:
                    raise UnknownError("a leaf that Arrow keeps as something else")
                kind = arrow.type
            return Node(name, kind, level, required, leaf)
        if count and element.get(6) is None and 10 not in element:
            fields = self._fields(level, count, arrow, in_list)
            text = f"struct<{', '.join(map(_shown, fields))}>"
            return Node(name, text, level, required, fields=fields)
        if element.get(6) != _LIST or count != 1 or in_list:
            raise UnknownError("a group of another kind")
        middle = self._next()
        if middle.get(3) != _REPEATED or middle.get(5) != 1 or middle[4] != b"list":
            raise UnknownError("a list of an older form")
        if arrow is not None and (arrow.type != "list" or len(arrow.children) != 1):
            raise UnknownError("a list that Arrow keeps as something else")
        below = self._node(level + 1, arrow and arrow.children[0], True)
        return Node(name, f"list<{_shown(below)}>", level, required, element=below)

    def _fields(
        self, level: int, count: int, arrow: _ArrowField | None, in_list: bool
    ) -> tuple[Node, ...]:
        if arrow is not None and (arrow.type != "struct" or len(arrow.children) != count):
            raise UnknownError("a struct that Arrow keeps as something else")
        given = self.nothing_known(count) if arrow is None else arrow.children
        fields = tuple(self._node(level, field, in_list) for field in given)
        if len({field.name for field in fields}) < count:
            raise UnknownError("two fields have one name")
        return fields

    def _next(self) -> dict[int, Any]:
        self.at += 1
        return self._elements[self.at - 1]


def _shown(node: Node) -> str:
    return f"{node.name}: {node.type}{' not null' if node.required else ''}"


# -- the schema that Arrow keeps, a flatbuffer -----------------------------------------------------


@dataclass(frozen=True)
class _ArrowField:
    type: str
    children: Sequence[_ArrowField]


def _arrow_fields(text: bytes) -> list[_ArrowField]:
    try:
        message = binascii.a2b_base64(text)[8:]  # behind a mark and the size
        if b"ARROW:extension" in message:
            raise UnknownError("extension types")
        schema = _follow(message, _slot(message, _follow(message, 0), 2))
        return _children(message, schema, 1)
    except (binascii.Error, struct.error, RecursionError) as error:
        raise UnknownError("Arrow's schema is damaged") from error


def _children(data: bytes, table: int, slot: int) -> list[_ArrowField]:
    at = _slot(data, table, slot)
    if not at:
        return []
    vector = _follow(data, at)
    (count,) = struct.unpack_from("<I", data, vector)
    if count > len(data):
        raise UnknownError("Arrow's schema is damaged")
    return [_arrow_field(data, _follow(data, vector + 4 + 4 * i)) for i in range(count)]


def _arrow_field(data: bytes, field: int) -> _ArrowField:
    if _slot(data, field, 4):  # a dictionary
        return _ArrowField("", ())
    number = data[_slot(data, field, 2)]
    at = _slot(data, field, 3)
    return _ArrowField(
        _arrow_type(data, number, _follow(data, at) if at else 0), _children(data, field, 5)
    )


def _arrow_type(data: bytes, number: int, table: int) -> str:
    if number == 2:  # integers: bits, and whether there is a sign
        bits, sign = _slot(data, table, 0), _slot(data, table, 1)
        signed = bool(sign and data[sign])
        return f"{'' if signed else 'u'}int{struct.unpack_from('<i', data, bits)[0] if bits else 0}"
    if number == 3:
        precision = _slot(data, table, 0)
        return ("halffloat", "float", "double")[data[precision] if precision else 0]
    names = {4: "binary", 5: "string", 6: "bool", 12: "list", 13: "struct", 19: "large_binary"}
    return {**names, 20: "large_string"}.get(number, "")


def _follow(data: bytes, at: int) -> int:
    """Where an offset leads to."""
    return at + int(struct.unpack_from("<I", data, at)[0])


def _slot(data: bytes, table: int, number: int) -> int:
    """Where a field of a table lies; 0 if it has none."""
    shape = table - struct.unpack_from("<i", data, table)[0]
    if shape < 0:
        raise UnknownError("Arrow's schema is damaged")
    (size,) = struct.unpack_from("<H", data, shape)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, shape + 4 + 2 * number)
    return table + offset if offset else 0
