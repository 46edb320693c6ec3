"""From lines of metrics to curves: which numbers there are, what belongs together, how many points.

A curve is a list of (x, y); y may be NaN or infinite, which a chart marks instead of drawing it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Points = list[tuple[float, float]]

#: Words in a metric's name that mean more is better. Everything else is taken for a loss.
_MORE_IS_BETTER = re.compile(
    r"acc|accuracy|auc|auroc|bleu|correct|dice|f1|iou|map|precision|psnr|r2|recall|returns?"
    r"|rewards?|rouge|scores?|speedup|ssim|success|throughput|top\d+"
)
#: Numbers of every line that are no measure of the training.
NOT_A_SCORE = frozenset(
    {"epoch", "step", "global_step", "rank", "seconds", "time", "num_samples", "val_num_samples",
     "synced"}
)  # fmt: skip
_HELD_OUT = ("val_", "eval_", "test_", "valid_")
_PLACES = ("epoch", "step", "global_step")


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line of a chart. ``group`` is the chart it belongs in."""

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
    def level(self) -> bool:
        """Whether several points all have one finite value: nothing that a chart would show."""
        heights = {y for _, y in self.points}
        return len(self.points) > 1 and len(heights) == 1 and math.isfinite(heights.pop())

    @property
    def best(self) -> tuple[float, float] | None:
        """The best point: the lowest, or the highest where the name says that more is better."""
        sign = -1 if more_is_better(self.name) else 1
        return min(self.finite, key=lambda point: (sign * point[1], point[0]), default=None)


def more_is_better(metric: str) -> bool:
    words = re.findall(r"[a-z]+[0-9]*", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric).lower())
    return any(_MORE_IS_BETTER.fullmatch(word) for word in words)


def number(value: Any) -> float | None:
    """A number as a float; booleans, texts and numbers beyond floats are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def curves(metrics: Sequence[Mapping[str, Any]]) -> list[Curve]:
    """A curve for every number in the lines, in order of appearance; nested ones by dotted names.

    ``val_loss`` belongs in the chart of ``loss`` where there is one. Lines of single ranks have
    curves of their own (``by_rank``).
    """
    found: dict[str, Points] = {}
    word = axis(metrics)
    for i, record in enumerate(metrics):
        if _rank(record) is None:
            x = _position(record, i, word)
            for key, value in _scores(record):
                found.setdefault(key, []).append((x, value))
    return [Curve(name, points, _group(name, found)) for name, points in found.items()]


def _scores(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in flat(record).items():
        plain = number(value)
        if plain is not None and key.rpartition(".")[2] not in NOT_A_SCORE:
            yield key, plain


def _rank(record: Mapping[str, Any]) -> int | None:
    """Whose line it is; None for one of the whole run."""
    rank = record.get("rank")
    return rank if type(rank) is int else None


def by_rank(metrics: Sequence[Mapping[str, Any]], world_size: int) -> dict[str, list[Curve]]:
    """A curve a rank: of lines that name their rank, and of lists with a number for each."""
    found: dict[str, dict[int, Points]] = {}
    word = axis(metrics)
    for i, record in enumerate(metrics):
        x = _position(record, i, word)
        for key, rank, value in _told_by_rank(record, world_size):
            found.setdefault(key, {}).setdefault(rank, []).append((x, value))
    return {
        key: [Curve(f"rank {rank}", lines[rank]) for rank in sorted(lines)]
        for key, lines in found.items()
    }


def _told_by_rank(record: Mapping[str, Any], world_size: int) -> Iterator[tuple[str, int, float]]:
    whose = _rank(record)
    if whose is not None:
        yield from ((key, whose, value) for key, value in _scores(record))
        return
    for key, values in record.items():
        if world_size > 1 and isinstance(values, list) and len(values) == world_size:
            numbers = [value for value in map(number, values) if value is not None]
            if len(numbers) == world_size:
                yield from ((key, rank, value) for rank, value in enumerate(numbers))


def one(metrics: Sequence[Mapping[str, Any]], key: str) -> Points:
    """The curve of one field, whatever its name."""
    word = axis(metrics)
    pairs = ((_position(r, i, word), number(r.get(key))) for i, r in enumerate(metrics))
    return [(x, y) for x, y in pairs if y is not None]


def _position(record: Mapping[str, Any], index: int, word: str) -> float:
    """Where a line stands: on its axis, else by what else it says, else its place in the file."""
    for key in (word, *_PLACES):
        value = number(record.get(key))
        if value is not None and math.isfinite(value):
            return value
    return float(index)


def axis(metrics: Sequence[Mapping[str, Any]]) -> str:
    """What curves are drawn over: epochs, or steps where an epoch has several lines."""
    first = metrics[0] if metrics else {}
    known = [key for key in _PLACES if key in first]
    if len(known) > 1:
        epochs = {(_rank(record), number(record.get(known[0]))) for record in metrics}
        known = known[len(epochs) < len(metrics) :]
    return known[0] if known else "line"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested fields as one level of dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def thinned(points: Points, most: int) -> Points:
    """At most ``most`` points that draw the same line, as ``extremes`` chooses them."""
    if len(points) <= most:
        return points
    import numpy as np

    return [points[i] for i in extremes(np.array([y for _, y in points]), most)]


def extremes(heights: np.ndarray, most: int) -> np.ndarray:
    """Which ``most`` of the points to draw: both ends, and each stretch's lowest and highest."""
    import numpy as np

    count = len(heights)
    if count <= most:
        return np.arange(count)
    width = -(-count // max(1, (most - 2) // 2))
    table = np.pad(heights, (0, -count % width), mode="edge").reshape(-1, width)
    begin = np.arange(len(table)) * width
    found = [begin + table.argmin(axis=1), begin + table.argmax(axis=1), [0, count - 1]]
    return np.unique(np.minimum(np.concatenate(found), count - 1))


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the values, evenly, with both ends."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _group(name: str, known: Iterable[str]) -> str:
    for prefix in _HELD_OUT:
        if name.startswith(prefix) and name.removeprefix(prefix) in known:
            return name.removeprefix(prefix)
    return name
