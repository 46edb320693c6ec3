"""Rows of a parquet file read without Arrow, with large values left in the file until asked for.

For files that ``read_footer`` takes. Where a page turns out to be something else, Arrow reads or
refuses the row group in our place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miniray.data.footer import Footer, ValueFile, unchanged
from miniray.data.layout import Node
from miniray.data.pages import NOT_PLAIN, Leaf, NotPlainError, read_leaf
from miniray.data.sources.base import Getter, Layout, Rows, struct_getter
from miniray.errors import DataError

#: Reads columns, by their names, of the row group that is being read.
ReadOthers = Callable[[Sequence[str]], Rows]


class PlainFile:
    """One file open in one thread. Raises ``DataError`` where it has gone or changed."""

    def __init__(self, footer: Footer) -> None:
        self._footer = footer
        try:
            self._file = ValueFile(footer.path)
        except FileNotFoundError as error:
            raise DataError(f"{footer.path} does not exist any more") from error
        self._stamp = unchanged(self._file, footer.stamp, footer.mark, footer.path)
        self._last: tuple[int, Any, PlainRows] | None = None

    def has(self, group: int, rows: int, names: Sequence[str]) -> bool:
        """Whether there is such a row group, with ``names``, as far as the footer says."""
        known = self._footer.rows[group : group + 1] == [rows]
        return known and set(names) <= set(self._footer.names)

    def read(
        self, group: int, names: Sequence[str], part: bool, arrow: ReadOthers
    ) -> PlainRows | None:
        """All rows of a row group; None if they are not stored as its footer says.

        ``part``: only some are needed now. They are kept for those who come for the next ones.
        ``arrow`` reads columns that are stored in another way.
        """
        if self._last is not None and self._last[:2] == (group, names):
            return self._last[2]
        where = f"{self._footer.path}, row group {group}"
        self._stamp = unchanged(self._file, self._stamp, self._footer.mark, where)
        columns = [column for column in self._footer.columns if column.name in names]
        others = [name for name in names if name not in self._footer.types]
        chunks, rows = self._footer.chunks[group], self._footer.rows[group]
        leaves: dict[int, Leaf] = {}
        try:
            for column in columns:
                for node, in_list in column.leaves():
                    assert node.leaf is not None
                    leaf = read_leaf(self._file, chunks[node.leaf], node, in_list)
                    found = leaf.repetitions.count(0) if in_list else leaf.entries
                    if found != rows or leaf.repetitions.startswith(b"\1"):
                        raise NotPlainError(f"{found} rows in place of {rows}")
                    leaves[node.leaf] = leaf
            getters = {column.name: _getter(column, leaves) for column in columns}
        except NOT_PLAIN:  # a DataError is one too: Arrow names the row group
            return None
        except OSError as error:
            raise DataError(f"{where} cannot be read: {error}") from error
        block = PlainRows(
            self._footer.path,
            [(name, self._footer.types.get(name, "")) for name in names],
            getters,
            sum(leaf.nbytes for leaf in leaves.values()),
            arrow(others) if others else None,
        )
        self._last = (group, names, block) if part else None
        return block

    def forget(self) -> None:
        """Let go of the rows that are kept for the next slice of their row group."""
        self._last = None

    close = forget


class PlainRows(Rows):
    """A row group. Values left in the file are read when their row is.

    ``columns`` are (name, type); ``others`` has those without a getter.
    """

    start = 0

    def __init__(
        self,
        path: str,
        columns: Sequence[tuple[str, str]],
        getters: Mapping[str, Getter],
        nbytes: int,
        others: Rows | None,
    ) -> None:
        self._path, self._others = path, others
        self._schema: Any = None
        types = dict(others.layout or ()) if others is not None else {}
        self.layout: Layout = tuple((name, types.get(name, kind)) for name, kind in columns)
        self._getters = {
            name: getters[name] if others is None or name in getters else others.getter(name)
            for name, _ in columns
        }
        self.nbytes = nbytes + (0 if others is None else others.nbytes)

    def getter(self, name: str) -> Getter:
        return self._getters[name]

    def numbers(self, name: str, index: Sequence[int]) -> Any:
        known = self._others is not None and name in dict(self._others.layout or ())
        return self._others.numbers(name, index) if self._others is not None and known else None

    def rows(self, index: Sequence[int]) -> list[Any]:
        getters = self._getters.items()
        return [{name: get(i) for name, get in getters} for i in index]

    def arrow(self, index: Sequence[int]) -> Any:
        import pyarrow as pa

        if self._schema is None:
            import pyarrow.parquet as pq

            schema = pq.read_schema(self._path)
            self._schema = pa.schema([schema.field(name) for name, _ in self.layout])
        return pa.Table.from_pylist(self.rows(index), schema=self._schema)


def _getter(node: Node, leaves: Mapping[int, Leaf], in_list: bool = False) -> Getter:
    """A function from a row, or within a list from an entry, to the value."""
    if node.leaf is not None:
        return leaves[node.leaf].get
    first, _ = next(node.leaves())
    leaf = leaves[first.leaf]  # type: ignore[index]  # leaves have one
    if node.element is not None:
        for other, _ in node.leaves():
            if leaves[other.leaf].repetitions != leaf.repetitions:  # type: ignore[index]
                raise NotPlainError(f"lists of {first.name} and {other.name} differ in length")
        return _list(node, _getter(node.element, leaves, True), leaf)
    get = struct_getter([(field.name, _getter(field, leaves, in_list)) for field in node.fields])
    definitions = leaf.definitions
    if leaf.repetitions and not in_list:  # the struct has a list in it: a row's first entry tells
        definitions = bytes(definitions[entry] for entry in leaf.starts())
    if node.required or min(definitions, default=node.level) >= node.level:
        return get
    level = node.level
    return lambda i: get(i) if definitions[i] >= level else None


def _list(node: Node, get: Getter, leaf: Leaf) -> Getter:
    level, definitions = node.level, leaf.definitions
    starts = [*leaf.starts(), leaf.entries]
    if len(starts) > leaf.entries and min(definitions, default=0) > level:
        return lambda i: [get(i)]  # one in each row

    def values(i: int) -> Any:
        start = starts[i]
        if definitions[start] <= level:  # an empty list, or none at all
            return [] if definitions[start] == level else None
        return [get(entry) for entry in range(start, starts[i + 1])]

    return values
