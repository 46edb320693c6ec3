"""Which rows are a rank's: its part of what is left of the epoch, and where those rows are.

Arithmetic only; nothing is read but what the order itself needs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import overload

from miniray.data import progress
from miniray.data.epochs import Epochs
from miniray.data.gather import Places
from miniray.data.order import Order, SequentialOrder, starts_of
from miniray.data.selection import Selection
from miniray.data.source import Source

RowId = tuple[str, int]  # the file, and the row within it


class Share(Epochs):
    """A rank's part, by index, by position in the epoch's order, and by place in the data."""

    @abstractmethod
    def order_of(self, epoch: int, world_size: int) -> Order:
        """The order of an epoch that ``world_size`` ranks begin."""

    @property
    @abstractmethod
    def _selected(self) -> Selection:
        """The rows that take part."""

    @property
    @abstractmethod
    def sources(self) -> list[Source]:
        """Where the rows come from: one, or those of a mixture."""

    def _parts(self) -> tuple[progress.Intervals, progress.Intervals]:
        """What is left of the epoch for all ranks, and this rank's part of it."""
        if self._part is None:
            snap = None
            if self._group_by is not None:
                from miniray.data.groups import GroupedOrder

                order = self._current_order()
                assert isinstance(order, GroupedOrder)
                snap = order.snap
            left = progress.remaining(self._n(), self._history, self._even, snap, self._chunk_left)
            edges = progress.cuts(left, self._world_size, self._even, snap)
            own = progress.portion(left, edges[self._rank], edges[self._rank + 1])
            self._part = left, own
        return self._part

    def positions(self, index: Sequence[int]) -> list[int]:
        """Positions in the epoch's order of this rank's ``index``-th rows (padding included)."""
        left, own = self._parts()
        count = progress.size(own)
        if count:
            return progress.positions_at(own, [i if i < count else 0 for i in index])
        spare = self._rank % max(1, progress.size(left))
        return progress.positions_at(left, [spare] * len(index))

    def places(self, index: Sequence[int]) -> Places:
        """Where this rank's ``index``-th rows are."""
        return self.places_of(self.positions(index))

    def places_of(self, positions: Sequence[int]) -> Places:
        """Where the rows at ``positions`` of the epoch's order are."""
        return self.places_in(self._current_order(), positions)

    def _current_order(self) -> Order:
        if self._order is None:
            self._order = self.order_of(self._epoch, self._began_with)
        return self._order

    def ordinals(self, positions: Sequence[int]) -> list[int]:
        """The rows at ``positions`` by their number among all rows that take part, unshuffled."""
        return self.ordinals_in(self._current_order(), positions)

    def ordinals_in(self, order: Order, positions: Sequence[int]) -> list[int]:
        blocks, places = order.places(positions)
        starts = starts_of(self._selected.sizes)
        return [starts[block] + place for block, place in zip(blocks, places, strict=True)]

    def places_of_ordinals(self, ordinals: Sequence[int]) -> Places:
        """Where rows are, by their number among all rows that take part."""
        return self.places_in(SequentialOrder(self._selected.sizes), ordinals)

    def places_in(self, order: Order, positions: Sequence[int]) -> Places:
        """Where the rows at ``positions`` of any order of this dataset are."""
        blocks, places = order.places(positions)
        rows = self._selected.rows(blocks, places)
        return Places([0] * len(blocks), blocks, rows)

    def __len__(self) -> int:
        left, own = self._parts()
        if self._even == "pad":
            return (progress.size(left) + self._world_size - 1) // self._world_size
        return progress.size(own)

    def name_rows(self, places: Places) -> list[RowId]:
        """Stable ids of rows: file, and row within the file."""
        tables = [source.blocks for source in self.sources]
        found = []
        for source, block, row in zip(places.source, places.block, places.row, strict=True):
            blocks = tables[source]
            found.append((blocks.files[blocks.file[block]], blocks.first[block] + row))
        return found

    @property
    def row_ids(self) -> RowIds:
        """Ids ``(file, row)`` of this rank's rows in this epoch, in order; nothing is read."""
        return RowIds(self)

    @property
    def padded(self) -> list[RowId]:
        """Rows this rank gets although it or another rank has them (``even="pad"``)."""
        own = progress.size(self._parts()[1])
        return self.name_rows(self.places(range(own, len(self))))

    @property
    def dropped(self) -> list[RowId]:
        """Rows no rank gets in this epoch (``even="drop"``); the same on all ranks."""
        left = self._parts()[0]
        total = progress.size(left)
        shared = total - total % self._world_size if self._even == "drop" else total
        return self.name_rows(self.places_of(progress.positions_at(left, range(shared, total))))


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
