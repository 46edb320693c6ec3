"""Rank, world size, seed and bounds of a shard. Ranks don't communicate: all need the same seed."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Literal

from miniray.checks import check_choice, check_int

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
