"""The parts of a filter's work: rows that one rank filters while it holds their lock."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from miniray.data.filter.store import Bits
from miniray.data.plan.shard import part_bounds
from miniray.data.sources.base import Blocks, Rows, Source
from miniray.errors import DataError, RowError

_LEAST_ROWS, _MOST_PARTS = 1024, 512
_LARGE = 64 << 20  # bytes of a block from which on it is read in slices
_BEAT = 1.0  # seconds after which a rank shows that it is still at its part


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


class RowFilter:
    """A filter on the rows of a source. May be called by several threads at once."""

    def __init__(
        self, source: Source, function: Callable[[Any], bool], columns: Sequence[str] | None
    ) -> None:
        self._source, self._function, self._columns = source, function, columns
        self._blocks = source.blocks
        self._local = threading.local()
        #: Set where the other threads need not go on.
        self.stopped = False

    def __call__(self, part: Part, lock: Path | None) -> Bits:
        """A bit for each row of a part. Now and then ``lock`` is touched, as a sign of life.

        Raises ``RowError`` where the filter raises, ``CancelledError`` once it is ``stopped``.
        """
        file, kept = self._blocks.files[part.file], []
        beaten = time.monotonic()
        for number, row in self._rows_of(part):
            try:
                kept.append(bool(self._function(row)))
            except Exception as error:  # the user's code may raise anything
                raise RowError(
                    f"{file}, row {number}: the filter raised {type(error).__name__}: {error}",
                    file,
                    number,
                ) from error
            if self.stopped:
                raise CancelledError
            if time.monotonic() - beaten > _BEAT:
                if lock is not None:
                    _touch(lock)
                beaten = time.monotonic()
        return np.packbits(np.array(kept, dtype=bool), bitorder="little")

    def _rows_of(self, part: Part) -> Iterator[tuple[int, Any]]:
        """Rows with their numbers in the file."""
        for block, first, end in part.pieces:
            # A slice at a time: a row group may be larger than memory.
            slices = -(-self._blocks.nbytes[block] // _LARGE) * 4
            step = max(1, self._blocks.rows[block] // slices) if slices > 4 else max(1, end - first)
            for start in range(first, end, step):
                stop = min(end, start + step)
                rows = self._read(block, start, stop)
                inside = range(start - rows.start, stop - rows.start)
                yield from enumerate(rows.rows(inside), self._blocks.first[block] + start)

    def _read(self, block: int, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of a block, or all of one that is kept for its other parts."""
        kept: tuple[int, Rows] | None = getattr(self._local, "kept", None)
        if kept is not None and kept[0] == block:
            return kept[1]
        small = self._blocks.nbytes[block] <= _LARGE
        if small:
            start, stop = 0, self._blocks.rows[block]
        rows = self._source.read(block, start, stop, self._columns)
        if rows.layout is not None:
            there = dict(rows.layout)
            for name in self._columns or ():
                if name not in there:
                    file = self._blocks.files[self._blocks.file[block]]
                    raise DataError(f"{file} has no column {name!r}, which filter_columns names")
        self._local.kept = (block, rows) if small else None
        return rows


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # gone, or not ours to change
        os.utime(path)
