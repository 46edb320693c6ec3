"""Read curves from ``metrics.jsonl`` and ``steps.jsonl`` while they grow, and select points.

Each read continues at the position where the previous read ended, and reads a limited number of
bytes. If the last line is incomplete, it is stored until the rest of the line has been written. If
the file was replaced or truncated, it is read again from the beginning. Each point needs 16 bytes
of memory. The points that are sent include the lowest and the highest point of each interval, so
that spikes remain visible.
"""

from __future__ import annotations

import dataclasses
import math
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from miniray.report.series import flatten, select_extremes, to_float
from miniray.runs import files

#: Maximum number of bytes to read at once. The limit keeps the page responsive while a large file
#: is read.
PIECE = 1 << 20
_LONGEST_LINE = 1 << 20
_MOST_MARKS = 200
_MOST_SERIES = 5000
_LARGEST = 1e307  # plotly can't handle the difference of larger values
_NOT_A_METRIC = frozenset({"epoch", "step", "rank", "time", "timestamp", "world_size"})


class Lines:
    """A reader of a growing file. ``read`` returns the next complete lines of the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size = 0
        self._inode = 0
        self._rest = b""
        self._skipping = False  # True while the rest of a line that is too long is skipped

    @property
    def behind(self) -> bool:
        """True if the file contains data that hasn't been read yet."""
        return self.offset < self.size

    def read(self) -> tuple[bool, list[bytes]]:
        """Read the next complete lines.

        Returns:
            A ``(restarted, lines)`` tuple. ``restarted`` is True if the file was replaced or
            truncated since the last read. If the file doesn't exist, ``lines`` is empty.
        """
        try:
            with files.open_file(self.path) as file:
                status = os.fstat(file.fileno())
                restarted = status.st_ino != self._inode or status.st_size < self.offset
                if restarted:
                    self.offset, self._rest, self._skipping = 0, b"", False
                    self._inode = status.st_ino
                self.size = status.st_size
                file.seek(self.offset)
                data = file.read(PIECE)
        except OSError:  # the file is missing or can't be read
            self.size = self.offset
            return False, []
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if len(self._rest) > _LONGEST_LINE:
            self._rest, self._skipping = b"", True
        return restarted, lines


@dataclasses.dataclass
class Series:
    """The points of a curve.

    A value that isn't finite is stored in ``marks``, together with the last finite value before it.
    ``attempt`` is the number of times that the rank was restarted before it recorded the curve.
    """

    axis: str
    attempt: int = 0
    varies: bool = False  # whether there are different values
    x: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    y: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    bad: int = 0
    marks: list[tuple[float, float | None, str]] = dataclasses.field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        self.varies = self.varies or not math.isfinite(y) or (len(self.y) > 0 and y != self.y[0])
        if math.isfinite(y):
            self.x.append(x)
            self.y.append(y)
            return
        self.bad += 1
        if len(self.marks) < _MOST_MARKS:  # the first ones are the most useful
            word = "NaN" if math.isnan(y) else "Infinity" if y > 0 else "-Infinity"
            self.marks.append((x, self.y[-1] if self.y else None, word))

    @property
    def points(self) -> int:
        return len(self.x) + self.bad

    def drop_from(self, x: float) -> None:
        """Remove the points at ``x`` and later, which a restarted rank trains again."""
        while self.x and self.x[-1] >= x:
            self.x.pop()
            self.y.pop()
        self.marks = [mark for mark in self.marks if mark[0] < x]

    def merge(self, other: Series) -> Series:
        """Return the points of both, in the order of x. At the same x, those of ``other``."""
        points = {**dict(zip(self.x, self.y, strict=True)),
                  **dict(zip(other.x, other.y, strict=True))}  # fmt: skip
        found = Series(other.axis, other.attempt, self.varies or other.varies)
        found.x, found.y = (
            array("d", sorted(points)),
            array("d", (points[x] for x in sorted(points))),
        )
        found.bad, found.marks = self.bad + other.bad, [*self.marks, *other.marks]
        return found

    def to_json(self, most: int, low: float | None, high: float | None) -> dict[str, Any]:
        """Return the points in the visible range and the nearest point on each side of it.

        The result contains at most ``most`` points.
        """
        x, y = np.array(self.x), np.array(self.y)
        if len(x) and (low is not None or high is not None):
            seen = np.ones(len(x), bool)
            if low is not None:
                seen &= x >= low
            if high is not None:
                seen &= x <= high
            found = np.flatnonzero(seen)
            if len(found):
                within = slice(max(0, found[0] - 1), found[-1] + 2)
                x, y = x[within], y[within]
        drawn = select_extremes(y, most)
        x, y = x[drawn], y[drawn].clip(-_LARGEST, _LARGEST)
        return {
            "axis": self.axis,
            "points": self.points,
            "bad": self.bad,
            "x": [_round(value) for value in x.tolist()],
            "y": [_round(value) for value in y.tolist()],
            "marks": self.marks,
        }


