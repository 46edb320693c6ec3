"""Ids of a dataset's rows, computed where asked for; nothing is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from miniray.data.share import Share

RowId = tuple[str, int]


class RowIds(Sequence[RowId]):
    """Ids of a dataset's rows: a lazy sequence of ``(file, row)``."""

    def __init__(self, dataset: Share) -> None:
        self._dataset = dataset
        self._length = len(dataset)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> RowId: ...
    @overload
    def __getitem__(self, index: slice) -> list[RowId]: ...
    def __getitem__(self, index: int | slice) -> RowId | list[RowId]:
        if isinstance(index, slice):
            wanted = range(*index.indices(self._length))
            return self._dataset.name_rows(self._dataset.places(wanted))
        number = int(index) + (self._length if index < 0 else 0)
        if not 0 <= number < self._length:
            raise IndexError(f"row {index} of {self._length}")
        return self._dataset.name_rows(self._dataset.places([number]))[0]

    def __iter__(self) -> Iterator[RowId]:
        for start in range(0, self._length, 4096):
            yield from self[start : start + 4096]
