"""Blocks in memory under a byte limit, and rows gathered from them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from miniray.data.loader.columns import is_record_batch, merge_rows, take_rows
from miniray.data.locations import BlockKey, Locations
from miniray.data.sources.base import Source
from miniray.errors import DataError

#: Null bitmaps and padding, which estimates don't include.
_TOLERANCE_BYTES = 1_000_000


class BlockBuffer:
    """Blocks of a window and of the next one, at most ``limit_bytes`` of them.

    Actual sizes are counted, not estimates. Sources with random access are read directly.
    """

    def __init__(
        self, sources: Sequence[Source], limit_bytes: int, columns: Sequence[str] | None = None
    ) -> None:
        self._sources, self._limit, self._columns = sources, limit_bytes, columns
        self._blocks: dict[BlockKey, Any] = {}  # in order of use
        self._errors: dict[BlockKey, Exception] = {}
        self._lock = threading.Lock()
        self.pid = os.getpid()
        self._has_garbage = False
        self.nbytes = 0
        #: Largest number of bytes held so far.
        self.peak = 0

    def load(self, blocks: Iterable[BlockKey], ahead: bool = False) -> None:
        """Read blocks that aren't held. An error is raised by the first row that needs its block.

        With ``ahead``, stop when a block doesn't fit besides those that are held.
        """
        if self._has_garbage:
            # In the thread that reads: allocators release only what their thread allocated.
            self._has_garbage = False
            release_memory()
        for key in blocks:
            if key in self._blocks or key in self._errors:
                continue
            estimate = int(self._sources[key.source].list_blocks().nbytes[key.block])
            if ahead and self.nbytes + estimate > self._limit:
                return
            try:
                rows = self._sources[key.source].read_block(key.block, self._columns)
            except Exception as error:  # files and user code can raise anything
                self._errors[key] = error
                continue
            with self._lock:
                self._blocks[key] = rows
                self.nbytes += _find_size(rows)
                self.peak = max(self.peak, self.nbytes)
            if not ahead and self.nbytes > self._limit + _TOLERANCE_BYTES:
                self._errors[key] = self._create_limit_error(key)
                self._drop([key])

    def _create_limit_error(self, key: BlockKey) -> DataError:
        source = self._sources[key.source]
        block = source.list_blocks()[key.block]
        path = source.files[block.file]
        estimate = sum(
            int(self._sources[held.source].list_blocks().nbytes[held.block])
            for held in self._blocks
        )
        return DataError(
            f"{path}, row {block.first_row}: a window takes {_format_mb(self.nbytes)} or more when"
            f" decoded (estimated {_format_mb(estimate)}), but half of memory_budget is"
            f" {_format_mb(self._limit)}. Pass a smaller window_bytes= or a larger memory_budget=,"
            " or rewrite the file with `miniray data repack`.",
            path,
            block.first_row,
        )

    def keep_only(self, blocks: Iterable[BlockKey]) -> None:
        """Release all other blocks and return their memory to the system."""
        keep = set(blocks)
        with self._lock:
            unused = [key for key in self._blocks if key not in keep]
            self._errors = {key: error for key, error in self._errors.items() if key in keep}
        self._drop(unused)

    def _drop(self, keys: Iterable[BlockKey]) -> None:
        with self._lock:
            dropped = [self._blocks.pop(key) for key in keys]
            self.nbytes -= sum(map(_find_size, dropped))
        self._has_garbage = self._has_garbage or any(map(is_record_batch, dropped))

    def gather(self, rows: Locations) -> Any:
        """Return rows in order, as a record batch or a list of Python objects."""
        array = rows.array
        # Consecutive rows of a block are one slice.
        follows = np.zeros(len(array), dtype=bool)
        follows[1:] = (np.diff(array, axis=0) == (0, 0, 1)).all(axis=1)
        starts = np.flatnonzero(~follows)
        counts = np.diff(starts, append=len(array))
        pieces = []
        for (source, block, row), count in zip(
            array[starts].tolist(), counts.tolist(), strict=True
        ):
            pieces.append(self._slice(BlockKey(source, block), row, count))
        return merge_rows(pieces, [self._sources[i] for i in array[starts, 0].tolist()])

    def _slice(self, key: BlockKey, row: int, count: int) -> Any:
        held = self._blocks.get(key)
        if held is None:
            if key in self._errors:
                raise self._errors.pop(key)
            source = self._sources[key.source]
            assert source.random_access
            if hasattr(source, "read_rows"):
                return source.read_rows(key.block, row, count)
            held = source.read_block(key.block, self._columns)
        return held.slice(row, count) if is_record_batch(held) else held[row : row + count]

    def read_rows(self, rows: Locations) -> Any:
        """Read and gather rows anywhere in the data. Keeps the blocks that were used last."""
        pairs, which = np.unique(rows.array[:, :2], axis=0, return_inverse=True)
        keys = [BlockKey(source, block) for source, block in pairs.tolist()]
        held = [key for key in keys if not self._sources[key.source].random_access]
        for key in held:
            if key in self._blocks:
                self._blocks[key] = self._blocks.pop(key)  # now the last one to be dropped
        if self._make_room(held):
            self.load(held)
            return self.gather(rows)
        # The rows need more blocks than fit: read one block after the other.
        parts, chosen = [], []
        for number, key in enumerate(keys):
            if key in held:
                self._make_room([key])
                self.load([key])
            chosen.append(np.flatnonzero(which.reshape(-1) == number))
            parts.append(self.gather(Locations(rows.array[chosen[-1]])))
        merged = merge_rows(parts, [self._sources[key.source] for key in keys])
        return take_rows(merged, np.argsort(np.concatenate(chosen)).tolist())

    def _make_room(self, keys: Sequence[BlockKey]) -> bool:
        """Drop the least recently used blocks until ``keys`` fit. Return whether they do."""
        missing = [key for key in keys if key not in self._blocks]
        needed = sum(
            int(self._sources[key.source].list_blocks().nbytes[key.block]) for key in missing
        )
        for key in [key for key in self._blocks if key not in keys]:
            if self.nbytes + needed <= self._limit:
                break
            self._drop([key])
        return self.nbytes + needed <= self._limit or len(keys) <= 1

    def clear(self) -> None:
        """Release all blocks."""
        self._drop(list(self._blocks))
        self._errors.clear()


def _find_size(rows: Any) -> int:
    return int(getattr(rows, "nbytes", 0))


def release_memory() -> None:
    """Return memory that pyarrow has freed to the system."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()


def _format_mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3g} MB"