class Metrics:
    """All curves of a run.

    The keys of ``series`` are ``(name, rank)`` tuples. The rank is None if a curve describes the
    whole run. ``earlier`` contains the curves of earlier attempts, which are kept separate if the
    steps of each attempt are numbered from 1.

    ``unit`` is what a line without a step describes, and ``first`` is the number of epoch 0.
    """

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.series: dict[tuple[str, int | None], Series] = {}
        self.earlier: dict[tuple[str, int | None], list[Series]] = {}
        self.damaged = 0
        self.unit, self.first = "epoch", 0
        self._count = 0

    def read(self) -> bool:
        """Read the next part of the file. Return True if the curves may have changed."""
        restarted, lines = self.lines.read()
        if restarted:
            self.series = {}
            self.damaged = self._count = 0
        for record in _parse_lines(lines):
            if isinstance(record, dict):
                self._take(record)
            else:
                self.damaged += 1
        return restarted or bool(lines)

    def _take(self, record: dict[str, Any]) -> None:
        self._count += 1
        if "step" in record:
            axis, at = "step", to_float(record["step"])
        else:
            axis, at = self.unit, to_float(record.get("epoch"))
            at = None if at is None else at + self.first
        if at is None or not math.isfinite(at):
            axis, at = "line", self._count
        rank = record.get("rank")
        owner = rank if type(rank) is int else None
        series = self.series
        nested = dict in map(type, record.values())  # names such as timing.rollout
        for name, value in (flatten(record) if nested else record).items():
            if type(value) is str:
                value = files.NUMBER_WORDS.get(value)
            if (type(value) is not float and type(value) is not int) or name in _NOT_A_METRIC:
                continue
            known = series.get((name, owner))
            try:
                if known is not None and value - value == 0:  # a finite value is the common case
                    known.varies = known.varies or value != known.y[0]
                    known.y.append(value)
                    known.x.append(at)
                else:
                    self.add(name, owner, axis, at, float(value))
            except OverflowError:  # an int too large for a float
                continue

    def add(
        self, name: str, rank: int | None, axis: str, x: float, y: float, attempt: int = 0
    ) -> None:
        series = self.series.get((name, rank))
        if series is None and len(self.series) >= _MOST_SERIES:
            return
        if series is not None and series.attempt != attempt:
            self.earlier.setdefault((name, rank), []).append(series)
            series = None
        if series is None:
            series = self.series[name, rank] = Series(axis, attempt)
        series.add(x, y)

    def get(self, name: str) -> Series | None:
        """Return the curve of a metric of the whole run."""
        return self.series.get((name, None))

    def get_by_rank(self, name: str) -> list[tuple[int, Series]]:
        """Return the ``(rank, curve)`` pairs of a metric, ordered by rank and attempt."""
        found = [
            (rank, series)
            for (metric, rank), newest in self.series.items()
            if metric == name and rank is not None
            for series in (*self.earlier.get((metric, rank), ()), newest)
        ]
        return sorted(found, key=lambda pair: pair[0])


def _parse_lines(lines: list[bytes]) -> list[Any]:
    """Parse each line as JSON. The value of a line that isn't valid JSON is None."""
    whole = [line for line in lines if line.strip()]
    try:
        # Parsing all lines at once is four times faster. The length check below ensures that each
        # line contains exactly one value.
        found = files.parse_json(b"[" + b",".join(whole) + b"]")
        if len(found) == len(whole):
            return list(found)
    except ValueError:
        pass
    return [files.parse_record(line) for line in whole]


def _round(value: float) -> float:
    """Round a value to six digits.

    Six digits are sufficient for a chart on a screen and halve the size of the response.
    """
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")
