"""The parts of a filter's work: rows that one rank filters while it holds their lock."""

from __future__ import annotations

from dataclasses import dataclass

from miniray.data.parts import part_bounds
from miniray.data.source import Blocks

_LEAST_ROWS, _MOST_PARTS = 1024, 512


@dataclass(frozen=True)
class Part:
    """Rows of one file that are filtered together: (block, start, stop), one after the other."""

    file: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)


def cut(blocks: Blocks, workers: int) -> list[Part]:
    """Parts: the same for every rank, and not so many that they are a burden.

    A block larger than a part is cut: many files have one row group only.
    """
    least = max(16, _LEAST_ROWS // workers, sum(blocks.rows) // _MOST_PARTS)
    parts: list[Part] = []
    pieces: list[tuple[int, int, int]] = []
    rows = 0
    for block, count in enumerate(blocks.rows):
        file, shares = blocks.file[block], max(1, count // least)
        for share in range(shares):
            start, stop = part_bounds(count, share, shares)
            pieces.append((block, start, stop))
            rows += stop - start
            if rows >= least:
                parts.append(Part(file, tuple(pieces)))
                pieces, rows = [], 0
        if pieces and (block + 1 == len(blocks) or blocks.file[block + 1] != file):
            parts.append(Part(file, tuple(pieces)))
            pieces, rows = [], 0
    return parts
