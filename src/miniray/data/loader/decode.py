"""Convert encoded rows to the batch that a user gets: columns, or transformed and collated rows.

Encoded bytes become pixels as late as possible: in the threads of the loader, for the next batches
only.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from miniray.data.loader.columns import RowId, collect_columns, to_columns, to_rows, to_table
from miniray.data.loader.threads import DaemonPool, join_futures
from miniray.data.plan.shard import split_evenly
from miniray.errors import RowError

if TYPE_CHECKING:
    from miniray.data.loader.processes import ProcessPool

Format = Literal["numpy", "torch", "arrow"]
Outcome = tuple[Any, Exception | None]

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
    """Converts encoded rows to batches. Thread-safe.

    Batches are known by the ``indices`` of their rows in ``row_ids``.
    """

    def __init__(
        self,
        row_ids: Sequence[RowId],
        *,
        transform: Callable[[Any], Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        format: Format,
        on_error: Literal["raise", "skip"],
        skipped: Skipped,
        pool: ProcessPool | None = None,
    ) -> None:
        self._row_ids = row_ids
        self._transform, self._collate, self._format = transform, collate_fn, format
        self._skip, self._skipped, self._pool = on_error == "skip", skipped, pool

    def start_batch(self, rows: Any, indices: Sequence[int], threads: DaemonPool) -> Future[Any]:
        """Decode a batch in threads, which divide its rows if there is a transform."""
        shares = min(len(indices), len(threads.threads))
        if self._transform is None or shares < 2:
            return threads.submit(partial(self._decode_batch, rows, indices))
        parts = [slice(*split_evenly(len(indices), share, shares)) for share in range(shares)]
        return join_futures(
            [threads.submit(partial(self._decode_rows, rows[p], indices[p])) for p in parts],
            self._collate_rows,
        )

    def _decode_batch(self, rows: Any, indices: Sequence[int]) -> tuple[Any, int]:
        """Return a batch and the number of its rows."""
        if self._transform is not None or self._collate is not None:
            return self._collate_rows([self._decode_rows(rows, indices)])
        if self._format == "arrow":
            return to_table(rows), len(indices)
        columns = to_columns(rows, lambda i: self._row_ids[indices[i]])
        return self._format_columns(columns), len(indices)

    def _decode_rows(self, rows: Any, indices: Sequence[int]) -> list[Any]:
        """Return transformed rows."""
        decoded = to_rows(rows, lambda i: self._row_ids[indices[i]])
        if self._transform is None:
            return decoded
        if self._pool is not None:
            outcomes: Iterable[Outcome] = self._pool.apply(decoded, *self._row_ids[indices[0]])
        else:
            outcomes = map(partial(try_transform, self._transform), decoded)
        return [
            value if error is None else self._handle_error(self._row_ids[index], error)
            for index, (value, error) in zip(indices, outcomes, strict=True)
        ]

    def _handle_error(self, row_id: RowId, error: Exception) -> Any:
        if self._skip:
            self._skipped.add(row_id, error)
            return SKIPPED
        file, row = row_id
        raise RowError(
            f"{file}, row {row}: the transform raised {type(error).__name__}: {error}", file, row
        ) from error

    def _collate_rows(self, parts: Sequence[list[Any]]) -> tuple[Any, int]:
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


def try_transform(transform: Callable[[Any], Any], row: Any) -> Outcome:
    """Return the transformed row, or the error that the transform raised."""
    try:
        return transform(row), None
    except Exception as error:  # user code can raise anything
        return None, error


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
