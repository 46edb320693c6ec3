"""Rows of a block as Arrow record batches, in memory that is given back when they are dropped."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miniray.data.slabs import Slabs, copied, has_dictionary, size_for
from miniray.data.source import Getter, Layout, Rows
from miniray.data.values import getter, is_number, number_type, numbers


class ArrowRows(Rows):
    """Record batches one after the other. Nothing made of them shares their memory."""

    def __init__(
        self,
        batches: Sequence[Any],
        start: int,
        slabs: Slabs | None = None,
        own: Sequence[Any] = (),
    ) -> None:
        self._batches = batches
        self._slabs, self._own = slabs, own
        self._starts = [0]
        for batch in batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self._getters: dict[str, Getter] = {}
        self.schema: Any = batches[0].schema if batches else None
        self.start = start
        self.num_rows = self._starts[-1]
        self.nbytes = sum(map(len, own)) or sum(batch.nbytes for batch in batches)
        if self.schema is not None:
            self.layout: Layout = tuple((field.name, str(field.type)) for field in self.schema)

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
        each = [getter(batch.column(name)) for batch in self._batches]
        if len(each) == 1:
            return each[0]
        starts = self._starts

        def get(i: int) -> Any:
            batch = bisect_right(starts, i) - 1
            return each[batch](i - starts[batch])

        return get

    def numbers(self, name: str, index: Sequence[int]) -> npt.NDArray[Any] | None:
        kind = self.schema.field(name).type
        if not is_number(kind) or any(batch.column(name).null_count for batch in self._batches):
            return None
        asked = np.asarray(index)
        found = np.empty(len(asked), dtype=number_type(kind))
        which = np.searchsorted(self._starts, asked, side="right") - 1
        for number in set(which.tolist()):
            inside = which == number
            values = numbers(self._batches[number].column(name))
            found[inside] = values[asked[inside] - self._starts[number]]
        return found

    def rows(self, index: Sequence[int]) -> list[Any]:
        getters = [(name, self.getter(name)) for name in self.names]
        return [{name: get(i) for name, get in getters} for i in index]

    def arrow(self, index: Sequence[int]) -> Any:
        import pyarrow as pa

        return pa.Table.from_batches(self._batches).take(pa.array(index))


def rows_of(batches: Iterable[Any], start: int, slabs: Slabs | None) -> ArrowRows:
    """Record batches as rows, copied into slabs one by one as they come."""
    kept, own = [], []
    for batch in batches:
        if slabs is not None and not any(has_dictionary(field.type) for field in batch.schema):
            own.append(slabs.take(size_for(batch)))
            batch = copied(batch, own[-1])
        kept.append(batch)
    if len(own) != len(kept):
        slabs, own = None, []
    return ArrowRows(kept, start, slabs, own)
