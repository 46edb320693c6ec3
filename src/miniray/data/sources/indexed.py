"""Any object with ``len`` and ``[]``: a list, a torch dataset, a memory-mapped array.

Rows are what ``[]`` returns. They are read one by one in the loader's threads, so ``[]`` must be
thread-safe. The source has random access, so ``shuffle=True`` is a global shuffle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, overload

from miniray.data.locations import Blocks
from miniray.data.sources.base import Source
from miniray.errors import DataError, RowError

_BLOCK_ROWS = 4096


class IndexedRows(Sequence[Any]):
    """Rows of a block, read when they are accessed."""

    def __init__(
        self, data: Any, name: str, rows: range, columns: Sequence[str] | None = None
    ) -> None:
        self._data, self._name, self._rows, self._columns = data, name, rows, columns

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return IndexedRows(self._data, self._name, self._rows[index], self._columns)
        number = self._rows[index]
        try:
            row = self._data[number]
            columns = self._columns
            return row if columns is None else {name: row[name] for name in columns}
        except Exception as error:  # user code can raise anything
            raise RowError(
                f"{self._name}, row {number}: {type(error).__name__}: {error}", self._name, number
            ) from error


class IndexedSource(Source):
    """Rows of an object with ``len`` and ``[]``."""

    kind = "indexed"
    random_access = True

    def __init__(self, data: Any, name: str | None = None) -> None:
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise DataError(f"data must support len() and [], but {type(data).__name__} doesn't.")
        if isinstance(data, Mapping) or hasattr(data, "iloc"):
            raise DataError(
                f"[] of a {type(data).__name__} takes names of columns, not numbers of rows. Use"
                " ArrowDataset(...)."
            )
        self._data = data
        self._name = name or type(data).__name__
        count = len(data)
        starts = range(0, count, _BLOCK_ROWS)
        zeros = [0] * len(starts)
        rows = [min(_BLOCK_ROWS, count - start) for start in starts]
        self._blocks = Blocks(zeros, zeros, starts, rows, zeros)

    @property
    def files(self) -> list[str]:
        return [self._name]

    def list_blocks(self) -> Blocks:
        return self._blocks

    def compute_fingerprint(self) -> str:
        text = f"{self._name} {self._blocks.total_rows}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def list_columns(self) -> None:
        return None

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> IndexedRows:
        first, count = int(self._blocks.first_row[block]), int(self._blocks.rows[block])
        return IndexedRows(self._data, self._name, range(first, first + count), columns)
