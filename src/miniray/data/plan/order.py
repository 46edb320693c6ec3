"""Order of an epoch: the row at each position.

An order maps positions ``0 .. n-1`` to *ordinals*, the numbers of the selected rows in data order.
It depends on the data, the selection, the seed, the epoch and ``window_bytes``. It doesn't depend
on the memory budget or the number of ranks.

- ``SequentialOrder``: data order.
- ``WindowOrder``: row groups in random order, rows mixed within windows of consecutive blocks. Each
  block is read once, and only the blocks of a window are held.
- ``GlobalOrder``: one random order of all rows, for sources with random access.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

from miniray.data.locations import BlockKey, Blocks, Int64s, Locations, cumulate
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.data.plan.selection import Selection

Shuffle = bool | Literal["window", "global"]

#: Bytes of consecutive blocks that are read together in data order.
SEQUENTIAL_BYTES = 8_000_000
#: Default of ``window_bytes``.
WINDOW_BYTES = 32_000_000
#: Rows per window if the source has random access and no blocks are held.
RANDOM_ACCESS_ROWS = 4096


class Window(NamedTuple):
    """Rows in delivery order and the blocks to hold for them, in reading order."""

    blocks: Sequence[BlockKey]
    rows: Locations


class EpochOrder(ABC):
    """A bijection from positions to ordinals of the ``n`` selected rows."""

    def __init__(self, n: int) -> None:
        self.n = n

    @abstractmethod
    def map_positions(self, positions: Int64s) -> Int64s:
        """Return the ordinals at ``positions``."""

    def find_window_end(self, position: int) -> int:
        """Return the end of the window that contains ``position``."""
        return min(self.n, (position // RANDOM_ACCESS_ROWS + 1) * RANDOM_ACCESS_ROWS)

    def find_group_start(self, position: int) -> int:
        """Return ``position``, or the next position at which a group of rows begins."""
        return position

    def sort_blocks(self, blocks: Int64s, source: int = 0, position: int = 0) -> Int64s:
        """Return blocks in the order in which they should be read.

        Args:
            blocks: Blocks of a window.
            source: Number of the source in a mixture.
            position: First position of the window.
        """
        return np.sort(blocks)

    def iter_ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of ``range(start, stop)`` that belong to one window each."""
        while start < stop:
            end = min(stop, self.find_window_end(start))
            yield start, end
            start = end


class SequentialOrder(EpochOrder):
    """Blocks in a fixed sequence, cut into windows of whole blocks.

    The base class of ``WindowOrder``; by itself, the data order.
    """

    def __init__(
        self,
        blocks: Blocks,
        selection: Selection,
        window_bytes: int,
        sequence: Int64s | None = None,
    ) -> None:
        super().__init__(selection.count)
        if sequence is None:
            sequence = np.arange(len(blocks), dtype=np.int64)
        self._sequence = sequence = sequence[selection.sizes[sequence] > 0]
        self._ordinals = selection.edges
        self._starts = cumulate(selection.sizes[sequence])
        self._ranks = np.full(len(blocks), len(blocks), dtype=np.int64)
        self._ranks[sequence] = np.arange(len(sequence))
        self._edges = self._starts[_find_window_edges(blocks.nbytes[sequence], window_bytes)]

    def find_window_end(self, position: int) -> int:
        return int(self._edges[np.searchsorted(self._edges, position, side="right")])

    def sort_blocks(self, blocks: Int64s, source: int = 0, position: int = 0) -> Int64s:
        return blocks[np.argsort(self._ranks[blocks], kind="stable")]

    def map_positions(self, positions: Int64s) -> Int64s:
        places = np.searchsorted(self._starts, positions, side="right") - 1
        return self._ordinals[self._sequence[places]] + positions - self._starts[places]


class WindowOrder(SequentialOrder):
    """Row groups permuted, then rows permuted within windows of at most ``window_bytes``.

    The blocks of a row group stay in order, so that a reader moves forward only.
    """

    def __init__(
        self, blocks: Blocks, selection: Selection, seed: int, epoch: int, window_bytes: int
    ) -> None:
        sequence = permute_runs(blocks, derive_key(seed, "blocks", epoch))
        super().__init__(blocks, selection, window_bytes, sequence)
        self._key = (seed, "rows", epoch)
        self._permutation = lru_cache(maxsize=8)(self._create_permutation)

    def _create_permutation(self, window: int) -> Permutation:
        size = int(self._edges[window + 1] - self._edges[window])
        return Permutation(size, derive_key(*self._key, window))

    def map_positions(self, positions: Int64s) -> Int64s:
        windows = np.searchsorted(self._edges, positions, side="right") - 1
        mixed = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            inside = windows == window
            start = self._edges[window]
            mixed[inside] = start + self._permutation(window).map_positions(
                positions[inside] - start
            )
        return super().map_positions(mixed)


class GlobalOrder(EpochOrder):
    """One random order of all rows."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        super().__init__(n)
        self._permutation = Permutation(n, derive_key(seed, "order", epoch))

    def map_positions(self, positions: Int64s) -> Int64s:
        return self._permutation.map_positions(positions)


class DataOrder(EpochOrder):
    """Data order of a source with random access: no blocks are held."""

    def map_positions(self, positions: Int64s) -> Int64s:
        return positions


def permute_runs(blocks: Blocks, key: int) -> Int64s:
    """Return the blocks with their runs in random order and the blocks of a run in order."""
    if not len(blocks):
        return np.empty(0, dtype=np.int64)
    is_first = (np.diff(blocks.file, prepend=-1) != 0) | (np.diff(blocks.run, prepend=-1) != 0)
    starts = np.flatnonzero(is_first)
    lengths = np.diff(starts, append=len(blocks))
    shuffled = Permutation(len(starts), key).map_positions(np.arange(len(starts)))
    lengths = lengths[shuffled]
    offsets = cumulate(lengths)[:-1]
    return np.repeat(starts[shuffled] - offsets, lengths) + np.arange(len(blocks))


def _find_window_edges(nbytes: Int64s, window_bytes: int) -> list[int]:
    """Return the edges of windows of as many blocks as fit into ``window_bytes``, at least one."""
    totals = np.cumsum(nbytes)
    edges, total = [0], 0
    while edges[-1] < len(nbytes):
        end = int(np.searchsorted(totals, total + window_bytes, side="right"))
        edges.append(max(end, edges[-1] + 1))
        total = int(totals[edges[-1] - 1])
    return edges
