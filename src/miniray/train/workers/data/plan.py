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

from miniray.data.plan.order import DataOrder, GlobalOrder
from miniray.data.plan.progress import Progress
from miniray.data.plan.split import Interleaved

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
        even: Any = uneven if uneven in ("pad", "drop") else "exact"
        self._split = Interleaved(even)
        self._remaining = Progress(self.n, self._split).extend([1, self.start]).remaining
        rows = self._split.count_step_rows(self._remaining, world_size, self.batch_size)
        n = self._remaining.total
        if uneven == "error" and n % world_size:
            counts = [sum(column) for column in zip(*rows, strict=True)]
            shown = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(counts))
            raise ValueError(
                f"{n} samples can't be divided evenly among {world_size} ranks ({shown}). "
                'Choose uneven="join", "pad" or "drop"'
            )
        full = world_size * self.batch_size
        if self.drop_last and rows and sum(rows[-1]) < full:
            del rows[-1]
        self._rows = rows[: self.limit]
        self.sizes = [sum(counts) for counts in self._rows]
        if not self.start and (not self.sizes or self.sizes[0] < world_size):
            idle = world_size - (self.sizes[0] if self.sizes else 0)
            last = f"rank {world_size - 1} has" if idle == 1 else f"{idle} ranks have"
            why = f"a full batch takes {full}" if self.drop_last else f"{world_size} ranks"
            raise ValueError(f"{last} 0 batches: {n} samples are too few ({why})")

    def rest(self, start: int, limit: int | None) -> EpochPlan:
        """Return the plan of this epoch after ``start`` samples, with at most ``limit`` batches."""
        return dataclasses.replace(self, start=start, limit=limit)

    def windows(self, rank: int) -> list[Window]:
        """Return this rank's part of each optimizer step."""
        return _weigh(self._rows, rank, self.accumulate)

    def batches(
        self, rank: int, epoch: int, *, shuffle: bool, seed: int, first_window: int = 0
    ) -> Iterator[list[int]]:
        """Yield the samples of each micro-batch of this rank, starting at an optimizer step."""
        share = self._split.assign_positions(self._remaining, rank, self.world_size)
        order = GlobalOrder(self.n, seed, epoch) if shuffle else DataOrder(self.n)
        at = 0
        for number, counts in enumerate(self._rows):
            if counts[rank] and number >= first_window * self.accumulate:
                positions = share.find_positions(np.arange(at, at + counts[rank]))
                yield order.map_positions(positions).tolist()
            at += counts[rank]

    def samples(self, windows: int) -> int:
        """Return the number of samples of all ranks in the first ``windows`` optimizer steps."""
        return sum(self.sizes[: windows * self.accumulate])

    def count(self, rank: int) -> int:
        """Return the number of micro-batches of this rank."""
        return sum(1 for counts in self._rows if counts[rank])


def _weigh(rows: Sequence[Sequence[int]], rank: int, accumulate: int) -> list[Window]:
    """Return the windows of a rank. ``rows`` has the samples of each rank per micro-batch."""
    windows = []
    for start in range(0, len(rows), accumulate):
        part = rows[start : start + accumulate]
        total = sum(map(sum, part))
        windows.append(tuple(len(counts) * counts[rank] / total for counts in part))
    return windows


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
    batches = [[int(number < count) for count in counts] for number in range(longest)]
    return _weigh(batches, rank, accumulate)


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
    return _weigh(rows, rank, accumulate)
