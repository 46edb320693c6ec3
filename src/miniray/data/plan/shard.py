"""Who gets which rows: pure arithmetic, no I/O, nothing that grows with the number of rows.

Every rank computes its own part from the same few numbers, so ranks agree without talking, on the
one condition that they have the same seed. Where they have no way to agree on one, that is refused.
Only ``shard_indices`` needs numpy, and imports it when rows are asked for.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from miniray.checks import check_bool, check_choice, check_int
from miniray.data.plan.permutation import MOST_ROWS, Permutation, Positions, derive_key

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK = 65536  # rows computed at a time in iteration

#: The environment variable by which an engine or launcher gives all ranks of a run one seed.
RUN_SEED = "MINIRAY_RUN_SEED"

Even = Literal["exact", "pad", "drop"]


def resolve_seed(seed: int | None, world_size: int, needed_for: str) -> int:
    """``seed``, or the run's, or a fresh one where there is only one rank.

    Raises ``ValueError`` where several ranks would each draw their own: their shards would overlap.
    """
    if seed is not None:
        return check_int("seed", seed)
    text = os.environ.get(RUN_SEED)
    if text is not None:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{RUN_SEED} must be a decimal integer, not {text!r}") from None
    if world_size == 1:
        import secrets

        return secrets.randbits(48)
    raise ValueError(
        f"{needed_for} on {world_size} ranks needs one seed for all of them, and they have none:"
        f" with seed=None each rank would draw its own and rows would repeat across ranks. Pass"
        f" seed=... (any int, the same on every rank), or set {RUN_SEED} for the run, as miniray's"
        f" own launcher and engines do."
    )


def checked_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Both as ints; a rank outside of ``range(world_size)`` is refused."""
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
        f"each of the {world_size} ranks reads all rows, because the dataset was created without"
        " rank= and world_size=. Pass rank= and world_size= to the dataset (rank=0, world_size=1"
        " if each rank should read all rows)",
        RuntimeWarning,
        stacklevel=4,
    )


def checked_samples(max_samples: int) -> int:
    """``max_samples`` as an int: -1, which is all rows, or a number of them."""
    number = check_int("max_samples", max_samples)
    if number < -1:
        raise ValueError(f"max_samples must be -1 (all rows) or at least 0, not {max_samples}")
    return number


def check_even(even: Even) -> None:
    check_choice("even", even, ("exact", "pad", "drop"))


def part_bounds(n: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous part; sizes differ by at most 1, longer ones first."""
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
    """The rows of ``range(n)`` that ``rank`` of ``world_size`` gets, as a lazy sequence.

    Over all ranks each row comes exactly once, and sizes differ by at most 1, whatever ``n`` and
    ``world_size`` are; ranks beyond the rows get none. 10**12 rows cost what 10**3 cost.

    Args:
        mode: ``contiguous``: 2099 rows on 2 ranks are ``[0:1050]`` and ``[1050:2099]``.
            ``strided``: rank 0 of 4 gets 0, 4, 8, ...
        max_samples: a subset of this size, drawn once for the whole run (it depends on ``n`` and
            ``seed`` alone) and then sharded. -1, or anything above ``n``: all rows. The subset
            comes in the order in which it was drawn.
        seed: ``None`` takes the run's seed from ``MINIRAY_RUN_SEED``. Without one, more than one
            rank and something to draw, a ``ValueError`` says what to do.
        shuffle: another order each ``epoch``, the same on all ranks.
        even: ``exact`` leaves sizes as they are. ``pad`` makes all equal by repeating at most one
            row a rank (``.padded`` names them); with no rows at all there is nothing to repeat.
            ``drop`` leaves out the least, fewer than ``world_size`` rows (``.dropped``).
    """
    rank, world_size = checked_rank(rank, world_size)
    n, epoch = check_int("n", n), check_int("epoch", epoch)
    if not 0 <= n <= MOST_ROWS:
        raise ValueError(f"n must be in 0..2**62, not {n}")
    check_choice("mode", mode, ("contiguous", "strided"))
    check_bool("shuffle", shuffle)
    check_even(even)
    max_samples = checked_samples(max_samples)
    drawn = -1 < max_samples < n
    if drawn or shuffle:
        seed = resolve_seed(seed, world_size, "max_samples" if drawn else "shuffling")
    subset = Permutation(n, derive_key(seed, "subset")) if drawn else None
    count = max_samples if drawn else n
    order = Permutation(count, derive_key(seed, "order", epoch)) if shuffle else None
    return ShardIndices(count, rank, world_size, mode == "strided", even, order, subset, seed)


class ShardIndices(Sequence[int]):
    """What ``shard_indices`` returns: ``len``, ``[i]``, slices, iteration, ``numpy.asarray``.

    Attributes:
        seed: the seed used, or ``None`` where nothing was drawn.
        padded: rows this rank repeats, at most one.
        dropped: rows no rank gets, fewer than ``world_size``; the same on all ranks.
    """

    def __init__(
        self,
        count: int,
        rank: int,
        world_size: int,
        strided: bool,
        even: Even,
        order: Permutation | None,
        subset: Permutation | None,
        seed: int | None,
    ) -> None:
        self.seed = seed
        self._order, self._subset = order, subset
        shared = count - count % world_size if even == "drop" else count
        if strided:
            self._start, self._step = rank, world_size
            self._own = max(0, -(-(shared - rank) // world_size))
        else:
            self._start, end = part_bounds(shared, rank, world_size)
            self._step, self._own = 1, end - self._start
        self._length = -(-count // world_size) if even == "pad" else self._own
        # The first row of its own part, or any where it has none: it is at most one.
        self._pad = self._start if self._own else rank % max(count, 1)
        self._dropped_positions = range(shared, count)

    def _rows(self, index: Positions) -> Positions:
        positions = self._start + index * self._step
        positions[index >= self._own] = self._pad
        return self._map(positions)

    def _map(self, positions: Positions) -> Positions:
        if self._order is not None:
            positions = self._order(positions)
        if self._subset is not None:
            positions = self._subset(positions)
        return positions

    @property
    def padded(self) -> list[int]:
        return [self[i] for i in range(self._own, self._length)]

    @property
    def dropped(self) -> list[int]:
        import numpy as np

        return [int(x) for x in self._map(np.asarray(self._dropped_positions, dtype=np.int64))]

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Any: ...
    def __getitem__(self, index: int | slice) -> Any:
        """A row, or for a slice an array of rows."""
        import numpy as np

        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._rows(np.arange(start, stop, step, dtype=np.int64))
        number = int(index)
        if number < 0:
            number += self._length
        if not 0 <= number < self._length:
            raise IndexError(f"index {index} of a shard of {self._length} rows")
        return int(self._rows(np.array([number], dtype=np.int64))[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._length, _BLOCK):
            yield from self[start : start + _BLOCK].tolist()

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Any:
        import numpy as np

        if copy is False:
            raise ValueError("a lazy shard has no array to share; leave copy out")
        rows = self._rows(np.arange(self._length, dtype=np.int64))
        return rows if dtype is None else rows.astype(dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # compared by content

    def __repr__(self) -> str:
        few = ", ".join(map(str, self[:6].tolist()))
        return f"<ShardIndices of {self._length} rows: {few}{', ...' if self._length > 6 else ''}>"
