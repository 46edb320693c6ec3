"""Any object with ``len`` and ``[]``: a list, a torch dataset, a memory-mapped array.

Rows are what ``[]`` returns. They are read one by one in the loader's threads, so ``[]`` must be
thread-safe. The source has random access, so ``shuffle=True`` is a global shuffle.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from miniray.data.locations import Blocks
from miniray.data.sources.base import LazyRows, Source
from miniray.errors import DataError, RowError

_BLOCK_ROWS = 4096


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
        self.files = [name or type(data).__name__]
        count = len(data)
        starts = range(0, count, _BLOCK_ROWS)
        zeros = [0] * len(starts)
        rows = [min(_BLOCK_ROWS, count - start) for start in starts]
        self._blocks = Blocks(zeros, zeros, starts, rows, zeros)

    def list_blocks(self) -> Blocks:
        return self._blocks

    def compute_fingerprint(self) -> str:
        text = f"{self.files[0]} {self._blocks.total_rows}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def list_columns(self) -> None:
        return None

    def read_block(self, block: int, columns: Sequence[str] | None = None) -> LazyRows:
        first, count = int(self._blocks.first_row[block]), int(self._blocks.rows[block])
        return LazyRows(functools.partial(self._read_row, columns), range(first, first + count))

    def _read_row(self, columns: Sequence[str] | None, number: int) -> Any:
        try:
            row = self._data[number]
            return row if columns is None else {name: row[name] for name in columns}
        except Exception as error:  # user code can raise anything
            name = self.files[0]
            raise RowError(
                f"{name}, row {number}: {type(error).__name__}: {error}", name, number
            ) from error
