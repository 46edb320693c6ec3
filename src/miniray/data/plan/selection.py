"""Which rows of each block take part: those the filter keeps, and of these a subset.

Holds a number a block (and a bit a row where there is a filter), whatever the number of rows drawn.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from miniray.data.plan.permutation import Permutation, derive_key
from miniray.data.sources.base import Blocks

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_CHUNK = 1 << 16


class Kept:
    """The answer of a filter: a bit a row, packed, for each file."""

    def __init__(self, blocks: Blocks, bits: Sequence[npt.NDArray[np.uint8]]) -> None:
        self._blocks, self._bits = blocks, bits
        self.sizes = [len(self(block)) for block in range(len(blocks))]

    def __call__(self, block: int) -> list[int]:
        """The rows of a block that are kept."""
        import numpy as np

        start, count = self._blocks.first[block], self._blocks.rows[block]
        first, last = start // 8, -(-(start + count) // 8)
        packed = self._bits[self._blocks.file[block]][first:last]
        unpacked = np.unpackbits(packed, bitorder="little")
        found = np.flatnonzero(unpacked[start - 8 * first : start - 8 * first + count])
        return found.tolist()  # type: ignore[no-any-return]


class Selection:
    """``sizes``: rows of each block that take part, after ``seed`` drew ``max_samples``."""

    def __init__(
        self,
        rows: Sequence[int],
        kept: Kept | None,
        max_samples: int,
        seed: int | None,
    ) -> None:
        self._kept = kept
        self._available = rows if kept is None else kept.sizes
        self._seed = seed
        self._drawn = -1 < max_samples < sum(self._available)
        self.sizes = self._draw(max_samples) if self._drawn else self._available
        self.n = sum(self.sizes)
        self.everything = kept is None and not self._drawn
        self._chosen = lru_cache(maxsize=256)(self._choose)

    def _draw(self, max_samples: int) -> list[int]:
        """How many of each block: as a draw of single rows without replacement would give."""
        ends = list(accumulate(self._available))
        total = ends[-1]
        draw = Permutation(total, derive_key(self._seed, "subset"))
        # Whichever is less is drawn: those in, or those out.
        count = min(max_samples, total - max_samples)
        counts = [0] * len(ends)
        for start in range(0, count, _CHUNK):
            for row in draw.rows(range(start, min(count, start + _CHUNK))):
                counts[bisect_right(ends, row)] += 1
        if count == max_samples:
            return counts
        return [have - out for have, out in zip(self._available, counts, strict=True)]

    def _choose(self, block: int) -> Sequence[int]:
        chosen: Sequence[int] = range(self.sizes[block])
        if self._drawn:
            draw = Permutation(self._available[block], derive_key(self._seed, "subset", block))
            chosen = sorted(draw.rows(chosen))
        if self._kept is None:
            return chosen
        kept = self._kept(block)
        return [kept[row] for row in chosen]

    def rows(self, blocks: Sequence[int], places: Sequence[int]) -> Sequence[int]:
        """From places among the chosen rows of blocks to rows of the blocks."""
        if self.everything:
            return places
        return [self._chosen(block)[place] for block, place in zip(blocks, places, strict=True)]
