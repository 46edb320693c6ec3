"""Decide which checkpoints to keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from miniray.checks import check_int
from miniray.train.run.checkpoints.manifest import CheckpointInfo


@dataclasses.dataclass(frozen=True)
class Retention:
    """The checkpoints to keep; see ``CheckpointStore``.

    Raises:
        ValueError: ``keep_last`` or ``keep_best`` is invalid.
    """

    keep_last: int | None = 3
    keep_best: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None:
            check_int("keep_last", self.keep_last, 1, " or None")
        best = self.keep_best
        pair = isinstance(best, (tuple, list)) and len(best) == 2
        if best is not None and not (pair and best[1] in ("min", "max")):
            raise ValueError(f'keep_best must be (metric, "min" or "max"), not {best!r}')

    def find_unwanted(
        self, found: Sequence[CheckpointInfo], newest: Path
    ) -> Sequence[CheckpointInfo]:
        """Return the checkpoints to delete, or none if ``newest`` isn't in ``found``."""
        if self.keep_last is None or all(checkpoint.path != newest for checkpoint in found):
            return []
        newest_at = {(c.epoch, c.step): c.path for c in found}  # the later of two counts
        current = [c.path for c in found if newest_at[c.epoch, c.step] == c.path]
        keep = {newest, self.find_best(found), *current[-self.keep_last :]}
        return [checkpoint for checkpoint in found if checkpoint.path not in keep]

    def find_best(self, found: Sequence[CheckpointInfo]) -> Path | None:
        """Return the best checkpoint, the newest one of equals, or None if none has the metric."""
        if self.keep_best is None:
            return None
        metric, mode = self.keep_best
        sign = 1 if mode == "max" else -1
        scored = [
            (sign * c.metrics[metric], c.serial, c.path) for c in found if metric in c.metrics
        ]
        return max(scored)[2] if scored else None
