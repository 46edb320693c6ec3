"""Convert encoded rows to the batch that a user gets: columns, or transformed and collated rows.

Encoded bytes become pixels as late as possible: in the threads of the loader, for the next batches
only.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from miniray.data.loader.columns import collect_columns, to_columns, to_rows, to_table
from miniray.data.loader.threads import DaemonPool
from miniray.data.locations import Locations
from miniray.data.plan.shard import split_evenly
from miniray.errors import RowError

if TYPE_CHECKING:
    from miniray.data.loader.processes import ProcessPool

Format = Literal["numpy", "torch", "arrow"]
RowId = tuple[str, int]

#: Marks a row, or a batch, that is left out because of an error in the transform.
SKIPPED = object()


class Skipped:
    """Rows that were left out: how many, which (the first thousand), and why."""

    _MAX_ROWS = 1000

    def __init__(self) -> None:
        self.count = 0
        self.rows: dict[RowId, str] = {}
        self._lock = threading.Lock()

    def add(self, row: RowId, error: BaseException) -> None:
        """Count a row. The first one is reported with a warning."""
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            self.count += 1
            if len(self.rows) < self._MAX_ROWS:
                self.rows[row] = text
            is_first = self.count == 1
        if is_first:
            warnings.warn(
                f"{row[0]}, row {row[1]} is skipped: {text}. Further rows are counted in"
                " loader.skipped.",
                RuntimeWarning,
                stacklevel=2,
            )

    def by_file(self) -> dict[str, int]:
        """Return the number of the listed rows per file."""
        return dict(Counter(file for file, _ in self.rows))


class Decoder:
    """Makes batches of encoded rows. Thread-safe.

    ``name_rows`` returns the ids of rows for errors.
    """

    def __init__(
        self,
        name_rows: Callable[[Locations], list[RowId]],
        *,
        transform: Callable[[Any], Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        format: Format,
        on_error: Literal["raise", "skip"],
        skipped: Skipped,
        pool: ProcessPool | None = None,
    ) -> None:
        self._name_rows = name_rows
        self._transform, self._collate, self._format = transform, collate_fn, format
        self._skip, self._skipped, self._pool = on_error == "skip", skipped, pool

    def start_batch(self, rows: Any, locations: Locations, threads: DaemonPool) -> Future[Any]:
        """Decode a batch in threads, which divide its rows if there is a transform."""
        count, workers = len(locations), len(threads.threads)
        if self._transform is None or count < 2 or workers < 2:
            return threads.submit(partial(self.decode_batch, rows, locations))
        bounds = [split_evenly(count, worker, min(count, workers)) for worker in range(workers)]
        ranges = [range(*bound) for bound in bounds[: min(count, workers)]]
        return _Parts(self, rows, locations, ranges, threads).result

    def decode_batch(self, rows: Any, locations: Locations) -> tuple[Any, int]:
        """Decode a batch in this thread. Return it with the number of its rows."""
        if self._transform is None and self._collate is None:
            if self._format == "arrow":
                return to_table(rows), len(locations)
            columns = to_columns(rows, lambda i: self._name_row(locations, i))
            return self._format_columns(columns), len(locations)
        return self.join_parts([self.decode_part(rows, locations, range(len(locations)))])

    def decode_part(self, rows: Any, locations: Locations, part: range) -> list[Any]:
        """Transform some rows of a batch."""
        decoded = to_rows(
            rows[part.start : part.stop], lambda i: self._name_row(locations, part.start + i)
        )
        if self._transform is None:
            return decoded
        if self._pool is not None:
            file, row = self._name_row(locations, part.start)
            outcomes = self._pool.apply(decoded, file, row)
            return [
                value if error is None else self._handle_error(locations, i, error)
                for i, (value, error) in zip(part, outcomes, strict=True)
            ]
        found = []
        for i, row in zip(part, decoded, strict=True):
            try:
                found.append(self._transform(row))
            except Exception as error:  # user code can raise anything
                found.append(self._handle_error(locations, i, error))
        return found

    def _name_row(self, locations: Locations, index: int) -> RowId:
        return self._name_rows(locations[index : index + 1])[0]

    def _handle_error(self, locations: Locations, index: int, error: BaseException) -> Any:
        file, row = self._name_row(locations, index)
        if self._skip:
            self._skipped.add((file, row), error)
            return SKIPPED
        raise RowError(
            f"{file}, row {row}: the transform raised {type(error).__name__}: {error}", file, row
        ) from error

    def join_parts(self, parts: Sequence[list[Any]]) -> tuple[Any, int]:
        """Collate transformed rows. Return the batch with the number of its rows."""
        rows = [row for part in parts for row in part if row is not SKIPPED]
        if not rows:
            return SKIPPED, 0
        if self._collate is not None:
            return self._collate(rows), len(rows)
        return self._format_columns(collect_columns(rows)), len(rows)

    def _format_columns(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._format != "torch":
            return batch
        return {name: _to_tensor(column) for name, column in batch.items()}

    def give_up(self) -> None:
        """End the processes that transform, because one of them doesn't return."""
        if self._pool is not None:
            self._pool.close(patience=0)


