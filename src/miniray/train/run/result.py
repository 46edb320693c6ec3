"""``TrainResult``, which ``train()`` returns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from miniray.runs.report_writer import write_report
from miniray.train.run.records import number

if TYPE_CHECKING:
    import pandas

__all__ = ["Best", "TrainResult", "better_direction"]

#: Words in the names of metrics for which higher is better. Other metrics are treated as losses.
_MORE_IS_BETTER = re.compile(
    r"acc|accuracy|auc|auroc|bleu|correct|dice|f1|iou|map|precision|psnr|r2|recall|returns?"
    r"|rewards?|rouge|scores?|speedup|ssim|success|throughput|top\d+"
)
_NOT_A_SCORE = ("epoch", "seconds", "num_samples", "synced")


def better_direction(metric: str, mode: str = "auto") -> str:
    """Return ``"max"`` if the name has a word such as accuracy, f1 or reward, else ``"min"``.

    If ``mode`` is ``"min"`` or ``"max"``, return it. Raise ``ValueError`` for other values than
    ``"auto"``.
    """
    if mode not in ("auto", "min", "max"):
        raise ValueError(f'mode must be "auto", "min" or "max", not {mode!r}')
    if mode != "auto":
        return mode
    words = re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric).lower())
    return "max" if any(_MORE_IS_BETTER.fullmatch(word) for word in words) else "min"


class Best(NamedTuple):
    """The best value of a metric, and the first epoch that reached it."""

    value: float
    epoch: int


class TrainResult(Mapping[str, Any]):
    """The result of a run. A mapping of the metrics of the last epoch: ``result["loss"]``.

    Attributes:
        history: One dict of metrics per epoch, oldest first, for the whole run, including earlier
            calls of ``train()`` and resumed epochs.
        metrics: Metrics of the last epoch. Empty if no epoch was trained.
        best: Metric → ``Best(value, epoch)`` for every number in the history. The lowest value is
            best, except for names with a word such as accuracy, f1 or reward
            (``better_direction``). NaN is never best. To choose the direction, use ``best_epoch``.
        epochs: Number of epochs of the whole run.
        wall_time: Seconds that this ``train()`` took.
        sync: Stats of the parameter server. Empty without one.
        run_dir: The run directory.
        checkpoint: Path of the newest checkpoint, or None.
    """

    def __init__(
        self,
        *,
        history: Sequence[Mapping[str, Any]],
        run_dir: str | Path,
        epochs: int | None = None,
        unit: str = "epoch",
        wall_time: float = 0.0,
        sync: Mapping[str, Any] | None = None,
        checkpoint: str | Path | None = None,
    ) -> None:
        self.history = [dict(record) for record in history]
        self.metrics = dict(self.history[-1]) if self.history else {}
        self.epochs = len(self.history) if epochs is None else epochs
        self._unit = unit
        self.wall_time = wall_time
        self.sync = dict(sync or {})
        self.run_dir = Path(run_dir)
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.best: dict[str, Best] = {}
        for metric in self._metric_names():
            if metric not in _NOT_A_SCORE:
                best = self._best(metric)
                if best is not None:
                    value, place = best
                    self.best[metric] = Best(value, self.history[place].get("epoch", place))

    def best_epoch(self, metric: str, mode: str = "auto") -> dict[str, Any]:
        """Return the metrics of the epoch with the lowest or highest value of ``metric``.

        Raise ``KeyError`` if no epoch has a number for it.
        """
        best = self._best(metric, mode)
        if best is None:
            known = ", ".join(self._metric_names()) or "none"
            raise KeyError(f"no epoch has a number for {metric!r}. Available metrics: {known}")
        return self.history[best[1]]

    def _best(self, metric: str, mode: str = "auto") -> tuple[float, int] | None:
        """Return the best value and the index of its first record, or None. Ignore NaN."""
        sign = -1 if better_direction(metric, mode) == "max" else 1
        numbers = ((number(record.get(metric)), i) for i, record in enumerate(self.history))
        values = [(sign * value, i) for value, i in numbers if value is not None and value == value]
        signed, place = min(values, default=(0, -1))
        return None if place < 0 else (sign * signed, place)

    def _metric_names(self) -> list[str]:
        """Return the names of fields that are a number in any epoch, in order of appearance."""
        items = (item for record in self.history for item in record.items())
        return list(dict.fromkeys(key for key, value in items if number(value) is not None))

    # -- the last epoch's metrics ------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        try:
            return self.metrics[key]
        except KeyError:
            known = ", ".join(self.metrics) or "none: no epoch was trained"
            raise KeyError(
                f"{key!r} isn't a metric of the last epoch ({known}). For all epochs, see .history"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.metrics)

    def __len__(self) -> int:
        return len(self.metrics)

    def __bool__(self) -> bool:
        return True  # a result is a result, also of no epochs

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{key}={value:.6g}"
            for key in self.metrics
            if key not in _NOT_A_SCORE and (value := number(self.metrics[key])) is not None
        )
        plural = "" if self.epochs == 1 else "s"
        shown = shown or "no metrics"
        return f"<TrainResult of {self.epochs} {self._unit}{plural}: {shown}; {self.run_dir}>"

    # -- looking at it -----------------------------------------------------------------------------

    def plot(self, path: str | Path | None = None, metrics: Sequence[str] | None = None) -> Path:
        """Draw a curve of each metric over the epochs, and return the path of the image.

        ``path`` is ``curves.png`` in the run directory by default. Its suffix selects the format.
        Epochs with NaN or infinite values are marked at the bottom. Raise ``ImportError`` without
        matplotlib, and ``ValueError`` if there is nothing to draw.
        """
        try:
            from matplotlib.figure import Figure  # not pyplot: no window, no global state
        except ImportError:
            raise ImportError(
                "TrainResult.plot() needs matplotlib: pip install 'miniray[plot]'"
            ) from None
        names = [m for m in self._metric_names() if m not in _NOT_A_SCORE]
        names = list(metrics) if metrics is not None else names
        unknown = [name for name in names if name not in self._metric_names()]
        if unknown or not names:
            known = ", ".join(self._metric_names()) or "none"
            raise ValueError(f"nothing to draw for {unknown or 'this run'}; metrics: {known}")
        target = Path(path) if path is not None else self.run_dir / "curves.png"
        columns = min(len(names), 2)
        rows = math.ceil(len(names) / columns)
        figure = Figure(figsize=(5.2 * columns, 3.2 * rows), layout="constrained")
        for position, name in enumerate(names, start=1):
            self._draw(figure.add_subplot(rows, columns, position), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)
        return target

    def _draw(self, axes: Any, name: str) -> None:
        points = [
            (record.get("epoch", i), value)
            for i, record in enumerate(self.history)
            if (value := number(record.get(name))) is not None
        ]
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        axes.plot(*(zip(*finite, strict=True) if finite else ((), ())), marker=".", linewidth=1.5)
        broken = [x for x, y in points if not math.isfinite(y)]
        if broken:
            at_foot = axes.get_xaxis_transform()
            axes.plot(broken, [0.02] * len(broken), "rx", transform=at_foot, label="NaN or Inf")
            axes.legend(loc="best")
        axes.set_title(name)
        axes.set_xlabel(self._unit)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report of the run, by default to ``report.html`` in the run directory."""
        return write_report(self.run_dir, path)

    def to_frame(self) -> pandas.DataFrame:
        """Return the history as a pandas table, one row per epoch. Requires pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError("TrainResult.to_frame() needs pandas: pip install pandas") from None
        frame = pandas.DataFrame(self.history)
        return frame.set_index("epoch") if "epoch" in frame.columns else frame
