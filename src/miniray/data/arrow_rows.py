"""Rows of a block as Arrow record batches, in memory that is given back when they are dropped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miniray.data.distinct import distinct
from miniray.data.pages import StoredValues
from miniray.data.permutation import Positions
from miniray.data.slabs import Slabs, copied, has_dictionary, size_for
from miniray.data.source import Rows
from miniray.data.values import (
    Getter,
    Path,
    getter,
    holder,
    is_number,
    number_type,
    numbers,
)


@dataclass(frozen=True)
class Large:
    """Rows whose large values are left in their file, beside a record batch with all else."""

    fields: Sequence[Any]  # of whole rows
    values: Mapping[Path, StoredValues]
    num_rows: int


class ArrowRows(Rows):
    """Record batches one after the other. Nothing made of them shares their memory.

    With ``large`` there is at most one batch, which has none of the large values.
    """

    def __init__(
        self,
        batches: Sequence[Any],
        start: int,
        slabs: Slabs | None = None,
        own: Sequence[Any] = (),
        large: Large | None = None,
    ) -> None:
        import pyarrow as pa

        self._batches, self._large = batches, large
        self._slabs, self._own = slabs, own
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self._getters: dict[str, Getter] = {}
        self.schema: Any = batches[0].schema if batches else None
        self.start = start
        self.num_rows = self._starts[-1]
        self.nbytes = sum(map(len, own)) or sum(batch.nbytes for batch in batches)
        if large is not None:
            self.schema, self.num_rows = pa.schema(large.fields), large.num_rows
            self.nbytes += sum(values.nbytes for values in large.values.values())

    def __del__(self) -> None:
        self._batches = self._getters = ()  # type: ignore[assignment]
        for slab in self._own:
            self._slabs.give(slab)  # type: ignore[union-attr]

    @property
    def names(self) -> list[str]:
        return [] if self.schema is None else self.schema.names

    def getter(self, name: str) -> Getter:
        """A function from a row to its value in a column."""
        found = self._getters.get(name)
        if found is None:
            found = self._getters[name] = self._compile(name)
        return found

    def _compile(self, name: str) -> Getter:
        if self._large is not None:
            where, kind = self._large.values, self.schema.field(name).type
            direct = where.get((name,))
            return direct or getter(self._batches[0].column(name), kind, where, (name,))
        each = [getter(batch.column(name)) for batch in self._batches]
        if len(each) == 1:
            return each[0]
        starts = self._starts

        def get(i: int) -> Any:
            batch = bisect_right(starts, i) - 1
            return each[batch](i - starts[batch])

        return get

    def numbers(self, name: str, index: Positions) -> npt.NDArray[Any] | None:
        """Values of a column of numbers in which none is missing; None for any other column."""
        kind = self.schema.field(name).type
        if not is_number(kind) or any(batch.column(name).null_count for batch in self._batches):
            return None
        found = np.empty(len(index), dtype=number_type(kind))
        which = np.searchsorted(self._starts, index, side="right") - 1
        for number in distinct(which).tolist():
            inside = which == number
            values = numbers(self._batches[number].column(name))
            found[inside] = values[index[inside] - self._starts[number]]
        return found

    def rows(self, index: Positions) -> list[Any]:
        getters = [(name, self.getter(name)) for name in self.names]
        return [{name: get(i) for name, get in getters} for i in index.tolist()]

    def arrow(self, index: Positions) -> Any:
        import pyarrow as pa

        if self._large is not None:
            return pa.Table.from_pylist(self.rows(index), schema=self.schema)
        return pa.Table.from_batches(self._batches).take(pa.array(index))


def fits(batches: Sequence[Any], large: Large) -> bool:
    """Whether there is a large value for every row, or every struct, that should have one."""
    if len(batches) > 1:
        return False
    for path, values in large.values.items():
        structs = holder(batches[0], path) if batches else None
        if len(path) > 1 and structs is None:
            return False
        if len(values) != (large.num_rows if structs is None else len(structs)):
            return False
    return True


def rows_of(
    batches: Iterable[Any], start: int, slabs: Slabs | None, large: Large | None = None
) -> ArrowRows:
    """Record batches as rows, copied into slabs one by one as they come."""
    kept, own = [], []
    for batch in batches:
        if slabs is not None and not any(has_dictionary(field.type) for field in batch.schema):
            own.append(slabs.take(size_for(batch)))
            batch = copied(batch, own[-1])
        kept.append(batch)
    if len(own) != len(kept):
        slabs, own = None, []
    return ArrowRows(kept, start, slabs, own, large)


def columns(parts: Sequence[tuple[ArrowRows, Positions, Positions]]) -> dict[str, Any]:
    """(rows, which of them, where they go) put together as columns.

    Numbers make numpy arrays; missing ones are NaN there, and integers and booleans then float64.
    Lists of a fixed number of numbers make an array of two dimensions. All else makes lists.
    """
    total = sum(len(index) for _, index, _ in parts)
    first = parts[0][0]
    found: dict[str, Any] = {}
    for name in first.names:
        kind = first.schema.field(name).type
        if is_number(kind) and total >= 8 * len(parts):
            pieces = [rows.numbers(name, index) for rows, index, _ in parts]
            if all(piece is not None for piece in pieces):
                array = np.empty(total, dtype=number_type(kind))
                for (_, _, places), piece in zip(parts, pieces, strict=True):
                    array[places] = piece
                found[name] = array
                continue
        values: list[Any] = [None] * total
        for rows, index, places in parts:
            get = rows.getter(name)
            for place, i in zip(places.tolist(), index.tolist(), strict=True):
                values[place] = get(i)
        found[name] = _as_column(values, kind)
    return found


def _as_column(values: list[Any], kind: Any) -> Any:
    import pyarrow as pa

    if is_number(kind):
        if None not in values:
            return np.array(values, dtype=number_type(kind))
        floating = pa.types.is_floating(kind)
        missing = [np.nan if value is None else value for value in values]
        return np.array(missing, dtype=number_type(kind) if floating else np.float64)
    vectors = pa.types.is_fixed_size_list(kind) and is_number(kind.value_type)
    if vectors and all(value is not None and None not in value for value in values):
        return np.array(values, dtype=number_type(kind.value_type))
    return values
