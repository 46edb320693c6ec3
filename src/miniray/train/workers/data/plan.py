"""Plan the samples of each rank in each step, and their weights.

An epoch is a sequence of *windows*. A window is one optimizer step of up to ``accumulate``
micro-batches. Each micro-batch of all ranks together contains ``world_size × batch_size`` samples
in the order of the epoch, which are assigned to ranks in turn (rank 0 of 4 gets 0, 4, 8, …). The
samples of a step therefore don't depend on the number of ranks if this product stays the same.

A window contains the weight of this rank's loss for each micro-batch. Gradients are averaged over
ranks, so a loss that is a mean over the rank's samples is multiplied by ``ranks × samples of this
rank / samples of the window``. The result is the gradient of the mean over all samples of the
window, even if they can't be divided evenly. A rank without samples repeats its last micro-batch
with weight 0, so that every rank runs every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from miniray.data import shard_indices

#: An optimizer step of one rank, as the weights of its micro-batches; see the module.
Window = tuple[float, ...]


@dataclasses.dataclass
class EpochPlan:
    """The windows of an epoch over ``n`` samples that miniray assigns to ranks.

    Args:
        n: Number of samples.
        batch_size: Samples per micro-batch of a rank.
        world_size: Number of ranks.
        accumulate: Micro-batches per optimizer step.
        uneven: ``"join"`` uses every sample exactly once. ``"pad"`` repeats up to
            ``world_size - 1`` samples, and ``"drop"`` skips up to ``world_size - 1`` samples, so
            that all ranks have the same number. ``"error"`` raises if the numbers differ.
        drop_last: Skip the last micro-batch if it isn't full.
        start: Samples of the epoch that were already used, on any number of ranks. The plan covers
            the rest of the epoch, in which a rank may have no samples.
        limit: Maximum number of micro-batches of an epoch.

    Raises:
        ValueError: A rank has no samples in the whole epoch, or ``uneven="error"`` applies.
    """

    n: int
    batch_size: int
    world_size: int
    _: dataclasses.KW_ONLY
    accumulate: int = 1
    uneven: str = "join"
    drop_last: bool = False
    start: int = 0
    limit: int | None = None
    #: Number of samples of all ranks in each micro-batch.
    sizes: list[int] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        world_size, uneven = self.world_size, self.uneven
        n = max(0, self.n - self.start)
        over = n % world_size
        if uneven == "error" and over:
            counts = [(n - rank + world_size - 1) // world_size for rank in range(world_size)]
            shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            raise ValueError(
                f"{n} samples can't be divided evenly among {world_size} ranks ({shown}). "
                'Choose uneven="join", "pad" or "drop"'
            )
        used = n
        if over and uneven in ("pad", "drop"):
            used += world_size - over if uneven == "pad" else -over
        full = world_size * self.batch_size
        sizes = [full] * (used // full)
        tail = 0 if self.drop_last else used % full
        self.sizes = sizes = ([*sizes, tail] if tail else sizes)[: self.limit]
        if not self.start and (not sizes or sizes[0] < world_size):
            idle = world_size - (sizes[0] if sizes else 0)
            last = f"rank {world_size - 1} has" if idle == 1 else f"{idle} ranks have"
            why = f"a full batch takes {full}" if self.drop_last else f"{world_size} ranks"
            raise ValueError(f"{last} 0 batches: {n} samples are too few ({why})")

    def rest(self, start: int, limit: int | None) -> EpochPlan:
        """Return the plan of this epoch after ``start`` samples, with at most ``limit`` batches."""
        return dataclasses.replace(self, start=start, limit=limit)

    def windows(self, rank: int) -> Iterator[Window]:
        """Yield this rank's part of each optimizer step."""
        for start in range(0, len(self.sizes), self.accumulate):
            sizes = self.sizes[start : start + self.accumulate]
            yield tuple(self.world_size * self._own(size, rank) / sum(sizes) for size in sizes)

    def batches(
        self, rank: int, epoch: int, *, shuffle: bool, seed: int, first_window: int = 0
    ) -> Iterator[list[int]]:
        """Yield the samples of each micro-batch of this rank, starting at an optimizer step."""
        rows = self._rows(rank, epoch, shuffle, seed)
        at = 0
        for number, size in enumerate(self.sizes):
            own = self._own(size, rank)
            if own and number >= first_window * self.accumulate:
                yield rows[at : at + own].tolist()
            at += own

    def _rows(self, rank: int, epoch: int, shuffle: bool, seed: int) -> Any:
        """Return this rank's samples in their order, as an array that can be sliced."""
        if not self.start:
            even: Any = self.uneven if self.uneven in ("pad", "drop") else "exact"
            return shard_indices(
                self.n,
                rank,
                self.world_size,
                mode="strided",
                seed=seed,
                shuffle=shuffle,
                epoch=epoch,
                even=even,
            )
        order = shard_indices(self.n, 0, 1, seed=seed, shuffle=shuffle, epoch=epoch)
        rows = order[self.start + rank :: self.world_size]
        if self.uneven != "pad" or not (self.n - self.start) % self.world_size:
            return rows
        padded = order[self.start : self.start + 1]
        return np.concatenate([rows, padded])

    def samples(self, windows: int) -> int:
        """Return the number of samples of all ranks in the first ``windows`` optimizer steps."""
        return sum(self.sizes[: windows * self.accumulate])

    def count(self, rank: int) -> int:
        """Return the number of micro-batches of this rank."""
        return sum(1 for size in self.sizes if self._own(size, rank))

    def _own(self, size: int, rank: int) -> int:
        return max(0, -(-(size - rank) // self.world_size))


def create_counted_windows(
    counts: Sequence[int], rank: int, accumulate: int, uneven: str, *, is_rest: bool = False
) -> list[Window]:
    """Return the windows of a rank if each rank has its own batches, ``counts`` of them.

    All batches in a window have the same weight, because their numbers of samples aren't known. In
    the rest of an epoch (``is_rest``), a rank may have no batches.

    Raises:
        ValueError: A rank has no batches, or ``counts`` differ in a way that ``uneven`` excludes.
    """
    fewest, most = min(counts), max(counts)
    shown = ", ".join(f"rank {r} has {count}" for r, count in enumerate(counts))
    if fewest == 0 and not is_rest:
        raise ValueError(f"{shown} batches: every rank needs at least one")
    if fewest != most:
        if uneven == "error":
            raise ValueError(f'{shown} batches; choose uneven="join" or "drop"')
        if uneven == "pad":
            raise ValueError(
                f'{shown} batches, and uneven="pad" isn\'t supported with load_data_shard(). '
                'Remove load_data_shard(), or choose uneven="join" or "drop"'
            )
    longest = fewest if uneven == "drop" else most
    windows = []
    for start in range(0, longest, accumulate):
        places = range(start, min(start + accumulate, longest))
        total = sum(place < count for count in counts for place in places)
        windows.append(tuple(len(counts) * (p < counts[rank]) / total for p in places))
    return windows


def create_row_windows(
    rows: Sequence[Sequence[int]],
    rank: int,
    accumulate: int,
    uneven: str,
    *,
    is_rest: bool = False,
) -> list[Window]:
    """Return the windows of a rank whose batches follow from the plan of a dataset.

    All samples in a window have the same weight, as in an ``EpochPlan``.

    Args:
        rows: Number of rows of each rank in each micro-batch.
        is_rest: The rows are the rest of an epoch, in which ranks may have nothing to do.

    Raises:
        ValueError: A rank has no rows, or numbers of rows differ in a way that ``uneven`` excludes.
    """
    counts = [sum(column) for column in zip(*rows, strict=True)]
    shown = ", ".join(f"rank {r} has {count}" for r, count in enumerate(counts))
    if not is_rest and not all(counts):
        raise ValueError(f"{shown or 'all ranks have 0'} rows: every rank needs at least one batch")
    if len(set(counts)) > 1 and uneven in ("pad", "error"):
        raise ValueError(f'{shown} rows; choose uneven="join" or "drop", or even= of the dataset')
    if uneven == "drop":
        rows = [row for row in rows if all(row)]
    windows = []
    for start in range(0, len(rows), accumulate):
        part = rows[start : start + accumulate]
        total = sum(map(sum, part))
        windows.append(tuple(len(row) * row[rank] / total for row in part))
    return windows
