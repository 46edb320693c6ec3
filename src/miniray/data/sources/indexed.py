"""Anything with ``len`` and ``[]``: a list, a torch dataset, a memory-mapped array.

Rows are whatever ``[]`` gives and are asked for one by one in the loader's threads, so it must be
safe to call from them. Any row costs the same, so the order is shuffled globally.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miniray.data.sources.base import Blocks, Rows, Slabs, Source
from miniray.errors import DataError, RowError

_BLOCK = 4096


class IndexedRows(Rows):
    nbytes = 0

    def __init__(self, data: Any, name: str, first: int, columns: Sequence[str] | None) -> None:
        self._data, self._name, self._first, self._columns = data, name, first, columns
        self.start = 0

    def rows(self, index: Sequence[int]) -> list[Any]:
        return [self._row(self._first + i) for i in index]

    def _row(self, number: int) -> Any:
        try:
            row = self._data[number]
            return row if self._columns is None else {name: row[name] for name in self._columns}
        except Exception as error:  # the user's code may raise anything
            raise RowError(
                f"{self._name}, row {number}: {type(error).__name__}: {error}", self._name, number
            ) from error


class IndexedSource(Source):
    kind = "indexed"
    random_access = True

    def __init__(self, data: Any, name: str | None = None) -> None:
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(
                f"{type(data).__name__} has no len() and [], which IndexedDataset needs"
            )
        if isinstance(data, Mapping) or hasattr(data, "iloc"):
            raise DataError(
                f"[] of a {type(data).__name__} takes names of columns and not numbers of rows; put"
                " it into ArrowDataset(...)"
            )
        self._data = data
        self._name = name or type(data).__name__
        count = len(data)
        starts = range(0, count, _BLOCK)
        self._blocks = Blocks(
            files=[self._name],
            file=[0] * len(starts),
            number=range(len(starts)),
            first=starts,
            rows=[min(_BLOCK, count - start) for start in starts],
            nbytes=[0] * len(starts),
        )

    @property
    def blocks(self) -> Blocks:
        return self._blocks

    @property
    def fingerprint(self) -> str:
        return self._blocks.fingerprint()

    def column_names(self) -> None:
        return None

    def read(
        self,
        block: int,
        start: int,
        stop: int,
        columns: Sequence[str] | None = None,
        slabs: Slabs | None = None,
    ) -> IndexedRows:
        return IndexedRows(self._data, self._name, self._blocks.first[block], columns)
