"""The timeline of a pipeline: its spans, its bubble, a plot, and the result of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from miniray.train.run import records
from miniray.train.run.result import TrainResult

#: In the run's directory.
FILE = "pipeline.json"
_COLOURS = {"forward": "#4c78a8", "backward": "#f2a33c", "weights": "#72b47a"}


class Span(NamedTuple):
    """One microbatch in one stage. Times are seconds since the step began."""

    kind: str
    stage: int
    microbatch: int
    begin: float
    end: float


def busy_seconds(spans: Sequence[Span]) -> float:
    """Return the time in which a worker computes."""
    return sum(span.end - span.begin for span in spans)


def bubble(busy: Sequence[float], wall: Sequence[float]) -> float:
    """Return the share of time in which workers wait: 1 − Σ busy / (workers × the slowest)."""
    longest = max(wall, default=0.0)
    return 1.0 - sum(busy) / (len(busy) * longest) if longest else 0.0


def save(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Write the timeline of a step to the run directory, in place of the previous one."""
    records.replace_text(run_dir / FILE, json.dumps(record))


def load(run_dir: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((run_dir / FILE).read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{run_dir} has no {FILE}: no epoch of a pipeline was trained there"
        ) from None
    return record


def draw(record: Mapping[str, Any], target: Path) -> Path:
    """Draw one row per worker and one numbered box per microbatch, and return the path.

    Raises ``ImportError`` without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError:
        raise ImportError("plot_pipeline() needs matplotlib: pip install 'miniray[plot]'") from None
    workers = [[Span(*span) for span in spans] for spans in record["workers"]]
    end = 1000 * max((span.end for spans in workers for span in spans), default=0.0)
    figure = Figure(figsize=(11, 1.4 + 0.55 * len(workers)), layout="constrained")
    axes = figure.add_subplot()
    for row, spans in enumerate(workers):
        for span in spans:
            begin, width = 1000 * span.begin, 1000 * (span.end - span.begin)
            # Later stages of one worker are drawn lighter.
            alpha = 1.0 if span.stage < len(workers) else 0.6
            axes.barh(
                row, width, left=begin, height=0.8, color=_COLOURS[span.kind], alpha=alpha,
                edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if width > end / 60:
                label = str(span.microbatch)
                axes.text(begin + width / 2, row, label, ha="center", va="center", fontsize=7)
    for kind, colour in _COLOURS.items():
        if any(span.kind == kind for spans in workers for span in spans):
            axes.barh(0, 0, color=colour, label=kind)
    axes.set_yticks(range(len(workers)), [f"worker {row}" for row in range(len(workers))])
    axes.invert_yaxis()
    axes.set_xlim(0, end * 1.01 or 1.0)
    axes.set_xlabel("milliseconds")
    title = (
        f"{record['schedule']}, {record['microbatches']} microbatches: bubble "
        f"{100 * record['bubble']:.1f} % measured, {100 * record['bubble_formula']:.1f} % expected"
    )
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)
    return target


def measure_bubble(results: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean bubble of the steps of one replica; None if no step was recorded."""
    steps = zip(*(result["times"] for result in results), strict=False)  # (busy, wall) of each
    found = [bubble(*zip(*times, strict=True)) for times in steps]
    return sum(found) / len(found) if found else None


class ParallelResult(TrainResult):
    """See ``TrainResult``.

    Attributes:
        plan: Tables of the stages and shards.
        peak_activation_bytes: Largest size of the activations that each worker of a pipeline kept.
    """

    def __init__(
        self, *, plan: str = "", peak_activation_bytes: Sequence[int] = (), **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.plan = plan
        self.peak_activation_bytes = list(peak_activation_bytes)

    @property
    def bubble(self) -> float | None:
        """Share of time in which workers waited in the last epoch; None without a pipeline."""
        return self.metrics.get("bubble")

    @property
    def bubble_formula(self) -> float | None:
        """Theoretical bubble for stages of equal duration without communication time."""
        return self.metrics.get("bubble_formula")

    def plot_pipeline(self, path: str | Path | None = None) -> Path:
        """Plot the microbatches of all workers in the last step, and return the path of the image.

        ``path`` is ``pipeline.png`` in the run directory by default. Raises ``ImportError`` without
        matplotlib, and ``ValueError`` if the run had no pipeline.
        """
        target = Path(path) if path is not None else self.run_dir / "pipeline.png"
        return draw(load(self.run_dir), target)