class _Parts:
    """A batch whose rows are divided among threads. The last one collates it."""

    def __init__(
        self,
        decoder: Decoder,
        rows: Any,
        locations: Locations,
        ranges: Sequence[range],
        threads: DaemonPool,
    ) -> None:
        self.result: Future[Any] = Future()
        self._decoder = decoder
        self._parts: list[Any] = [None] * len(ranges)
        self._missing = len(ranges)
        self._lock = threading.Lock()
        for number, part in enumerate(ranges):
            threads.submit(partial(self._decode, number, rows, locations, part)).add_done_callback(
                self._cancel
            )

    def _cancel(self, future: Future[Any]) -> None:
        if future.cancelled():
            self.result.cancel()

    def _decode(self, number: int, rows: Any, locations: Locations, part: range) -> None:
        error: BaseException | None = None
        try:
            self._parts[number] = self._decoder.decode_part(rows, locations, part)
        except BaseException as raised:  # raised by ``result``
            error = raised
        with self._lock:
            self._missing -= 1
            is_last = self._missing == 0
            if error is not None and not self.result.done():
                self.result.set_exception(error)
        if is_last and not self.result.done():
            try:
                self.result.set_result(self._decoder.join_parts(self._parts))
            except BaseException as raised:
                self.result.set_exception(raised)


def _to_tensor(column: Any) -> Any:
    """Stack numbers, and tensors of the same shape, into one tensor. Return other columns as is."""
    import numpy as np
    import torch

    if isinstance(column, np.ndarray):
        return torch.from_numpy(column) if column.dtype.kind in "biufc" else column
    if all(isinstance(v, torch.Tensor) and v.shape == column[0].shape for v in column):
        return torch.stack(column)
    return column


def size_of(value: Any) -> int:
    """Estimate the size of a batch. Some items of long lists are sampled."""
    try:
        return _size(value, 0)
    except Exception:  # objects can raise anything: sparse tensors have no ``nbytes``
        return sys.getsizeof(value, 64)


def _size(value: Any, depth: int) -> int:
    kind = type(value)  # the common ones first: this runs for every batch
    if kind is bytes or kind is str:
        return len(value) + 33
    if kind is int or kind is float:
        return 32
    nbytes = getattr(value, "nbytes", None)
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(value, (bytes, bytearray, str)):  # subclasses
        return len(value) + 33
    if depth > 6:
        return 56
    if isinstance(value, Mapping):
        return sum(_size(v, depth + 1) for v in value.values())
    if isinstance(value, (list, tuple)):
        if not value:
            return 56
        some = value[:: max(1, len(value) // 8)]
        return 8 * len(value) + sum(_size(v, depth + 1) for v in some) * len(value) // len(some)
    width, height = getattr(value, "width", None), getattr(value, "height", None)
    if isinstance(width, int) and isinstance(height, int):  # an image of Pillow
        return width * height * len(getattr(value, "getbands", lambda: "RGB")())
    fields = getattr(kind, "__dataclass_fields__", ())
    return sum((_size(getattr(value, f), depth + 1) for f in fields), sys.getsizeof(value, 64))
