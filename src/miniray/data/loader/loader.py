"""Batches for a training loop, created in the process that uses them."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from miniray.checks import check_bool, check_choice, check_int, suggest_options
from miniray.data.dataset import Dataset
from miniray.data.loader.batching import TokenBatches
from miniray.data.loader.decode import Decoder, Format, Skipped
from miniray.data.loader.stream import BatchStream, LoaderIterator
from miniray.data.observers import observers
from miniray.data.plan.progress import check_state
from miniray.data.sources.base import select_columns


@suggest_options(
    {
        "num_workers": "Use decode_workers=.",
        "max_tokens": "Use batch_by='tokens', and batch_size= for the number of tokens.",
        "sampler": "Pass rank=, world_size= and shuffle= to the dataset.",
    }
)
class DataLoader:
    """Batches of a rank's shard of ``dataset``, read and decoded ahead in threads of this process.

    A batch is a dict of columns: NumPy arrays for numbers, lists for bytes, text and nested values.

    Args:
        dataset: Dataset or mixture of ``miniray.data``, with its rank.
        batch_size: Rows per batch, or with ``batch_by="tokens"``, maximum tokens of a padded batch.
        collate_fn: Creates the batch from a list of rows, instead of columns.
        transform: ``transform(row)`` is called for each row (a dict) in the threads of the loader,
            for example to decode an image. Dicts that it returns become columns again. To convert
            many rows at once, use ``collate_fn``.
        drop_last: Leave out a last batch that isn't full.
        memory_budget: Bytes that this rank may hold; defaults to the dataset's budget.
        prefetch: Batches to decode ahead. With 0, everything runs in the caller's thread.
        decode_workers: Threads that decode, at least one if ``prefetch``.
        decode_processes: Transform in processes, for transforms that hold the GIL. They are started
            with ``spawn``, so cloudpickle must be able to pickle ``transform``. A process that is
            lost is replaced, and its rows are transformed again.
        batch_by: ``"tokens"`` for batches of rows of similar length. The number of rows times the
            longest row is at most ``batch_size``.
        length: Column with the number of tokens or with the tokens, or a function of a row. For
            ``batch_by="tokens"``.
        bucket_rows: Rows that are sorted by length at a time. For ``batch_by="tokens"``.
        on_error: ``"skip"`` leaves out rows whose transform raises and counts them in
            ``loader.skipped``, so a batch can have fewer rows. ``"raise"`` raises ``RowError``.
        format: ``"numpy"``, ``"torch"`` for tensors instead of NumPy arrays, or ``"arrow"`` for
            tables. The default is ``"numpy"``, and ``"torch"`` for a loader that is passed to a
            torch trainer as ``data=``.

    The threads end if you leave the loop early, if it raises an exception, or if the loader is
    dropped. A new ``iter()`` starts the epoch again, and an earlier loop that hasn't ended then
    raises ``RuntimeError``. After a loop that ran to the end, the next epoch begins.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        memory_budget: int | str | None = None,
        prefetch: int = 2,
        decode_workers: int = 0,
        decode_processes: bool = False,
        batch_by: Literal["tokens"] | None = None,
        length: str | Callable[[Any], int] | None = None,
        bucket_rows: int = 1024,
        on_error: Literal["raise", "skip"] = "raise",
        format: Format | None = None,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"dataset must be a dataset of miniray.data, not {type(dataset).__name__}. Put"
                " anything with len and [] into IndexedDataset(...)."
            )
        self.dataset = dataset
        self.batch_size = check_int("batch_size", batch_size, 1)
        self.drop_last = check_bool("drop_last", drop_last)
        self.collate_fn, self.transform = collate_fn, transform
        self.prefetch = check_int("prefetch", prefetch, 0)
        self.decode_workers = check_int("decode_workers", decode_workers, 0)
        self._decode_processes = check_bool("decode_processes", decode_processes)
        self.batch_by, self._bucket_rows = batch_by, check_int("bucket_rows", bucket_rows, 1)
        self._on_error, self._is_format_fixed = on_error, format is not None
        self._format: Format = "numpy" if format is None else format
        self._check(length)
        #: Cuts batches by tokens.
        self.tokens = (
            None if length is None else TokenBatches(self.batch_size, length, self._bucket_rows)
        )
        if memory_budget is not None:
            dataset.set_memory_budget(memory_budget)
        #: Rows left out in all epochs (``on_error="skip"``).
        self.skipped = Skipped()
        self._running: weakref.ref[LoaderIterator] | None = None
        self._pool: Any = None
        self._skip = (0, 0)  # rows and batches that the next loop leaves out

    def _check(self, length: str | Callable[[Any], int] | None) -> None:
        """Raise an error for invalid combinations of options, before anything is started."""
        transform, batch_by = self.transform, self.batch_by
        for name, function in [("transform", transform), ("collate_fn", self.collate_fn)]:
            if function is not None and not callable(function):
                raise ValueError(f"{name} must be a function, not {function!r}")
        check_choice("format", self._format, ("numpy", "torch", "arrow"))
        check_choice("on_error", self._on_error, ("raise", "skip"))
        check_choice("batch_by", batch_by, (None, "tokens"))
        if self._format == "arrow" and (transform is not None or self.collate_fn is not None):
            raise ValueError("format='arrow' doesn't support transform or collate_fn")
        if self._on_error == "skip" and transform is None:
            raise ValueError("on_error='skip' skips rows whose transform fails, so pass transform=")
        if self._decode_processes and transform is None:
            raise ValueError("decode_processes=True needs a transform to run in the processes")
        if self.decode_workers and not self.prefetch:
            raise ValueError("decode_workers need prefetch >= 1, because they decode ahead")
        if batch_by == "tokens" and length is None:
            raise ValueError(
                "batch_by='tokens' needs length=: the column with the number of tokens of a row (or"
                " with the tokens themselves), or a function of a row"
            )
        if batch_by is None and length is not None:
            raise ValueError("length= is for batch_by='tokens'")
        if isinstance(length, str) and (names := self.dataset.column_names) is not None:
            select_columns(names, [length], "the data")
        if batch_by == "tokens" and self.dataset.split == "interleaved":
            raise ValueError(
                "batch_by='tokens' requires split='contiguous': ranks take different numbers of"
                " rows"
            )
        if batch_by == "tokens" and self.drop_last:
            raise ValueError("drop_last has no meaning for batches by tokens, which differ in rows")

    @property
    def memory_budget(self) -> int:
        """Bytes that this rank may hold."""
        return self.dataset.memory_budget

    @property
    def epoch(self) -> int:
        """Current epoch, from 0. The next one begins when the last batch was delivered."""
        return self.dataset.epoch

    @property
    def is_sharded(self) -> bool:
        """Whether the dataset was created with ``rank`` and ``world_size``, or sharded since."""
        return self.dataset.is_sharded

    @property
    def has_started(self) -> bool:
        """Whether iteration has started."""
        return self.dataset.has_started

    def _find_chunk_rest(self, positions: Sequence[int], batches: int) -> list[int]:
        """Return the positions of a chunk of an earlier run that weren't in its first batches."""
        assert self.tokens is not None
        chunk = np.asarray(positions, dtype=np.int64)
        cut = self.tokens.read(self.dataset, chunk, self.tokens.create_buffer(self.dataset))
        return sorted(positions[i] for batch in cut[batches:] for i in batch)

    def __len__(self) -> int:
        """Number of batches of the epoch, or of the rest of it after ``load_state_dict``."""
        if self.tokens is not None:
            return sum(self.count_chunk_batches())
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def count_chunk_batches(self) -> Iterator[int]:
        """Yield the number of batches by tokens in each chunk of rows. Reads their lengths."""
        assert self.tokens is not None
        total, buffer = len(self.dataset), self.tokens.create_buffer(self.dataset)
        for start in range(0, total, self.tokens.chunk_rows):
            indices = np.arange(start, min(total, start + self.tokens.chunk_rows))
            positions = self.dataset.find_positions(indices)
            yield len(self.tokens.read(self.dataset, positions, buffer))

    def skip_batches(self, batches: int, chunks: int = 0) -> None:
        """Let the next loop leave out batches that this rank has had, and nothing else change.

        A loaded state divides the rest of the epoch among the ranks again. With batches by tokens
        or groups, they then get different rows.

        Args:
            batches: Number of batches.
            chunks: Number of chunks before them, with batches by tokens.
        """
        if self.batch_by:
            self._skip = (chunks * self._bucket_rows, batches)
        else:
            self._skip = (batches * self.batch_size, 0)

    def __iter__(self) -> LoaderIterator:
        self._end_iteration(is_displaced=True)
        self.dataset.start_pass()
        skip, self._skip = self._skip, (0, 0)
        if any(skip):
            taken = list(skip) if skip[1] else skip[0]
            self.dataset.record_taken(taken, alone=self.tokens is not None)
        for observer in observers:
            observer.on_pass_start(self, self.dataset.epoch)
        decoder = Decoder(
            self.dataset.row_ids,
            transform=self.transform,
            collate_fn=self.collate_fn,
            format=self._format,
            on_error=self._on_error,
            skipped=self.skipped,
            pool=self._open_process_pool(),
        )
        iterator = LoaderIterator(self, BatchStream(self, decoder, skip))
        self._running = weakref.ref(iterator)
        return iterator

    def set_default_format(self, format: Format) -> None:
        """Set the format, unless the loader was created with one."""
        if not self._is_format_fixed:
            self._format = check_choice("format", format, ("numpy", "torch", "arrow"))

    def prepare(self) -> DataLoader:
        """Run the filter and build the row cache now, instead of when the first row is read."""
        self.dataset.prepare()
        return self

    def shard(self, rank: int, world_size: int) -> DataLoader:
        """Return the same loader for a different rank. Nothing is read again."""
        other = copy.copy(self)
        other.dataset = self.dataset.shard(rank, world_size)
        return other

    def __getstate__(self) -> dict[str, Any]:
        # Threads, processes and counts belong to one loader in one process.
        return {**self.__dict__, "_running": None, "_pool": None, "skipped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.skipped = Skipped()

    def _end_iteration(self, is_displaced: bool = False) -> None:
        running = None if self._running is None else self._running()
        if running is not None:
            running.close(is_displaced)
        self._running = None

    def _open_process_pool(self) -> Any:
        pool = self._pool
        if self._decode_processes and (pool is None or pool.closed or pool.pid != os.getpid()):
            from miniray.data.loader.processes import ProcessPool

            self._pool = ProcessPool(self.transform, max(1, self.decode_workers))
        return self._pool

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless it is the current one."""
        if not self.dataset.is_at(epoch):
            self._end_iteration(is_displaced=True)
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress in less than 1 KB of JSON. Prefetched batches aren't included.

        At a step boundary, when all ranks have taken the same number of batches, the state of any
        rank is valid for the run. Otherwise, and with batches by tokens, keep the states of all
        ranks and use ``merge_states``.
        """
        state = self.dataset.state_dict()
        if self.batch_by:
            state["batching"] = [self.batch_size, self._bucket_rows]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state`` on any number of ranks, all of which load the same state."""
        check_state(state)
        self._end_iteration(is_displaced=True)
        batching = [self.batch_size, self._bucket_rows] if self.batch_by else None
        if state.get("batching") != batching:
            raise ValueError(
                f"The state was saved with batches by tokens {state.get('batching')} (batch_size,"
                f" bucket_rows), and this loader has {batching}. Create it with the same values."
            )
        self.dataset.load_state_dict(state, None if batching is None else self._find_chunk_rest)

    def close(self) -> None:
        """End the threads of a running iteration, and worker processes."""
        self._end_iteration()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
