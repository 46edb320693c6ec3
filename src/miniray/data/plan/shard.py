"""Shards of a range of rows. Each rank computes its shard from the same few numbers.

Ranks don't communicate, so all of them need the same seed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from miniray.checks import check_bool, check_choice, check_int
from miniray.data.locations import Int64s
from miniray.data.plan.permutation import MAX_ROWS, Permutation, derive_key

_ITERATION_ROWS = 65536  # computed at a time in iteration

#: Environment variable in which an engine or launcher passes the seed of the run to all ranks.
RUN_SEED = "MINIRAY_RUN_SEED"

Even = Literal["exact", "pad", "drop"]


def resolve_seed(seed: int | None, world_size: int, purpose: str) -> int:
    """Return ``seed``, the seed of the run, or a random seed if there is only one rank.

    Raises ``ValueError`` if several ranks would each draw a different seed.
    """
    if seed is not None:
        return check_int("seed", seed)
    if (run_seed := find_run_seed()) is not None:
        return run_seed
    if world_size == 1:
        import secrets

        return secrets.randbits(48)
    raise ValueError(
        f"{purpose} on {world_size} ranks requires the same seed on all ranks. Pass seed=... (any"
        f" int), or set {RUN_SEED} for the run, as miniray's launcher and engines do."
    )


def find_run_seed() -> int | None:
    """Return the seed of the run, or None if this process isn't part of one."""
    text = os.environ.get(RUN_SEED)
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(f"{RUN_SEED} must be a decimal integer, not {text!r}") from None


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Return both as ints. ``rank`` must be in ``range(world_size)``."""
    rank, world_size = check_int("rank", rank), check_int("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} for world_size {world_size}: {rank}")
    return rank, world_size


def find_rank() -> tuple[int, int] | None:
    """Return rank and world size of this process, or None if it isn't part of a run.

    They come from the process group, or else from the environment that miniray's trainers and
    torchrun set.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for prefix in ("MINIRAY_", ""):
        rank, size = (os.environ.get(f"{prefix}{name}", "") for name in ("RANK", "WORLD_SIZE"))
        if rank.isdecimal() and size.isdecimal():
            return int(rank), int(size)
    return None


_has_warned = False


def warn_if_several_ranks() -> None:
    """Warn once if this process is one of several ranks that train on data that isn't sharded."""
    global _has_warned
    _, world_size = find_rank() or (0, 1)
    torch = sys.modules.get("torch")
    # Ranks that all evaluate on all rows are common and correct.
    if _has_warned or world_size == 1 or (torch is not None and not torch.is_grad_enabled()):
        return
    _has_warned = True
    warnings.warn(
        f"Each of the {world_size} ranks reads all rows, because the dataset was created without"
        " rank= and world_size=. Pass rank= and world_size= to the dataset (rank=0, world_size=1"
        " if each rank should read all rows).",
        RuntimeWarning,
        stacklevel=4,
    )


def check_max_samples(max_samples: int) -> int:
    """Return ``max_samples`` as an int: -1 for all rows, or a number of rows."""
    number = check_int("max_samples", max_samples)
    if number < -1:
        raise ValueError(f"max_samples must be -1 (all rows) or at least 0, not {max_samples}")
    return number


def check_even(even: Even) -> None:
    """Raise ``ValueError`` unless ``even`` is one of its three values."""
    check_choice("even", even, ("exact", "pad", "drop"))


def split_evenly(n: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the bounds of a contiguous shard. Sizes differ by at most 1, larger shards first."""
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return start, start + size + (rank < longer)


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
    order = Permutation(count, derive_key(seed, "order", epoch)) if shuffle else None
    return ShardIndices(count, rank, world_size, mode == "strided", even, order, subset, seed)


class ShardIndices(Sequence[int]):
    """Rows of a shard: supports ``len``, ``[i]``, slices, iteration and ``numpy.asarray``.

    Attributes:
        seed: Seed that was used, or ``None`` if nothing was drawn.
        padded: Rows that this rank repeats, at most one.
        dropped: Rows that no rank gets, fewer than ``world_size``; the same on all ranks.
    """

    def __init__(
        self,
        count: int,
        rank: int,
        world_size: int,
        is_strided: bool,
        even: Even,
        order: Permutation | None,
        subset: Permutation | None,
        seed: int | None,
    ) -> None:
        self.seed = seed
        self._order, self._subset = order, subset
        shared = count - count % world_size if even == "drop" else count
        if is_strided:
            self._start, self._step = rank, world_size
            self._shard_rows = max(0, -(-(shared - rank) // world_size))
        else:
            self._start, end = split_evenly(shared, rank, world_size)
            self._step, self._shard_rows = 1, end - self._start
        self._length = -(-count // world_size) if even == "pad" else self._shard_rows
        # At most one row is padded: the shard's first row, or any row if the shard is empty.
        self._pad = self._start if self._shard_rows else rank % max(count, 1)
        self._dropped_positions = range(shared, count)

    def _find_rows(self, index: Int64s) -> Int64s:
        positions = self._start + index * self._step
        positions[index >= self._shard_rows] = self._pad
        return self._map_positions(positions)

    def _map_positions(self, positions: Int64s) -> Int64s:
        if self._order is not None:
            positions = self._order.map_positions(positions)
        if self._subset is not None:
            positions = self._subset.map_positions(positions)
        return positions

    @property
    def padded(self) -> list[int]:
        return [self[i] for i in range(self._shard_rows, self._length)]

    @property
    def dropped(self) -> list[int]:
        positions = np.asarray(self._dropped_positions, dtype=np.int64)
        return [int(row) for row in self._map_positions(positions)]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Any: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Return a row, or an array of rows for a slice."""
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._find_rows(np.arange(start, stop, step, dtype=np.int64))
        number = int(index)
        if number < 0:
            number += self._length
        if not 0 <= number < self._length:
            raise IndexError(f"index {index} of a shard of {self._length} rows")
        return int(self._find_rows(np.array([number], dtype=np.int64))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._length, _ITERATION_ROWS):
            yield from self[start : start + _ITERATION_ROWS].tolist()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError("A lazy shard has no array to share. Leave out copy=.")
        rows = self._find_rows(np.arange(self._length, dtype=np.int64))
        return rows if dtype is None else rows.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compared by content

    def __repr__(self) -> str:
        few = ", ".join(map(str, self[:6].tolist()))
        return f"<ShardIndices of {self._length} rows: {few}{', ...' if self._length > 6 else ''}>"
