"""Rows from many blocks put together, with the blocks held in memory under a limit of bytes."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from miniray.data.columns import columns_of
from miniray.data.distinct import distinct, first_places
from miniray.data.permutation import Positions
from miniray.data.slabs import Slabs
from miniray.data.source import Blocks, Rows, Source

Piece = tuple[int, int, int]  # source, block, slice of the block


@dataclass(frozen=True)
class Places:
    """Where rows are: for each the source, the block and the row within the block."""

    source: Positions
    block: Positions
    row: Positions

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Any) -> Places:
        return Places(self.source[index], self.block[index], self.row[index])


class Slices:
    """Blocks of more than ``largest`` bytes, which are read in slices of a quarter of that."""

    def __init__(self, blocks: Blocks, largest: int) -> None:
        count = -(-blocks.nbytes // max(1, largest // 4))
        self.rows = np.maximum(1, -(-blocks.rows // np.maximum(1, count)))
        self.rows[blocks.nbytes <= largest] = np.iinfo(np.int64).max


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
        self._slices = [Slices(source.blocks, largest) for source in sources]
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
        if not len(places):
            return []
        which = self._which(places)
        code = (places.source << 48) ^ (places.block << 16) ^ which
        first = first_places(code)
        return [
            (int(places.source[i]), int(places.block[i]), int(which[i])) for i in first.tolist()
        ]

    def _which(self, places: Places) -> Positions:
        if len(self._slices) == 1:
            return places.row // self._slices[0].rows[places.block]
        which = np.empty_like(places.row)
        for number in distinct(places.source).tolist():
            inside = places.source == number
            rows = self._slices[number].rows[places.block[inside]]
            which[inside] = places.row[inside] // rows
        return which

    def expected(self, piece: Piece) -> int:
        """About how many bytes a piece will take."""
        source, block, _ = piece
        total, rows = int(self._blocks[source].nbytes[block]), int(self._blocks[source].rows[block])
        part = min(rows, int(self._slices[source].rows[block]))
        return total * part // max(1, rows)

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
        size = int(self._slices[source].rows[block])
        rows = int(self._blocks[source].rows[block])
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

    def _parts(
        self, places: Places, held: dict[Piece, Rows] | None
    ) -> list[tuple[Rows, Positions, Positions]]:
        """(rows of a piece, which of them, where they go) for each piece."""
        which = self._which(places)
        code = (places.source << 48) ^ (places.block << 16) ^ which
        order = np.argsort(code, kind="stable")
        edges = [0, *(np.flatnonzero(np.diff(code[order])) + 1).tolist(), len(order)]
        groups = [order[a:b] for a, b in pairwise(edges) if a < b]
        pieces = [
            (int(places.source[g[0]]), int(places.block[g[0]]), int(which[g[0]])) for g in groups
        ]
        if held is None:
            held = {piece: self.get(piece, keep=pieces) for piece in pieces}
        return [
            (held[piece], places.row[group] - held[piece].start, group)
            for piece, group in zip(pieces, groups, strict=True)
        ]

    def columns(self, places: Places, held: dict[Piece, Rows] | None = None) -> dict[str, Any]:
        """The rows at ``places`` as columns; ``held`` has their pieces where they are read."""
        parts = self._parts(places, held)
        first: Any = parts[0][0]
        schema = getattr(first, "schema", None)
        # Rows that are Python objects, or a mixture of different sources.
        if schema is None or any(getattr(rows, "schema", None) != schema for rows, _, _ in parts):
            return columns_of(self._rows(parts, len(places)))
        from miniray.data.arrow_rows import columns

        return columns(parts)  # type: ignore[arg-type]  # those with a schema are ArrowRows

    def rows(self, places: Places, held: dict[Piece, Rows] | None = None) -> list[Any]:
        """The rows at ``places`` as Python objects."""
        return self._rows(self._parts(places, held), len(places))

    @staticmethod
    def _rows(parts: Sequence[tuple[Rows, Positions, Positions]], count: int) -> list[Any]:
        out: list[Any] = [None] * count
        for rows, index, inside in parts:
            for place, row in zip(inside.tolist(), rows.rows(index), strict=True):
                out[place] = row
        return out

    def arrow(self, places: Places, held: dict[Piece, Rows] | None = None) -> Any:
        """The rows at ``places`` as an Arrow table."""
        import pyarrow as pa

        parts = self._parts(places, held)
        table = pa.concat_tables([rows.arrow(index) for rows, index, _ in parts])
        back = np.argsort(np.concatenate([inside for _, _, inside in parts]))
        return table.take(pa.array(back)).combine_chunks()
