"""Extract curves from the lines of a metrics file, and reduce the number of points in a curve.

The points of a curve are ``(x, y)`` pairs. If the y value is NaN or infinite, charts show a marker
instead of drawing the point.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Points = list[tuple[float, float]]

#: Words in the name of a metric which indicate that higher values are better. All other metrics
#: are treated as losses.
_MORE_IS_BETTER = re.compile(
    r"acc|accuracy|auc|auroc|bleu|correct|dice|f1|iou|map|precision|psnr|r2|recall|returns?"
    r"|rewards?|rouge|scores?|speedup|ssim|success|throughput|top\d+"
)
#: Numeric fields that don't measure the quality of training.
NOT_A_SCORE = frozenset(
    {"epoch", "step", "global_step", "rank", "seconds", "time", "num_samples", "val_num_samples",
     "synced"}
)  # fmt: skip
#: Fields of step records that describe the steps. No value of them is better than others.
STEP_FACTS = frozenset(
    {"lr", "grad_norm", "step_seconds", "samples_per_second", "tokens_per_second", "memory_mb",
     "gpu_memory_mb"}
)  # fmt: skip
#: Starts of the names of metrics that evaluations compute.
HELD_OUT = ("val_", "eval_", "test_", "valid_")
_PLACES = ("epoch", "step", "global_step")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line in a chart. Curves that have the same ``group`` are drawn in the same chart."""

    name: str
    points: Points
    group: str = ""

    @property
    def finite(self) -> Points:
        return [(x, y) for x, y in self.points if math.isfinite(y)]

    @property
    def broken(self) -> Points:
        return [(x, y) for x, y in self.points if not math.isfinite(y)]

    @property
    def is_constant(self) -> bool:
        """True if the curve has at least two points and all of them have the same finite value."""
        heights = {y for _, y in self.points}
        return len(self.points) > 1 and len(heights) == 1 and math.isfinite(heights.pop())

    @property
    def is_single(self) -> bool:
        """True if the metric was recorded once."""
        return len(self.points) == 1 and math.isfinite(self.points[0][1])

    @property
    def best(self) -> tuple[float, float] | None:
        """The lowest point, or the highest point if higher values of the metric are better."""
        sign = -1 if is_higher_better(self.name) else 1
        return min(self.finite, key=lambda point: (sign * point[1], point[0]), default=None)


def is_higher_better(metric: str) -> bool:
    """Return True if the name of the metric suggests that higher values are better."""
    words = re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric).lower())
    return any(_MORE_IS_BETTER.fullmatch(word) for word in words)


def to_float(value: Any) -> float | None:
    """Convert a number to a float.

    Return None if the value is a boolean, isn't a number, or is too large for a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def extract_curves(metrics: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """Return a curve for each numeric field, in the order in which the fields first appear.

    The names of nested fields are joined with dots. If both ``loss`` and ``val_loss`` exist, they
    are drawn in the same chart. Lines that belong to a single rank are ignored here, because
    ``extract_rank_curves`` handles them.
    """
    found: dict[str, Points] = {}
    word = find_axis(metrics)
    for i, record in enumerate(metrics):
        if _get_rank(record) is None:
            x = _get_x(record, i, word)
            for key, value in _iter_scores(record):
                found.setdefault(key, []).append((x, value))
    return [Curve(name, points, find_group(name, found)) for name, points in found.items()]


def _iter_scores(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in flatten(record).items():
        plain = to_float(value)
        if plain is not None and key.rpartition(".")[2] not in NOT_A_SCORE:
            yield key, plain


def _get_rank(record: Mapping[str, Any]) -> int | None:
    """Return the rank that wrote a line, or None if the line describes the whole run."""
    rank = record.get("rank")
    return rank if type(rank) is int else None


def extract_rank_curves(
    metrics: Sequence[Mapping[str, Any]], world_size: int
) -> dict[str, list[Curve]]:
    """Return one curve for each metric and each rank.

    The values come from lines that have a ``rank`` field, and from lists that contain one number
    for each rank.
    """
    found: dict[str, dict[int, Points]] = {}
    word = find_axis(metrics)
    for i, record in enumerate(metrics):
        x = _get_x(record, i, word)
        for key, rank, value in _split_by_rank(record, world_size):
            found.setdefault(key, {}).setdefault(rank, []).append((x, value))
    return {
        key: [Curve(f"rank {rank}", lines[rank]) for rank in sorted(lines)]
        for key, lines in found.items()
    }


def _split_by_rank(record: Mapping[str, Any], world_size: int) -> Iterator[tuple[str, int, float]]:
    rank = _get_rank(record)
    if rank is not None:
        yield from ((key, rank, value) for key, value in _iter_scores(record))
        return
    for key, values in record.items():
        if world_size > 1 and isinstance(values, list) and len(values) == world_size:
            numbers = [value for value in map(to_float, values) if value is not None]
            if len(numbers) == world_size:
                yield from ((key, rank, value) for rank, value in enumerate(numbers))


def get_field_points(metrics: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Return the points of a single field, even if the field isn't a score."""
    word = find_axis(metrics)
    pairs = ((_get_x(r, i, word), to_float(r.get(key))) for i, r in enumerate(metrics))
    return [(x, y) for x, y in pairs if y is not None]


