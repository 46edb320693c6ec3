"""Rows from many blocks put together, with the blocks held in memory under a limit of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.loader.columns import Part, columns_of, from_parts
from miniray.data.sources.base import Blocks, Rows, Slabs, Source

Piece = tuple[int, int, int]  # source, block, slice of the block


@dataclass(frozen=True)
class Places:
    """Where rows are: for each the source, the block and the row within the block."""

    source: Sequence[int]
    block: Sequence[int]
    row: Sequence[int]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: slice) -> Places:
        return Places(self.source[index], self.block[index], self.row[index])


def slice_rows(blocks: Blocks, largest: int) -> list[int]:
    """Rows that are read at a time, by block; blocks above ``largest`` bytes are read in slices.

    These have a quarter of that.
    """
    found = []
    for rows, nbytes in zip(blocks.rows, blocks.nbytes, strict=True):
        count = -(-nbytes // max(1, largest // 4)) if nbytes > largest else 1
        found.append(max(1, -(-rows // max(1, count))))
    return found


class BlockCache:
    """Pieces of blocks in memory: those in use, and as many of the others as the budget allows.

    A piece in use is never dropped, so the budget is exceeded where one batch alone needs more.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        budget: int,
        largest: int,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._sources = sources
        self._columns = columns
        self._slices = [slice_rows(source.blocks, largest) for source in sources]
        self._blocks = [source.blocks for source in sources]
        self._budget = budget
        self._slabs = Slabs(budget)
        self.pid = os.getpid()
        self._held: OrderedDict[Piece, Rows] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0
        #: The most that was ever held.
        self.peak = 0

    def pieces(self, places: Places) -> list[Piece]:
        """What must be read for these rows, in the order of first use."""
        return list(dict.fromkeys(self._pieces(places)))

    def _pieces(self, places: Places) -> list[Piece]:
        slices = self._slices
        return [
            (source, block, row // slices[source][block])
            for source, block, row in zip(places.source, places.block, places.row, strict=True)
        ]

    def expected(self, piece: Piece) -> int:
        """About how many bytes a piece will take."""
        source, block, _ = piece
        blocks = self._blocks[source]
        part = min(blocks.rows[block], self._slices[source][block])
        return blocks.nbytes[block] * part // max(1, blocks.rows[block])

    def holds(self, piece: Piece) -> bool:
        return piece in self._held

    def get(self, piece: Piece, keep: Iterable[Piece] = ()) -> Rows:
        """The piece, read if need be; makes room by dropping the longest unused but ``keep``."""
        with self._lock:
            found = self._held.get(piece)
            if found is not None:
                self._held.move_to_end(piece)
                return found
            self._make_room(self.expected(piece), {piece, *keep})
        source, block, number = piece
        size, rows = self._slices[source][block], self._blocks[source].rows[block]
        start = 0 if size >= rows else number * size
        read = self._sources[source].read(
            block, start, min(rows, start + size), self._columns, self._slabs
        )
        with self._lock:
            if piece not in self._held:  # another thread may have been quicker
                self._held[piece] = read
                self.nbytes += read.nbytes
                self.peak = max(self.peak, self.nbytes)
            return self._held[piece]

    def _make_room(self, needed: int, keep: set[Piece]) -> None:
        for piece in list(self._held):
            if self.nbytes + needed <= self._budget:
                return
            if piece not in keep:
                self.nbytes -= self._held.pop(piece).nbytes

    def room_for(self, piece: Piece, keep: Container[Piece]) -> bool:
        """Whether ``piece`` can be read without dropping any of ``keep``."""
        with self._lock:
            kept = sum(rows.nbytes for held, rows in self._held.items() if held in keep)
        return kept + self.expected(piece) <= self._budget

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.nbytes = 0

    # -- rows ------------------------------------------------------------------------------------

    def _parts(self, places: Places, held: dict[Piece, Rows] | None) -> list[Part]:
        """(rows of a piece, which of them, where they go) for each piece."""
        found: dict[Piece, tuple[list[int], list[int]]] = {}
        for place, (piece, row) in enumerate(zip(self._pieces(places), places.row, strict=True)):
            part = found.get(piece)
            if part is None:
                part = found[piece] = ([], [])
            part[0].append(row)
            part[1].append(place)
        if held is None:
            held = {piece: self.get(piece, keep=found) for piece in found}
        parts: list[Part] = []
        for piece, (index, inside) in found.items():
            rows = held[piece]
            if rows.start:
                index = [row - rows.start for row in index]
            parts.append((rows, index, inside))
        return parts

    def columns(self, places: Places, held: dict[Piece, Rows] | None = None) -> dict[str, Any]:
        """The rows at ``places`` as columns; ``held`` has their pieces where they are read."""
        parts = self._parts(places, held)
        layout = parts[0][0].layout
        types = None if layout is None else dict(layout)
        # Rows that are Python objects, or a mixture of different sources.
        if layout is None or any(dict(rows.layout or ()) != types for rows, _, _ in parts):
            return columns_of(self._rows(parts, len(places)))
        return from_parts(parts, layout)

    def rows(self, places: Places, held: dict[Piece, Rows] | None = None) -> list[Any]:
        """The rows at ``places`` as Python objects."""
        return self._rows(self._parts(places, held), len(places))

    @staticmethod
    def _rows(parts: Sequence[Part], count: int) -> list[Any]:
        out: list[Any] = [None] * count
        for rows, index, inside in parts:
            for place, row in zip(inside, rows.rows(index), strict=True):
                out[place] = row
        return out

    def arrow(self, places: Places, held: dict[Piece, Rows] | None = None) -> Any:
        """The rows at ``places`` as an Arrow table."""
        import pyarrow as pa

        parts = self._parts(places, held)
        tables = [rows.arrow(index) for rows, index, _ in parts]
        # Sources of a mixture may differ in the order of columns, files in what may be missing.
        table = pa.concat_tables(tables, promote_options="permissive")
        order = [place for _, _, inside in parts for place in inside]
        back = sorted(range(len(order)), key=order.__getitem__)
        return table.take(pa.array(back, pa.int64())).combine_chunks()
