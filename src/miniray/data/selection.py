"""Which rows of each block take part: those the filter keeps, and of these a subset.

Holds a number a block (and a bit a row where there is a filter), whatever the number of rows drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from miniray.data.distinct import distinct
from miniray.data.permutation import Permutation, Positions, derive_key
from miniray.data.source import Blocks

_CHUNK = 1 << 16


class Kept:
    """The answer of a filter: a bit a row, packed, for each file."""

    def __init__(self, blocks: Blocks, bits: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._blocks, self._bits = blocks, bits
        self.sizes = np.array([len(self(block)) for block in range(len(blocks))], dtype=np.int64)

    def __call__(self, block: int) -> Positions:
        """The rows of a block that are kept."""
        start, count = int(self._blocks.first[block]), int(self._blocks.rows[block])
        first, last = start // 8, -(-(start + count) // 8)
        packed = self._bits[int(self._blocks.file[block])][first:last]
        unpacked = np.unpackbits(packed, bitorder="little")
        return np.flatnonzero(unpacked[start - 8 * first : start - 8 * first + count])


class Selection:
    """``sizes``: rows of each block that take part, after ``seed`` drew ``max_samples``."""

    def __init__(
        self,
        rows: npt.NDArray[np.int64],
        kept: Kept | None,
        max_samples: int,
        seed: int | None,
    ) -> None:
        self._kept = kept
        self._available = rows if kept is None else kept.sizes
        self._seed = seed
        self._drawn = -1 < max_samples < int(self._available.sum())
        self.sizes = self._draw(max_samples) if self._drawn else self._available
        self.n = int(self.sizes.sum())
        self.everything = kept is None and not self._drawn
        self._chosen = lru_cache(maxsize=256)(self._choose)

    def _draw(self, max_samples: int) -> npt.NDArray[np.int64]:
        """How many of each block: as a draw of single rows without replacement would give."""
        total = int(self._available.sum())
        ends = np.cumsum(self._available)
        draw = Permutation(total, derive_key(self._seed, "subset"))
        # Whichever is less is drawn: those in, or those out.
        count = min(max_samples, total - max_samples)
        counts = np.zeros(len(ends), dtype=np.int64)
        for start in range(0, count, _CHUNK):
            rows = draw(np.arange(start, min(count, start + _CHUNK)))
            blocks = np.searchsorted(ends, rows, side="right")
            counts += np.bincount(blocks, minlength=len(ends))
        return counts if count == max_samples else self._available - counts

    def _choose(self, block: int) -> Positions:
        chosen: Positions
        if self._drawn:
            draw = Permutation(int(self._available[block]), derive_key(self._seed, "subset", block))
            chosen = np.sort(draw(np.arange(int(self.sizes[block]))))
        else:
            chosen = np.arange(int(self.sizes[block]))
        return chosen if self._kept is None else self._kept(block)[chosen]

    def rows(self, blocks: Positions, places: Positions) -> Positions:
        """From places among the chosen rows of blocks to rows of the blocks."""
        if self.everything:
            return places
        found = np.empty_like(places)
        for block in distinct(blocks).tolist():
            inside = blocks == block
            found[inside] = self._chosen(block)[places[inside]]
        return found
