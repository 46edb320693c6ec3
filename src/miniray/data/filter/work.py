"""Work items of a filter: rows that one rank evaluates while it holds their lock."""

from __future__ import annotations

import contextlib
import functools
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
from miniray.data.loader.columns import to_rows
from miniray.data.locations import Blocks
from miniray.data.observers import report_preparation
from miniray.data.plan.shard import split_evenly
from miniray.data.sources.base import Source
from miniray.errors import RowError

_MIN_ROWS, _MAX_ITEMS = 1024, 512
_HEARTBEAT_S = 0.25  # between signs that a rank still works on its item
_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True)
class WorkItem:
    """Rows of one file that are evaluated together, as ``(block, start, stop)`` in order."""

    file: int
    pieces: tuple[tuple[int, int, int], ...]

    @property
    def rows(self) -> int:
        return sum(stop - start for _, start, stop in self.pieces)


def cut_work(blocks: Blocks, workers: int) -> list[WorkItem]:
    """Return the work items, which are the same for every rank. Large blocks are cut."""
    least = max(16, _MIN_ROWS // workers, blocks.total_rows // _MAX_ITEMS)
    parts: list[WorkItem] = []
    pieces: list[tuple[int, int, int]] = []
    rows = 0
    files = blocks.file.tolist()
    for block, count in enumerate(blocks.rows.tolist()):
        file, shares = files[block], max(1, count // least)
        for share in range(shares):
            start, stop = split_evenly(count, share, shares)
            pieces.append((block, start, stop))
            rows += stop - start
            if rows >= least:
                parts.append(WorkItem(file, tuple(pieces)))
                pieces, rows = [], 0
        if pieces and (block + 1 == len(blocks) or files[block + 1] != file):
            parts.append(WorkItem(file, tuple(pieces)))
            pieces, rows = [], 0
    return parts


class RowFilter:
    """Evaluates a filter on rows of a source. Thread-safe."""

    def __init__(
        self, source: Source, function: Callable[[Any], bool], columns: Sequence[str] | None
    ) -> None:
        self._source, self._function, self._columns = source, function, columns
        self._blocks = source.list_blocks()
        self._local = threading.local()
        #: Whether the other threads should stop.
        self.stopped = False

    def evaluate(self, part: WorkItem, lock: Path | None) -> Bits:
        """Return one bit per row of an item. Touch ``lock`` as a heartbeat.

        Raises ``RowError`` if the filter raises, and ``CancelledError`` once it is ``stopped``.
        """
        file, kept = self._source.files[part.file], []
        beaten = time.monotonic()
        for number, row in self._iter_rows(part):
            try:
                kept.append(bool(self._function(row)))
            except Exception as error:  # user code can raise anything
                raise RowError(
                    f"{file}, row {number}: the filter raised {type(error).__name__}: {error}",
                    file,
                    number,
                ) from error
            if self.stopped:
                raise CancelledError
            if time.monotonic() - beaten > _HEARTBEAT_S:
                report_preparation()
                if lock is not None:
                    _touch(lock)
                beaten = time.monotonic()
        return np.packbits(np.array(kept, dtype=bool), bitorder="little")

    def _iter_rows(self, part: WorkItem) -> Iterator[tuple[int, Any]]:
        """Yield rows with their numbers in the file."""
        for block, first, end in part.pieces:
            rows = self._read(block)
            for start in range(first, end, _ROWS_AT_A_TIME):
                decoded = to_rows(
                    rows[start : min(end, start + _ROWS_AT_A_TIME)],
                    functools.partial(self._name_row, block, start),
                )
                yield from enumerate(decoded, int(self._blocks.first_row[block]) + start)

    def _name_row(self, block: int, start: int, index: int) -> tuple[str, int]:
        return self._source.name_row(block, start + index)

    def _read(self, block: int) -> Any:
        """Read a block, which is kept for the next item of this thread."""
        kept: tuple[int, Any] | None = getattr(self._local, "kept", None)
        if kept is not None and kept[0] == block:
            return kept[1]
        rows = self._source.read_block(block, self._columns)
        self._local.kept = (block, rows)
        return rows


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # removed, or owned by a different user
        os.utime(path)
