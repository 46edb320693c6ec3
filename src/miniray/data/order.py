"""The order of an epoch: which row of which block is at a position.

All three orders are bijections between ``0 .. n-1`` and the rows, computed where asked for.

- ``SequentialOrder``: as the data lies.
- ``WindowOrder``: blocks in a random order, rows in a random order within windows of consecutive
  blocks. Each block is read once, and only a window of them is held.
- ``GlobalOrder``: all rows in one random order. Every row may be in another block, so each costs
  the reading of its block unless that is still in memory: for data that fits into the memory
  budget, or sources that give single rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from miniray.data.distinct import distinct
from miniray.data.permutation import Permutation, Positions, derive_key
from miniray.data.plan import part_bounds
from miniray.data.source import Blocks, Source

Shuffle = bool | Literal["window", "global"]


class Order(ABC):
    """``sizes`` are the blocks' rows; a place is (block, row among those of the block)."""

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self.n = int(sizes.sum())

    @abstractmethod
    def places(self, positions: Positions) -> tuple[Positions, Positions]:
        """Blocks, and rows within them, at ``positions``."""


class SequentialOrder(Order):
    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        super().__init__(sizes)
        self._starts = np.cumsum(sizes) - sizes

    def places(self, positions: Positions) -> tuple[Positions, Positions]:
        # Of blocks that start at the same row, all but the last are empty.
        blocks = np.searchsorted(self._starts, positions, side="right") - 1
        return blocks, positions - self._starts[blocks]


class GlobalOrder(SequentialOrder):
    def __init__(self, sizes: npt.NDArray[np.int64], seed: int, epoch: int) -> None:
        super().__init__(sizes)
        self._rows = Permutation(self.n, derive_key(seed, "order", epoch))

    def places(self, positions: Positions) -> tuple[Positions, Positions]:
        return super().places(self._rows(positions))


class WindowOrder(Order):
    """Blocks permuted, then rows within windows of at most ``window`` bytes (or one block).

    A block larger than that is cut: its windows follow each other, so that it is read through once.
    Windows end where the part of a rank ends, of the ``world_size`` ranks that began the epoch: a
    rank reads its own blocks and at most the two it shares with its neighbours.
    """

    def __init__(
        self,
        sizes: npt.NDArray[np.int64],
        nbytes: npt.NDArray[np.int64],
        seed: int,
        epoch: int,
        window: int,
        world_size: int,
    ) -> None:
        super().__init__(sizes)
        self._key = (seed, "rows", epoch)
        self._blocks = Permutation(len(sizes), derive_key(seed, "blocks", epoch))(
            np.arange(len(sizes))
        )
        sizes, nbytes = sizes[self._blocks], nbytes[self._blocks]
        self._starts = np.cumsum(sizes) - sizes
        parts = [part_bounds(self.n, rank, world_size)[0] for rank in range(world_size)]
        edges = _window_edges(sizes, nbytes, self._starts, window, parts)
        self._edges = distinct(np.array([*edges, *parts, self.n], dtype=np.int64))
        self._permutation = lru_cache(maxsize=16)(self._make_permutation)

    def _make_permutation(self, start: int, size: int) -> Permutation:
        return Permutation(size, derive_key(*self._key, start))

    def places(self, positions: Positions) -> tuple[Positions, Positions]:
        windows = np.searchsorted(self._edges, positions, side="right") - 1
        rows = np.empty_like(positions)
        for window in distinct(windows).tolist():
            start, end = int(self._edges[window]), int(self._edges[window + 1])
            inside = windows == window
            shuffle = self._permutation(start, end - start)
            rows[inside] = start + shuffle(positions[inside] - start)
        which = np.searchsorted(self._starts, rows, side="right") - 1
        return self._blocks[which], rows - self._starts[which]


def _window_edges(
    sizes: npt.NDArray[np.int64],
    nbytes: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    window: int,
    parts: list[int],
) -> list[int]:
    """Where windows begin: as many whole blocks as fit, or a part of one that does not.

    The first windows of a rank's part are an eighth, a quarter and a half of the others: all of a
    window is read before its first row comes, and somebody is waiting for that.
    """
    ends = np.cumsum(nbytes)
    # Blocks in which parts begin; the end of the data after the last.
    first = np.searchsorted(starts, parts, side="right") - 1
    begins = [*first.tolist(), len(sizes)]
    edges: list[int] = []
    block, part, limit = 0, 0, window
    while block < len(sizes):
        while begins[part] <= block:
            part, limit = part + 1, max(1, window // 8)
        size, start = int(nbytes[block]), int(starts[block])
        if size > limit:
            pieces = -(-size // limit)
            edges += [start + int(sizes[block]) * piece // pieces for piece in range(pieces)]
            block += 1
        else:
            edges.append(start)
            fitting = int(np.searchsorted(ends, int(ends[block]) - size + limit, side="right"))
            block = min(max(block + 1, fitting), begins[part])
        limit = min(window, 2 * limit)
    return edges


def window_bytes(budget: int, blocks: Blocks) -> int:
    """Bytes of the blocks among which rows are mixed.

    An eighth of the budget; up to a quarter where less than four blocks would fit. Two windows are
    held at times.
    """
    typical = int(np.median(blocks.nbytes)) if len(blocks) else 0
    return max(1, min(budget // 4, max(budget // 8, 4 * typical)))


def shuffle_kind(shuffle: Shuffle, source: Source) -> Literal["window", "global"] | None:
    if shuffle is False or shuffle is None:
        return None
    if shuffle is True:
        return "global" if source.random_access else "window"
    if shuffle not in ("window", "global"):
        raise ValueError(f"shuffle must be True, False, 'window' or 'global', not {shuffle!r}")
    return shuffle
