"""Which checkpoints of a run are kept: the newest, and the best one by a metric."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from miniray.train.checkpoint_dir import CheckpointInfo

_MODES = ("min", "max")


def check_keeping(keep_last: int | None, keep_best: tuple[str, str] | None) -> None:
    """Refuse what makes no sense, with ``ValueError``."""
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise ValueError(f"keep_last must be an int >= 1 or None, not {keep_last!r}")
    pair = isinstance(keep_best, (tuple, list)) and len(keep_best) == 2
    if keep_best is not None and not (pair and keep_best[1] in _MODES):
        raise ValueError(f'keep_best must be (metric, "min" or "max"), not {keep_best!r}')


def superfluous(
    found: Sequence[CheckpointInfo],
    newest: Path,
    keep_last: int | None,
    keep_best: tuple[str, str] | None,
) -> Sequence[Path]:
    """Those of ``found``, oldest first, that may go; never ``newest``."""
    if keep_last is None:
        return []
    last_of_epoch = {c.epoch: c.path for c in found}  # of two of an epoch the later one counts
    current = [c.path for c in found if last_of_epoch[c.epoch] == c.path]
    keep = {newest, *current[-keep_last:]}
    best = best_of(found, keep_best)
    if best is not None:
        keep.add(best.path)
    return [c.path for c in found if c.path not in keep]


def best_of(
    found: Sequence[CheckpointInfo], keep_best: tuple[str, str] | None
) -> CheckpointInfo | None:
    """The best one by ``(metric, "min" | "max")``; of equals the newest. None where none has it."""
    if keep_best is None:
        return None
    metric, mode = keep_best
    sign = 1 if mode == "max" else -1
    scored = [(sign * c.metrics[metric], c.serial, c) for c in found if metric in c.metrics]
    return max(scored, key=lambda s: s[:2])[2] if scored else None
