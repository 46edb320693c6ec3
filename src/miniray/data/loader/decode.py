"""From rows in blocks to the batch a user gets: columns, or transformed rows put together.

This is where encoded bytes become pixels, as late as possible: in the threads of the loader, for
the batches next in line only.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from miniray.data.dataset import Dataset
from miniray.data.loader.batching import Batch
from miniray.data.loader.blocks import BlockCache, Piece, Places
from miniray.data.loader.columns import columns_of
from miniray.data.plan.shard import part_bounds
from miniray.data.share import RowId
from miniray.data.sources.base import Rows
from miniray.errors import RowError

if TYPE_CHECKING:
    from miniray.data.loader.processes import ProcessPool

Format = Literal["numpy", "torch", "arrow"]

#: Marks a row that was left out because it could not be transformed.
_SKIPPED = object()


@dataclass
class Task:
    """One batch on its way."""

    batch: Batch
    places: Places
    pieces: list[Piece]
    held: dict[Piece, Rows] = field(default_factory=dict)
    parts: list[Any] = field(default_factory=list)
    missing: int = 1  # parts still to be decoded
    result: Any = None
    error: BaseException | None = None
    done: bool = False
    nbytes: int = 0


class Skipped:
    """Rows that were left out: how many, which (the first thousand), and why."""

    _MOST = 1000

    def __init__(self) -> None:
        self.count = 0
        self.rows: dict[RowId, str] = {}
        self._lock = threading.Lock()

    def add(self, row: RowId, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            self.count += 1
            if len(self.rows) < self._MOST:
                self.rows[row] = text
            first = self.count == 1
        if first:
            warnings.warn(
                f"{row[0]}, row {row[1]} is skipped: {text}. Further rows are counted in"
                " loader.skipped",
                RuntimeWarning,
                stacklevel=2,
            )

    def by_file(self) -> dict[str, int]:
        """How many of the rows listed are of each file."""
        return dict(Counter(file for file, _ in self.rows))


class Decoder:
    """Makes batches of rows that are in memory. May be used by several threads at once."""

    def __init__(
        self,
        dataset: Dataset,
        cache: BlockCache,
        *,
        transform: Callable[[Any], Any] | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        format: Format,
        on_error: Literal["raise", "skip"],
        skipped: Skipped,
        pool: ProcessPool | None = None,
    ) -> None:
        self._dataset, self._cache = dataset, cache
        self._transform, self._collate, self._format = transform, collate_fn, format
        self._skip, self._skipped, self._pool = on_error == "skip", skipped, pool

    def split(self, task: Task, workers: int) -> Sequence[range]:
        """The parts of a batch that threads may work on at the same time."""
        count = len(task.places)
        if self._transform is None or count < 2:
            return [range(count)]
        bounds = (part_bounds(count, worker, workers) for worker in range(workers))
        return [range(start, end) for start, end in bounds if start < end]

    def part(self, task: Task, index: range) -> Any:
        """One part: columns or a table where nothing is done to rows, else a list of rows."""
        places, held = task.places[index.start : index.stop], task.held
        if self._transform is None and self._collate is None:
            if self._format == "arrow":
                return self._cache.arrow(places, held)
            return self._cache.columns(places, held)
        rows = self._cache.rows(places, held)
        if self._transform is None:
            return rows
        if self._pool is not None:
            outcomes = self._pool.apply(rows)
            return [self._outcome(task, i, *o) for i, o in zip(index, outcomes, strict=True)]
        found = []
        for i, row in zip(index, rows, strict=True):
            try:
                found.append(self._transform(row))
            except Exception as error:  # the user's code may raise anything
                found.append(self._outcome(task, i, None, error))
        return found

    def _outcome(self, task: Task, index: int, value: Any, error: BaseException | None) -> Any:
        if error is None:
            return value
        file, row = self._dataset.name_rows(task.places[index : index + 1])[0]
        if self._skip:
            self._skipped.add((file, row), error)
            return _SKIPPED
        raise RowError(
            f"{file}, row {row}: the transform raised {type(error).__name__}: {error}", file, row
        ) from error

    def join(self, task: Task) -> None:
        """Put the parts together. An error is kept for the one who takes the batch."""
        if task.error is not None:
            return
        try:
            task.result = self._joined(task.parts)
        except BaseException as error:  # the user's collate_fn may raise anything
            task.error = error

    def _joined(self, parts: Sequence[Any]) -> Any:
        if self._transform is None and self._collate is None:
            return self._formatted(parts[0])
        rows = [row for part in parts for row in part if row is not _SKIPPED]
        if not rows:
            return _SKIPPED
        if self._collate is not None:
            return self._collate(rows)
        return self._formatted(columns_of(rows))

    def _formatted(self, batch: Any) -> Any:
        if self._format != "torch":
            return batch
        return {name: _as_tensor(column) for name, column in batch.items()}

    def whole(self, task: Task) -> None:
        """A batch from beginning to end, in this thread."""
        try:
            task.parts = [self.part(task, range(len(task.places)))]
        except BaseException as error:  # raised where the batch is taken
            task.error = error
        self.join(task)

    def give_up(self) -> None:
        """End the processes that transform, if it is those: one of them does not come back."""
        if self._pool is not None:
            self._pool.close(patience=0)


def is_skipped(batch: Any) -> bool:
    """Whether all rows of a batch were skipped."""
    return batch is _SKIPPED


def _as_tensor(column: Any) -> Any:
    """Numbers, and tensors of one shape, as a tensor; all else as it is."""
    import numpy as np
    import torch

    if isinstance(column, np.ndarray):
        return torch.from_numpy(column) if column.dtype.kind in "biufc" else column
    if all(isinstance(v, torch.Tensor) and v.shape == column[0].shape for v in column):
        return torch.stack(column)
    return column


def size_of(value: Any) -> int:
    """About how many bytes a batch takes; long lists are judged by some of their items."""
    try:
        return _size(value, 0)
    except Exception:  # the user's objects may raise anything: sparse tensors have no ``nbytes``
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
