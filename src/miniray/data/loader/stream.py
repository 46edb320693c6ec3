"""Batches in order, read and decoded ahead under a byte limit.

The consumer's thread gathers the rows of batches. A reader thread loads the blocks of the next
window, and decode threads convert the rows. Errors are raised after all earlier batches.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miniray.data.loader.batching import TokenBatches
from miniray.data.loader.blocks import BlockBuffer
from miniray.data.loader.columns import merge_rows, take_rows
from miniray.data.loader.decode import SKIPPED, Decoder, size_of
from miniray.data.loader.threads import DaemonPool
from miniray.data.observers import observers
from miniray.data.sources.base import Source

if TYPE_CHECKING:
    from miniray.data.loader.loader import DataLoader

_CLOSE_TIMEOUT_S = 3.0


class Batch(NamedTuple):
    """Encoded rows or the decoded batch, and what the rank has taken after it."""

    content: Any
    num_rows: int
    indices: Sequence[int]  # of its rows in the shard
    taken: Any
    is_last: bool


class BatchStream:
    """One pass over the batches of a loader.

    With ``prefetch=0``, everything runs in the consumer's thread. Half of the memory budget is for
    blocks, half for decoded batches.

    Args:
        loader: The loader.
        decoder: Converts encoded rows.
        skip: Rows to leave out, and batches after them. With batches by tokens, the rows are whole
            chunks.
    """

    def __init__(self, loader: DataLoader, decoder: Decoder, skip: tuple[int, int]) -> None:
        self._dataset, self._decoder, self._skip = loader.dataset, decoder, skip
        self._batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self._prefetch, self._limit_bytes = loader.prefetch, loader.memory_budget // 2
        self.buffer = BlockBuffer(self._dataset.sources, self._limit_bytes)
        self._pid = os.getpid()
        self._reader = DaemonPool("miniray-read", 1 if self._prefetch else 0)
        decoders = max(1, loader.decode_workers) if self._prefetch else 0
        self._threads = DaemonPool("miniray-decode", decoders)
        tokens = loader.tokens
        encoded = self._gather_batches() if tokens is None else self._gather_token_batches(tokens)
        self._batches = self._decode_ahead(encoded)

    def take(self) -> Batch | None:
        """Return the next batch, or None after the last."""
        if self._pid != os.getpid():
            raise RuntimeError(
                "The iterator of the loader was created before a fork, and its threads are in the"
                " parent process. Create one with iter(loader) in the child process."
            )
        try:
            return next(self._batches, None)
        except CancelledError:  # closed by a different thread
            return None

    def close(self) -> None:
        """End the threads and release the memory. Can be called from any thread.

        A thread in a transform that doesn't return can't be ended. It is left behind with a
        ``RuntimeWarning``, and ends with the transform or the interpreter.
        """
        if self._pid != os.getpid():
            return  # the threads, and the holders of locks, are in the parent
        self._reader.close()
        self._threads.close()
        with contextlib.suppress(ValueError):  # running: the garbage collector is in one of us
            self._batches.close()
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

    def _gather_chunks(self, chunk_rows: int) -> Generator[Any, None, None]:
        """Yield encoded rows in order, ``chunk_rows`` at a time; the last chunk can have fewer.

        A thread loads the next window if it fits. The rows that a window leaves over are gathered
        at once, so that they don't keep its blocks in memory.
        """
        buffer, sources = self.buffer, self._dataset.sources
        windows = self._dataset.iter_windows(self._skip[0])
        upcoming = next(windows, None)
        parts: list[Any] = []
        owners: list[Source] = []
        missing = chunk_rows
        while upcoming is not None:
            window, upcoming = upcoming, next(windows, None)
            # In the same thread: every thread that reads has open files.
            self._reader.submit(partial(buffer.load, window.blocks)).result()
            if upcoming is not None:
                self._reader.submit(partial(buffer.load, upcoming.blocks, ahead=True))
            start = 0
            while start < len(window.rows):
                locations = window.rows[start : start + missing]
                parts.append(buffer.gather(locations))
                owners.append(sources[locations[0].source])
                start += len(locations)
                missing -= len(locations)
                if not missing:
                    yield parts[0] if len(parts) == 1 else merge_rows(parts, owners)
                    parts, owners, missing = [], [], chunk_rows
            buffer.keep_only(() if upcoming is None else upcoming.blocks)
        if parts:
            yield parts[0] if len(parts) == 1 else merge_rows(parts, owners)

    def _gather_batches(self) -> Generator[Batch, None, None]:
        first, size, end = self._skip[0], self._batch_size, len(self._dataset)
        if self._drop_last:
            end -= (end - first) % size
        with contextlib.closing(self._gather_chunks(size)) as chunks:
            for start in range(first, end, size):
                indices = range(start, min(start + size, end))
                # Count full batches, so that the state of a rank with a short last batch is valid
                # for all ranks.
                taken, is_last = start + size, indices.stop == end
                yield Batch(next(chunks), len(indices), indices, taken, is_last)

    def _gather_token_batches(self, tokens: TokenBatches) -> Generator[Batch, None, None]:
        total, (start, skipped) = len(self._dataset), self._skip
        for rows in self._gather_chunks(tokens.chunk_rows):
            stop = start + len(rows)
            positions = self._dataset.find_positions(np.arange(start, stop))
            batches = tokens.cut(self._dataset, rows, positions)
            for number, chosen in enumerate(batches[skipped:], skipped + 1):
                taken: Any = stop if number == len(batches) else [start, number]
                indices = [start + i for i in chosen]
                encoded = take_rows(rows, chosen)
                yield Batch(encoded, len(chosen), indices, taken, taken == total)
            start, skipped = stop, 0

    # -- decoding --------------------------------------------------------------------------------

    def _decode_ahead(self, encoded: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        """Decode up to ``prefetch`` batches ahead while the decoded bytes fit into the limit."""
        pending: deque[tuple[Batch, Future[Any]]] = deque()
        batch_bytes: int | None = None  # unknown until the first batch is decoded
        error: Exception | None = None

        def fill() -> None:
            nonlocal error
            while error is None and self._has_room(len(pending), batch_bytes):
                try:
                    batch = next(encoded)
                    future = self._decoder.start_batch(batch.content, batch.indices, self._threads)
                    pending.append((batch._replace(content=None), future))
                except Exception as raised:  # StopIteration, or a block that can't be read
                    error = raised  # deliver the earlier batches first

        with contextlib.closing(encoded):
            fill()
            while pending:
                batch, future = pending.popleft()
                content, num_rows = future.result()
                batch_bytes = max(size_of(content), (batch_bytes or 0) * 7 // 8)
                batch = batch._replace(content=content, num_rows=num_rows)
                del future, content
                fill()  # before the consumer is busy with this batch
                yield batch
                del batch
        if not isinstance(error, StopIteration):
            assert error is not None
            raise error

    def _has_room(self, pending: int, batch_bytes: int | None) -> bool:
        if not pending:
            return True
        if batch_bytes is None:
            return False
        return pending < self._prefetch and (pending + 1) * batch_bytes <= self._limit_bytes


class LoaderIterator(Iterator[Any]):
    """One pass over the batches of a loader. Records what was delivered."""

    def __init__(self, loader: DataLoader, stream: BatchStream) -> None:
        self._loader = loader
        #: Whether other ranks can take different numbers of rows, so that states must be merged.
        self._is_alone = loader.tokens is not None
        self._stream: BatchStream | None = stream
        self._is_displaced = False
        # The threads don't refer to this object, so it is collected when the loop drops it.
        self._finalizer = weakref.finalize(self, BatchStream.close, stream)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        while self._stream is not None:
            try:
                batch = self._stream.take()
            except BaseException:
                self.close()
                raise
            if batch is None:
                is_complete = not self._is_displaced and self._stream is not None
                self.close()
                if is_complete:
                    self._finish()
                break
            # With one batch fewer than other ranks, the state is valid for this rank only.
            is_skipped = batch.content is SKIPPED
            self._is_alone = self._is_alone or is_skipped
            self._loader.dataset.record_taken(batch.taken, self._is_alone, batch.is_last)
            if observers:
                dataset = self._loader.dataset
                numbers = dataset.number_positions(dataset.find_positions(batch.indices))
                for observer in observers:
                    observer.on_batch(self._loader, numbers, batch.num_rows)
            if not is_skipped:
                return batch.content
        if self._is_displaced:
            raise RuntimeError(
                "This loop can't continue: a new loop over the loader was started, or set_epoch or"
                " load_state_dict was called. Use loader.shard(rank, world_size) for a second"
                " loader over the same rows."
            )
        raise StopIteration

    def _finish(self) -> None:
        loader, epoch = self._loader, self._loader.epoch
        loader.dataset.finish_epoch()
        for observer in observers:
            observer.on_pass_end(loader)
        if loader.skipped.count:
            warnings.warn(
                f"Rows skipped by the end of epoch {epoch}: {loader.skipped.count},"
                f" {loader.skipped.by_file()}",
                RuntimeWarning,
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self._loader)

    def close(self, is_displaced: bool = False) -> None:
        """End the threads. Rows that were delivered stay delivered.

        ``is_displaced``: The loop doesn't expect this and must not take it for the end.
        """
        self._is_displaced = is_displaced and self._stream is not None
        self._stream = None
        self._finalizer()
