"""Curves: ``metrics.jsonl`` read as it grows, a million points kept small, few of them sent.

A file is read from where the last reading ended, a bounded piece at a time, and a half-written last
line waits for its other half. One that was replaced or cut is read from its beginning. Points are
kept as 16 bytes each; of any number of them the lowest and highest of each stretch are sent, so
that no spike is lost.
"""

from __future__ import annotations

import dataclasses
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from miniray.report.series import extremes, flat, number
from miniray.runs import files

#: Bytes of a file read at a time: the page stays live while a large one is taken in.
PIECE = 1 << 20
_LONGEST_LINE = 1 << 20
_MOST_MARKS = 200
_MOST_SERIES = 5000
_LARGEST = 1e307  # of two larger ones plotly cannot tell the distance
_NOT_A_METRIC = frozenset({"epoch", "step", "rank", "time", "timestamp", "world_size"})


class Lines:
    """Whole lines of a growing file. ``read`` gives those that are new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.size = 0
        self._inode = 0
        self._rest = b""
        self._skipping = False  # in a line too long to be one of ours

    @property
    def behind(self) -> bool:
        """There is more in the file than was read."""
        return self.offset < self.size

    def read(self) -> tuple[bool, list[bytes]]:
        """(whether the file began anew, its next whole lines); nothing where there is no file."""
        try:
            with files.open_file(self.path) as file:
                status = os.fstat(file.fileno())
                anew = status.st_ino != self._inode or status.st_size < self.offset
                if anew:
                    self.offset, self._rest, self._skipping = 0, b"", False
                    self._inode = status.st_ino
                self.size = status.st_size
                file.seek(self.offset)
                data = file.read(PIECE)
        except OSError:  # not there yet, deleted, or not ours to read: no news
            self.size = self.offset
            return False, []
        self.offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if len(self._rest) > _LONGEST_LINE:
            self._rest, self._skipping = b"", True
        return anew, lines


@dataclasses.dataclass
class Series:
    """One curve. Values that are not finite are kept apart, each with the last one that was."""

    axis: str
    x: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    y: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    bad: int = 0
    marks: list[tuple[float, float | None, str]] = dataclasses.field(default_factory=list)

    def add(self, x: float, y: float) -> None:
        if math.isfinite(y):
            self.x.append(x)
            self.y.append(y)
            return
        self.bad += 1
        if len(self.marks) < _MOST_MARKS:  # the first ones are those that matter
            word = "NaN" if math.isnan(y) else "Infinity" if y > 0 else "-Infinity"
            self.marks.append((x, self.y[-1] if self.y else None, word))

    @property
    def points(self) -> int:
        return len(self.x) + self.bad

    def to_json(self, most: int, low: float | None, high: float | None) -> dict[str, Any]:
        """At most ``most`` points between ``low`` and ``high``, and one outside on either side."""
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
        drawn = extremes(y, most)
        x, y = x[drawn], y[drawn].clip(-_LARGEST, _LARGEST)
        return {
            "axis": self.axis,
            "points": self.points,
            "bad": self.bad,
            "x": [_short(value) for value in x.tolist()],
            "y": [_short(value) for value in y.tolist()],
            "marks": self.marks,
        }


class Metrics:
    """All curves of one run, by (name, rank); rank is None for those of the whole run."""

    def __init__(self, path: Path) -> None:
        self.lines = Lines(path)
        self.series: dict[tuple[str, int | None], Series] = {}
        self.damaged = 0
        self._count = 0

    def read(self) -> bool:
        """Take in the next piece of ``metrics.jsonl``; whether anything changed."""
        anew, lines = self.lines.read()
        if anew:
            self.series = {}
            self.damaged = self._count = 0
        for record in _parsed(lines):
            if isinstance(record, dict):
                self._take(record)
            else:
                self.damaged += 1
        return anew or bool(lines)

    def _take(self, record: dict[str, Any]) -> None:
        self._count += 1
        axis = "step" if "step" in record else "epoch"
        at = number(record.get(axis))
        if at is None or not math.isfinite(at):
            axis, at = "line", self._count
        rank = record.get("rank")
        whose = rank if type(rank) is int else None
        series = self.series
        nested = dict in map(type, record.values())  # as in the report: timing.rollout
        for name, value in (flat(record) if nested else record).items():
            if type(value) is str:
                value = files.NUMBER_WORDS.get(value)
            if (type(value) is not float and type(value) is not int) or name in _NOT_A_METRIC:
                continue
            known = series.get((name, whose))
            try:
                if known is not None and value - value == 0:  # finite, as nearly all are
                    known.y.append(value)
                    known.x.append(at)
                else:
                    self.add(name, whose, axis, at, float(value))
            except OverflowError:  # an int that no float can hold
                continue

    def add(self, name: str, rank: int | None, axis: str, x: float, y: float) -> None:
        series = self.series.get((name, rank))
        if series is None:
            if len(self.series) >= _MOST_SERIES:
                return
            series = self.series[name, rank] = Series(axis)
        series.add(x, y)

    def of(self, name: str, by_rank: bool) -> Iterator[tuple[int | None, Series]]:
        """The curves of one chart, in the order of their ranks."""
        found = [
            (r, s) for (n, r), s in self.series.items() if n == name and by_rank != (r is None)
        ]
        return iter(sorted(found, key=lambda pair: -1 if pair[0] is None else pair[0]))


def _parsed(lines: list[bytes]) -> list[Any]:
    """What each line holds; None for one that is no JSON."""
    whole = [line for line in lines if line.strip()]
    try:
        # All at once is four times as fast, and as strict: a line is one value or none.
        found = files.parse_json(b"[" + b",".join(whole) + b"]")
        if len(found) == len(whole):
            return list(found)
    except ValueError:
        pass
    return [files.parse_record(line) for line in whole]


def _short(value: float) -> float:
    """Six digits: what a screen can show, in half the bytes."""
    return int(value) if value == int(value) and abs(value) < 1e15 else float(f"{value:.6g}")