def _get_x(record: Mapping[str, Any], index: int, word: str) -> float:
    """Return the x value of a line.

    The value comes from the field that the axis shows. If the line has no such field, use a similar
    field, or else the index of the line in the file.
    """
    for key in (word, *_PLACES):
        value = to_float(record.get(key))
        if value is not None and math.isfinite(value):
            return value
    return float(index)


def find_axis(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the x axis of the curves.

    The axis shows the global step if the lines have one, and otherwise what a line describes.
    """
    return "step" if _has_global_steps(metrics) else find_unit(metrics)


def _has_global_steps(metrics: Sequence[Mapping[str, Any]]) -> bool:
    """Return True if ``step`` counts the steps of the run, and not those of each epoch."""
    by_rank: dict[int | None, list[int]] = {}
    for record in metrics:
        step = record.get("step")
        if type(step) is not int:
            return False
        by_rank.setdefault(_get_rank(record), []).append(step)
    return bool(by_rank) and all(
        steps == sorted(steps) and (len(steps) == 1 or steps[0] < steps[-1])
        for steps in by_rank.values()
    )


def find_unit(metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return what a line describes: an epoch, or a step if there are several lines per epoch."""
    first = metrics[0] if metrics else {}
    known = [key for key in _PLACES if key in first]
    if len(known) > 1:
        epochs = {(_get_rank(record), to_float(record.get(known[0]))) for record in metrics}
        known = known[len(epochs) < len(metrics) :]
    return known[0] if known else "line"


def merge_records(
    epochs: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return the records of epochs and steps, ordered by step.

    Step records have the same metrics as epoch records at more points. Epoch records therefore
    contribute only metrics that no step record has, and scores of evaluations at other steps.
    """
    if not steps:
        return list(epochs)
    ends = {record.get("epoch"): record["step"] for record in steps if _has_step(record)}
    logged = {name for record in steps for name in record}.difference(_PLACES)
    scores = {(record.get("step"), name) for record in steps for name in record if is_score(name)}
    found = [record for record in steps if _has_step(record)]
    for record in epochs:
        step = record["step"] if _has_step(record) else ends.get(record.get("epoch"))
        kept = {
            name: value
            for name, value in record.items()
            if name not in logged or (is_score(name) and (step, name) not in scores)
        }
        if step is not None:
            found.append({**kept, "step": step})
    return sorted(found, key=lambda record: int(record["step"]))


def _has_step(record: Mapping[str, Any]) -> bool:
    return type(record.get("step")) is int


def is_score(name: str) -> bool:
    """Return True if a metric was computed by an evaluation."""
    return name.startswith(HELD_OUT)


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested dicts to a single dict whose keys are joined with dots."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(flatten(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def thin_points(points: Points, most: int) -> Points:
    """Reduce a curve to at most ``most`` points without changing its visible shape.

    See ``select_extremes`` for the selection of the points.
    """
    if len(points) <= most:
        return points
    import numpy as np

    return [points[i] for i in select_extremes(np.array([y for _, y in points]), most)]


def select_extremes(heights: np.ndarray, most: int) -> np.ndarray:
    """Select at most ``most`` points of a curve to draw, and return their indices.

    The selection includes the first and the last point of the curve. The lowest and the highest
    point of each interval are also included, so that spikes remain visible.
    """
    import numpy as np

    count = len(heights)
    if count <= most:
        return np.arange(count)
    width = -(-count // max(1, (most - 2) // 2))
    table = np.pad(heights, (0, -count % width), mode="edge").reshape(-1, width)
    begin = np.arange(len(table)) * width
    found = [begin + table.argmin(axis=1), begin + table.argmax(axis=1), [0, count - 1]]
    return np.unique(np.minimum(np.concatenate(found), count - 1))


def sample_evenly(values: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` evenly spaced values, including the first and the last value."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def find_group(name: str, known: Collection[str]) -> str:
    """Return the metric in whose chart a metric is drawn: ``loss`` for ``val_loss``."""
    for prefix in HELD_OUT:
        if name.startswith(prefix) and name.removeprefix(prefix) in known:
            return name.removeprefix(prefix)
    return name
