"""Batches in order, read and decoded ahead under a byte limit.

The consumer's thread gathers the rows of batches. A reader thread loads the blocks of the next
window, and decode threads convert the rows. Errors are raised after all earlier batches.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miniray.data.loader.blocks import BlockBuffer
from miniray.data.loader.columns import merge_rows, take_rows
from miniray.data.loader.decode import Decoder, size_of
from miniray.data.loader.threads import DaemonPool
from miniray.data.locations import Locations, concat_locations

if TYPE_CHECKING:
    from miniray.data.dataset import Dataset
    from miniray.data.loader.batching import TokenBatches

_CLOSE_TIMEOUT_S = 3.0

_open_streams: weakref.WeakSet[BatchStream] = weakref.WeakSet()


class EncodedBatch(NamedTuple):
    """Rows of a batch before decoding, and what the rank has taken after it."""

    rows: Any
    locations: Locations
    taken: Any
    is_last: bool


class Delivery(NamedTuple):
    """A decoded batch, and what the rank has taken after it."""

    batch: Any
    num_rows: int
    locations: Locations
    taken: Any
    is_last: bool


class BatchStream:
    """One pass over the batches of a dataset.

    Args:
        dataset: Dataset of the rank.
        decoder: Converts encoded rows.
        batch_size: Rows per batch, or None for ``tokens``.
        tokens: Cuts chunks of rows into batches.
        drop_last: Leave out a last batch that isn't full.
        prefetch: Batches to decode ahead. 0 uses only the consumer's thread.
        skip: Rows to leave out, and batches after them. With ``tokens``, the rows are whole chunks.
        workers: Threads that decode, at least one if ``prefetch``.
        memory_budget: Half of it is for blocks, half for decoded batches.
    """

    def __init__(
        self,
        dataset: Dataset,
        decoder: Decoder,
        *,
        batch_size: int | None,
        tokens: TokenBatches | None,
        skip: tuple[int, int],
        drop_last: bool,
        prefetch: int,
        workers: int,
        memory_budget: int,
    ) -> None:
        self._dataset, self._decoder, self._tokens = dataset, decoder, tokens
        self._skip = skip
        self._chunk_rows = tokens.chunk_rows if tokens is not None else batch_size or 1
        self._drop_last, self._prefetch = drop_last, prefetch
        self._limit_bytes = memory_budget // 2
        self.buffer = BlockBuffer(dataset.sources, memory_budget // 2)
        self._pid = os.getpid()
        self._reader = DaemonPool("miniray-read", 1 if prefetch else 0)
        self._threads = DaemonPool("miniray-decode", max(1, workers) if prefetch else 0)
        encoded = self._gather_batches() if tokens is None else self._gather_token_batches(tokens)
        self._deliveries = self._decode_ahead(encoded)
        if prefetch:
            _open_streams.add(self)

    def take(self) -> Delivery | None:
        """Return the next batch, or None after the last."""
        if self._pid != os.getpid():
            raise RuntimeError(
                "The iterator of the loader was created before a fork, and its threads are in the"
                " parent process. Create one with iter(loader) in the child process."
            )
        try:
            return next(self._deliveries, None)
        except CancelledError:  # closed by a different thread
            return None

    def close(self) -> None:
        """End the threads and release the memory. Can be called twice and from any thread.

        A thread in a transform that doesn't return can't be ended. It is left behind with a
        ``RuntimeWarning``, and ends with the transform or the interpreter.
        """
        _open_streams.discard(self)
        if self._pid != os.getpid():
            return  # the threads, and the holders of locks, are in the parent
        self._reader.close()
        self._threads.close()
        with contextlib.suppress(ValueError):  # running: the garbage collector is in one of us
            self._deliveries.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        alive = self._reader.join(deadline) + self._threads.join(deadline)
        if alive:
            self._decoder.give_up()
            warnings.warn(
                f"{', '.join(alive)}: a transform hasn't returned {_CLOSE_TIMEOUT_S:.0f} s after"
                " the loader was closed. Its thread is left behind.",
                RuntimeWarning,
                stacklevel=2,
            )
        self.buffer.clear()

    # -- rows ------------------------------------------------------------------------------------

    def _gather_chunks(self, chunk_rows: int) -> Generator[tuple[Any, Locations], None, None]:
        """Yield encoded rows in order, ``chunk_rows`` at a time; the last chunk can have fewer.

        A thread loads the next window if it fits. The rows that a window leaves over are gathered
        at once, so that they don't keep its blocks in memory.
        """
        buffer, sources = self.buffer, self._dataset.sources
        windows = self._dataset.iter_windows(self._skip[0])
        upcoming = next(windows, None)
        loading: Future[bool] | None = None
        parts: list[tuple[Any, Locations]] = []
        missing = chunk_rows
        while upcoming is not None:
            window = upcoming
            if loading is None or not loading.result():
                # In the same thread: every thread that reads has open files.
                self._reader.submit(partial(buffer.load, window.blocks)).result()
            upcoming = next(windows, None)
            if upcoming is not None:
                loading = self._reader.submit(partial(buffer.load, upcoming.blocks, ahead=True))
            start = 0
            while start < len(window.rows):
                locations = window.rows[start : start + missing]
                parts.append((buffer.gather(locations), locations))
                start += len(locations)
                missing -= len(locations)
                if not missing:
                    yield _join_parts(parts, sources)
                    parts, missing = [], chunk_rows
            buffer.keep_only(() if upcoming is None else upcoming.blocks)
        if parts:
            yield _join_parts(parts, sources)

    def _gather_batches(self) -> Generator[EncodedBatch, None, None]:
        skip, size = self._skip[0], self._chunk_rows
        total = len(self._dataset) - skip
        count = total // size if self._drop_last else -(-total // size)
        if count <= 0:
            return
        with contextlib.closing(self._gather_chunks(size)) as chunks:
            for number, (rows, locations) in enumerate(chunks, 1):
                # Count full batches, so that the state of a rank with a short last batch is valid
                # for all ranks.
                yield EncodedBatch(rows, locations, skip + number * size, number == count)
                if number == count:
                    return

    def _gather_token_batches(self, tokens: TokenBatches) -> Generator[EncodedBatch, None, None]:
        total, (start, skipped) = len(self._dataset), self._skip
        for rows, locations in self._gather_chunks(tokens.chunk_rows):
            stop = start + len(locations)
            positions = self._dataset.find_positions(np.arange(start, stop))
            batches = tokens.cut(rows, positions, locations)
            for number, indices in enumerate(batches[skipped:], skipped + 1):
                taken: Any = stop if number == len(batches) else [start, number]
                encoded, found = take_rows(rows, indices), locations.take(indices)
                yield EncodedBatch(encoded, found, taken, taken == total)
            start, skipped = stop, 0

    # -- decoding --------------------------------------------------------------------------------

    def _decode_ahead(
        self, encoded: Generator[EncodedBatch, None, None]
    ) -> Generator[Delivery, None, None]:
        """Decode up to ``prefetch`` batches ahead while the decoded bytes fit into the limit."""
        pending: deque[tuple[EncodedBatch, Future[Any]]] = deque()
        batch_bytes: int | None = None  # unknown until the first batch is decoded
        error: Exception | None = None

        def fill() -> None:
            nonlocal error
            while error is None and self._has_room(len(pending), batch_bytes):
                try:
                    batch = next(encoded)
                    future = self._decoder.start_batch(batch.rows, batch.locations, self._threads)
                    pending.append((batch._replace(rows=None), future))
                except Exception as raised:  # StopIteration, or a block that can't be read
                    error = raised  # deliver the earlier batches first

        with contextlib.closing(encoded):
            fill()
            while pending:
                batch, future = pending.popleft()
                result, num_rows = future.result()
                batch_bytes = max(size_of(result), (batch_bytes or 0) * 7 // 8)
                delivery = Delivery(result, num_rows, batch.locations, batch.taken, batch.is_last)
                del batch, future, result
                fill()  # before the consumer is busy with this batch
                yield delivery
                del delivery
        if not isinstance(error, StopIteration):
            assert error is not None
            raise error

    def _has_room(self, pending: int, batch_bytes: int | None) -> bool:
        if not pending:
            return True
        if batch_bytes is None:
            return False
        return pending < self._prefetch and (pending + 1) * batch_bytes <= self._limit_bytes


def _join_parts(parts: list[tuple[Any, Locations]], sources: Any) -> tuple[Any, Locations]:
    if len(parts) == 1:
        return parts[0]
    owners = [sources[int(locations.array[0, 0])] for _, locations in parts]
    rows = merge_rows([rows for rows, _ in parts], owners)
    return rows, concat_locations([locations for _, locations in parts])


@atexit.register
def _close_all() -> None:
    for stream in list(_open_streams):
        stream.close()
