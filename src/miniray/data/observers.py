"""Tell tools such as the doctor what loaders of this process deliver, and that data is prepared.

A tool appends an observer to ``observers``. The list is empty otherwise, so that a loader without
a tool costs one check per batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from miniray.data.loader.loader import DataLoader


class LoaderObserver(Protocol):
    """Receives the events of all ``miniray.data`` loaders in this process."""

    def on_pass_start(self, loader: DataLoader, epoch: int) -> None:
        """Called when a pass starts, before anything is read."""

    def on_batch(self, loader: DataLoader, row_ids: Sequence[int], num_rows: int) -> None:
        """Called when a batch of ``num_rows`` rows is delivered.

        ``row_ids`` are numbers of rows in the dataset, the same on all ranks and in all epochs. If
        all rows of a batch are skipped, ``num_rows`` is 0 and the batch isn't delivered.
        """

    def on_pass_end(self, loader: DataLoader) -> None:
        """Called after the last batch. Not called if the loop ends early."""


observers: list[LoaderObserver] = []

#: Functions that are called with True whenever a filter or a cache build makes progress, and with
#: False when it ends. Without progress, a preparation can be taken for a hang.
preparation_hooks: list[Callable[[bool], None]] = []

#: Functions that are called with path and size of each file of the row cache that is opened.
cache_hooks: list[Callable[[str, int], None]] = []


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Report that data is prepared until the block ends."""
    report_preparation()
    try:
        yield
    finally:
        for hook in preparation_hooks:
            hook(False)


def report_preparation() -> None:
    """Report progress of a filter or a cache build."""
    for hook in preparation_hooks:
        hook(True)


def list_row_ids(loader: DataLoader, index: Iterable[int]) -> list[int]:
    """Return the row numbers in the dataset of the ``index``-th rows that this rank gets.

    They are the same on all ranks and in all epochs.
    """
    dataset = loader.dataset
    return dataset.number_positions(dataset.find_positions(list(index)))


def describe(loader: DataLoader) -> dict[str, Any]:
    """Return how a loader is set up.

    ``rank`` and ``world_size`` are None if the dataset isn't sharded, ``fingerprint`` if the
    content of the data isn't known. ``batches`` are those of the current pass.
    """
    dataset = loader.dataset
    known = dataset.is_persistent
    return {
        "dataset": type(dataset).__name__,
        "rows": dataset.total_rows,
        "batches": len(loader) if loader.batch_by is None else None,
        "batch_size": loader.batch_size if loader.batch_by is None else None,
        "drop_last": bool(loader.drop_last),
        "rank": dataset.rank if dataset.is_sharded else None,
        "world_size": dataset.world_size if dataset.is_sharded else None,
        "is_shuffled": dataset.is_shuffled,
        "seed": dataset.seed,
        "fingerprint": dataset.fingerprint if known else None,
    }
