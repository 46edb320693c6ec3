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
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from miniray.checks import check_choice
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.data.plan.shard import part_bounds
from miniray.data.sources.base import Blocks, Source

Shuffle = bool | Literal["window", "global"]


class Order(ABC):
    """``sizes`` are the blocks' rows; a place is (block, row among those of the block)."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.n = sum(sizes)

    @abstractmethod
    def places(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks, and rows within them, at ``positions``."""


class SequentialOrder(Order):
    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self._starts = starts_of(sizes)

    def places(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        starts = self._starts
        # Of blocks that start at the same row, all but the last are empty.
        blocks = [bisect_right(starts, position) - 1 for position in positions]
        return blocks, [p - starts[block] for p, block in zip(positions, blocks, strict=True)]


class GlobalOrder(SequentialOrder):
    def __init__(self, sizes: Sequence[int], seed: int, epoch: int) -> None:
        super().__init__(sizes)
        self._rows = Permutation(self.n, derive_key(seed, "order", epoch))

    def places(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        return super().places(self._rows.rows(positions))


class WindowOrder(Order):
    """Blocks permuted, then rows within windows of at most ``window`` bytes (or one block).

    A block larger than that is cut: its windows follow each other, so that it is read through once.
    Windows end where the part of a rank ends, of the ``world_size`` ranks that began the epoch: a
    rank reads its own blocks and at most the two it shares with its neighbours.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        nbytes: Sequence[int],
        seed: int,
        epoch: int,
        window: int,
        world_size: int,
    ) -> None:
        super().__init__(sizes)
        self._key = (seed, "rows", epoch)
        shuffle = Permutation(len(sizes), derive_key(seed, "blocks", epoch))
        self._blocks = shuffle.rows(range(len(sizes)))
        self._natural = SequentialOrder([sizes[block] for block in self._blocks])
        parts = [part_bounds(self.n, rank, world_size)[0] for rank in range(world_size)]
        ordered = [(sizes[block], nbytes[block]) for block in self._blocks]
        self._edges = sorted({*_window_edges(ordered, window, parts), *parts, self.n})
        self._permutation = lru_cache(maxsize=16)(self._make_permutation)

    def _make_permutation(self, start: int, size: int) -> Permutation:
        return Permutation(size, derive_key(*self._key, start))

    def places(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        rows: list[int] = []
        at = 0
        while at < len(positions):
            window = bisect_right(self._edges, positions[at]) - 1
            start, end = self._edges[window], self._edges[window + 1]
            inside = []
            while at < len(positions) and start <= positions[at] < end:
                inside.append(positions[at] - start)
                at += 1
            shuffle = self._permutation(start, end - start)
            rows += [start + row for row in shuffle.rows(inside)]
        which, rows = self._natural.places(rows)
        return [self._blocks[block] for block in which], rows


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where each of things of these sizes begins that come one after the other."""
    return list(accumulate(sizes, initial=0))[:-1]


def _window_edges(
    blocks: Sequence[tuple[int, int]], window: int, parts: Sequence[int]
) -> list[int]:
    """Where windows begin: as many whole blocks as fit, or a part of one that does not.

    ``blocks`` are (rows, bytes) in their order. The first windows of a rank's part are an eighth, a
    quarter and a half of the others: a window is read before its first row comes.
    """
    starts = starts_of([rows for rows, _ in blocks])
    ends = list(accumulate(nbytes for _, nbytes in blocks))
    # Blocks in which parts begin; the end of the data after the last.
    begins = [*(bisect_right(starts, part) - 1 for part in parts), len(blocks)]
    edges: list[int] = []
    block, part, limit = 0, 0, window
    while block < len(blocks):
        while begins[part] <= block:
            part, limit = part + 1, max(1, window // 8)
        (rows, size), start = blocks[block], starts[block]
        if size > limit:
            pieces = -(-size // limit)
            edges += [start + rows * piece // pieces for piece in range(pieces)]
            block += 1
        else:
            edges.append(start)
            fitting = bisect_right(ends, ends[block] - size + limit)
            block = min(max(block + 1, fitting), begins[part])
        limit = min(window, 2 * limit)
    return edges


def window_bytes(budget: int, blocks: Blocks) -> int:
    """Bytes of the blocks among which rows are mixed.

    An eighth of the budget; up to a quarter where less than four blocks would fit. Two windows are
    held at times.
    """
    ordered = sorted(blocks.nbytes)
    half = len(ordered) // 2
    typical = (ordered[half] + ordered[~half]) // 2 if ordered else 0
    return max(1, min(budget // 4, max(budget // 8, 4 * typical)))


def shuffle_kind(shuffle: Shuffle, source: Source) -> Literal["window", "global"] | None:
    check_choice("shuffle", shuffle, (None, True, False, "window", "global"))
    if isinstance(shuffle, str) or not shuffle:
        return shuffle or None
    return "global" if source.random_access else "window"
