"""Shards of a range of rows. Each rank computes its shard from the same few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from miniray.checks import check_bool, check_choice, check_int
from miniray.data.locations import Int64s
from miniray.data.plan.order import DataOrder, EpochOrder, GlobalOrder
from miniray.data.plan.permutation import MAX_ROWS, Permutation, derive_key
from miniray.data.plan.progress import Progress
from miniray.data.plan.shard import (
    Even,
    check_even,
    check_max_samples,
    check_rank,
    resolve_seed,
)
from miniray.data.plan.split import Contiguous, Interleaved, Split

_ITERATION_ROWS = 65536  # computed at a time in iteration


def shard_indices(
    n: int,
    rank: int,
    world_size: int,
    *,
    mode: Literal["contiguous", "strided"] = "contiguous",
    max_samples: int = -1,
    seed: int | None = None,
    shuffle: bool = False,
    epoch: int = 0,
    even: Even = "exact",
) -> ShardIndices:
    """Return the rows of ``range(n)`` that ``rank`` of ``world_size`` gets, as a lazy sequence.

    Over all ranks, each row comes exactly once and sizes differ by at most 1 for any ``n`` and
    ``world_size``. Ranks beyond the rows get none. 10**12 rows cost as much as 10**3.

    Args:
        n: Number of rows.
        rank: Rank of the shard.
        world_size: Number of ranks.
        mode: ``"contiguous"``: 2099 rows on 2 ranks are ``[0:1050]`` and ``[1050:2099]``.
            ``"strided"``: rank 0 of 4 gets 0, 4, 8, ...
        max_samples: Size of a subset that is drawn once for the run, from ``n`` and ``seed``, and
            then sharded. -1, or a number above ``n``, selects all rows. The subset comes in the
            order in which it was drawn.
        seed: ``None`` uses the run's seed from ``MINIRAY_RUN_SEED``. Without one, drawing on more
            than one rank raises ``ValueError``.
        shuffle: Use a different order in each ``epoch``, the same on all ranks.
        epoch: Number of the epoch, from 0.
        even: ``"exact"`` keeps the sizes. ``"pad"`` makes all sizes equal by repeating at most one
            row per rank (see ``.padded``), unless there are no rows. ``"drop"`` leaves out fewer
            than ``world_size`` rows (see ``.dropped``).
    """
    rank, world_size = check_rank(rank, world_size)
    n, epoch = check_int("n", n), check_int("epoch", epoch)
    if not 0 <= n <= MAX_ROWS:
        raise ValueError(f"n must be in 0..2**62, not {n}")
    check_choice("mode", mode, ("contiguous", "strided"))
    check_bool("shuffle", shuffle)
    check_even(even)
    max_samples = check_max_samples(max_samples)
    is_drawn = -1 < max_samples < n
    if is_drawn or shuffle:
        seed = resolve_seed(seed, world_size, "max_samples" if is_drawn else "shuffling")
    subset = Permutation(n, derive_key(seed, "subset")) if is_drawn else None
    count = max_samples if is_drawn else n
    order: EpochOrder = DataOrder(count)
    if shuffle:
        assert seed is not None
        order = GlobalOrder(count, seed, epoch)
    split: Split = Interleaved(even) if mode == "strided" else Contiguous(even)
    return ShardIndices(split, rank, world_size, order, subset, seed)


class ShardIndices(Sequence[int]):
    """Rows of a shard: supports ``len``, ``[i]``, slices, iteration and ``numpy.asarray``.

    Attributes:
        seed: Seed that was used, or ``None`` if nothing was drawn.
        padded: Rows that this rank repeats, at most one.
        dropped: Rows that no rank gets, fewer than ``world_size``; the same on all ranks.
    """

    def __init__(
        self,
        split: Split,
        rank: int,
        world_size: int,
        order: EpochOrder,
        subset: Permutation | None,
        seed: int | None,
    ) -> None:
        self.seed = seed
        self._order, self._subset = order, subset
        remaining = Progress(order.n, split).remaining
        self._assignment = split.assign_positions(remaining, rank, world_size)
        self._dropped = np.arange(split.count_shared(order.n, world_size), order.n)

    def _find_rows(self, indices: Int64s) -> Int64s:
        return self._map_positions(self._assignment.find_positions(indices))

    def _map_positions(self, positions: Int64s) -> Int64s:
        rows = self._order.map_positions(positions)
        return rows if self._subset is None else self._subset.map_positions(rows)

    @property
    def padded(self) -> list[int]:
        return [self[i] for i in range(self._assignment.count, len(self))]

    @property
    def dropped(self) -> list[int]:
        return self._map_positions(self._dropped).tolist()  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self._assignment.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Any: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a row, or an array of rows for a slice."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._find_rows(np.arange(start, stop, step, dtype=np.int64))
        number = int(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"index {index} of a shard of {len(self)} rows")
        return int(self._find_rows(np.array([number], dtype=np.int64))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), _ITERATION_ROWS):
            yield from self[start : start + _ITERATION_ROWS].tolist()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("A lazy shard has no array to share. Leave out copy=.")
        rows = self._find_rows(np.arange(len(self), dtype=np.int64))
        return rows if dtype is None else rows.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compared by content

    def __repr__(self) -> str:
        few = ", ".join(map(str, self[:6].tolist()))
        return f"<ShardIndices of {len(self)} rows: {few}{', ...' if len(self) > 6 else ''}>"
