"""What a run of a split model returns: the figures of every run, and the pipeline's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miniray.train.parallel import timeline
from miniray.train.results import TrainResult


class ParallelResult(TrainResult):
    """See ``TrainResult``.

    Attributes:
        plan: the tables of what went where.
        peak_activation_bytes: kept for the backward pass, at most, by each worker of a pipeline.
    """

    def __init__(
        self, *, plan: str = "", peak_activation_bytes: Sequence[int] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.plan = plan
        self.peak_activation_bytes = list(peak_activation_bytes)

    @property
    def bubble(self) -> float | None:
        """The share of time workers waited in the last epoch; None without a pipeline."""
        return self.metrics.get("bubble")

    @property
    def bubble_formula(self) -> float | None:
        """What the bubble would be, were all stages equally long and sending for nothing."""
        return self.metrics.get("bubble_formula")

    def plot_pipeline(self, path: str | Path | None = None) -> Path:
        """Draw which worker did which microbatch when in the last step; returns where it is.

        ``path`` is ``pipeline.png`` in the run directory by default. ``ImportError`` without
        matplotlib, ``ValueError`` where the run had no pipeline.
        """
        target = Path(path) if path is not None else self.run_dir / "pipeline.png"
        return timeline.draw(timeline.load(self.run_dir), target)
