"""What every plan needs: one seed for all ranks, and even parts."""

from __future__ import annotations

import os
from typing import Literal

from miniray.checks import one_of, whole

#: The environment variable by which an engine or launcher gives all ranks of a run one seed.
RUN_SEED = "MINIRAY_RUN_SEED"

Even = Literal["exact", "pad", "drop"]


def resolve_seed(seed: int | None, world_size: int, needed_for: str) -> int:
    """``seed``, or the run's, or a fresh one where there is only one rank.

    Raises ``ValueError`` where several ranks would each draw their own: their shards would overlap.
    """
    if seed is not None:
        return whole("seed", seed)
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
    rank, world_size = whole("rank", rank), whole("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in 0..{world_size - 1} for world_size {world_size}: {rank}")
    return rank, world_size


def checked_samples(max_samples: int) -> int:
    """``max_samples`` as an int: -1, which is all rows, or a number of them."""
    number = whole("max_samples", max_samples)
    if number < -1:
        raise ValueError(f"max_samples must be -1 (all rows) or at least 0, not {max_samples}")
    return number


def check_even(even: Even) -> None:
    one_of("even", even, ("exact", "pad", "drop"))


def part_bounds(n: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and end of a rank's contiguous part; sizes differ by at most 1, longer ones first."""
    size, longer = divmod(n, world_size)
    start = rank * size + min(rank, longer)
    return start, start + size + (rank < longer)
