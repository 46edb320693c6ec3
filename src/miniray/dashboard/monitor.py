"""Monitor a run: poll its files, and store its state so that requests can be answered quickly.

Damaged files never cause an exception in this module. Instead, the state lists the records that are
damaged or truncated. If a run is deleted, the page continues to show the last known state.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.dashboard import timelines, view
from miniray.dashboard.access import NotFoundError, ServedDirectory
from miniray.dashboard.series import Metrics, Series
from miniray.doctor import stacks
from miniray.doctor.diagnose import Diagnosis, examine
from miniray.doctor.model import RankRecord, RunRecord, ThreadStack
from miniray.doctor.reader import read_box, read_run
from miniray.errors import BoxError, MinirayError
from miniray.report.series import HELD_OUT, find_group, is_score
from miniray.runs.run_info import get_state

#: Seconds between the first two polls of a run that is in progress. Two polls are necessary to see
#: whether the run makes progress.
_GAP = 0.5
#: Maximum number of seconds that a poll reads metrics. Later polls read the rest of a long file.
_READING = 0.25
#: Maximum number of points per curve and per chart.
_MOST_POINTS, _MOST_IN_CHART = 2000, 40_000


class NoStackError(MinirayError):
    """The rank can't send its stack, and no saved stack is available."""


class RunMonitor:
    """The state of a run.

    ``poll`` must be called from a single thread. All other methods may be called from any thread.
    """

    def __init__(self, root: ServedDirectory, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] = {}
        self.viewed = time.monotonic()
        self._root = root
        self._path = root.run(name)
        self._lock = threading.Lock()  # the poller and requests both use the fields below
        self._metrics = Metrics(self._path / "metrics.jsonl")
        self._steps = Metrics(self._path / "steps.jsonl")
        self._timelines: dict[int, timelines.Timeline] = {}
        self._losses = Metrics(self._path)  # from the rank records, not from a file
        self._ended: dict[Path, tuple[tuple[int, ...], RankRecord]] = {}
        self._before: RunRecord | None = None
        self._last_stacks: dict[Path, tuple[ThreadStack, ...]] = {}
        self._shown: dict[int, tuple[float, tuple[ThreadStack, ...]]] = {}

    # -- polling -----------------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return bool(self.state.get("live"))

    @property
    def behind(self) -> bool:
        """True if a file with metrics contains data that hasn't been read yet."""
        return self._metrics.lines.behind or self._steps.lines.behind

    def poll(self) -> None:
        """Read the changes since the last poll, and update the state."""
        try:
            self._root.run(self.name)
            record = read_run(self._path, self._read_box)
            if self._before is None and any(rank.alive for rank in record):
                self._before = record
                time.sleep(_GAP)
                record = read_run(self._path, self._read_box)
        except (NotFoundError, OSError):
            self.state = {**self.state, "name": self.name, "state": "deleted", "live": False}
            return
        state = get_state(record.run)
        diagnosis = examine(record, self._before, self._valid_stacks(record))
        with self._lock:
            self._update_timelines(diagnosis)
            self._number_epochs(record.run.get("config") or {})
            self._read_metrics()
            found = view.run_summary(diagnosis, record.run, state)
            found.update(name=self.name, charts=self._charts(), loading=self._loading())
            for metrics in (self._metrics, self._steps):
                if metrics.damaged:
                    why = f"skipped {metrics.damaged} lines that aren't JSON objects"
                    found["damaged"][metrics.lines.path.name] = why
        self._before, self.state = record, found

    def _read_box(self, file: Path) -> RankRecord:
        """Return the record of a rank. If the rank has ended, its record is read only once."""
        seen = file.with_suffix(".exit")
        try:
            real = self._root.inside(file)
            if os.path.lexists(seen):
                self._root.inside(seen)
        except NotFoundError:
            raise BoxError("the link leads out of the served directory") from None
        status = real.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns, int(seen.exists()))
        known = self._ended.get(file)
        if known is not None and known[0] == stamp:
            return known[1]
        record = read_box(file)
        if not record.alive:
            self._ended[file] = (stamp, record)
        return record

    def _update_timelines(self, diagnosis: Diagnosis) -> None:
        for facts in diagnosis.case:
            timeline = self._timelines.setdefault(facts.rank, timelines.Timeline())
            for steps in timeline.update(facts):
                if steps.loss is None:
                    continue
                step, attempt = facts.record.to_global_step(steps), steps.attempt
                known = self._losses.series.get(("loss", facts.rank))
                if facts.record.has_global_steps:  # the curve continues after a restart
                    attempt = 0
                    if known is not None:
                        known.drop_from(step)
                self._losses.add("loss", facts.rank, "step", step, steps.loss, attempt)

    def _number_epochs(self, config: Mapping[str, Any]) -> None:
        """Number the epochs of a trainer from 1, as people do. Files count them from 0."""
        if "trainer" in config:
            self._metrics.first = 1
            self._metrics.unit = str(config.get("unit") or "epoch")

    def _read_metrics(self) -> None:
        began = time.monotonic()
        for metrics in (self._metrics, self._steps):
            try:
                self._root.inside(metrics.lines.path)
            except NotFoundError:
                continue
            while metrics.read() and metrics.lines.behind:
                if time.monotonic() - began >= _READING:
                    return

    def _valid_stacks(self, run: RunRecord) -> dict[int, tuple[ThreadStack, ...]]:
        """Return the last stack of each rank if the stack is still valid.

        A stack is valid if the rank has made no progress since it sent the stack, or if the rank
        has ended.
        """
        with self._lock:
            shown = dict(self._shown)
        found = {}
        for rank, (at, threads) in shown.items():
            record = run.ranks.get(rank)
            if record is not None and max(record.phase.since, record.total.ended) < at:
                found[rank] = threads
        for record in run:
            if not record.alive:
                if record.path not in self._last_stacks:  # the rank won't send another stack
                    self._last_stacks[record.path] = self._read_last_stack(record.path)
                if old := self._last_stacks[record.path]:
                    found[record.rank] = old
        return found

    def _read_last_stack(self, box: Path) -> tuple[ThreadStack, ...]:
        try:
            self._root.inside(stacks.stack_file(box))
        except NotFoundError:
            return ()
        return stacks.read_stacks(box)

    # -- curves -----------------------------------------------------------------------------------

    def _get_curves(self, name: str, by_rank: bool) -> list[tuple[str, int | None, Series]]:
        """Return the ``(metric, rank, curve)`` tuples of a chart.

        The chart of a metric also shows its evaluation scores, such as ``val_loss``. If
        ``metrics.jsonl`` contains no values by rank, a chart by rank uses the rank records.
        """
        if by_rank:
            found = self._metrics.get_by_rank(name) or self._losses.get_by_rank(name)
            return [(name, rank, series) for rank, series in found]
        names = [name, *(f"{prefix}{name}" for prefix in HELD_OUT)]
        return [
            (metric, None, series)
            for metric in names
            if (series := self._find_series(metric)) is not None
        ]

    def _find_series(self, metric: str) -> Series | None:
        """Return the curve of a metric of the whole run.

        The records of steps have more points than those of epochs, which contain means over the
        epoch. Scores of evaluations may be in both.
        """
        epochs, steps = self._metrics.get(metric), self._steps.get(metric)
        if epochs is None or steps is None:
            return steps or epochs
        return epochs.merge(steps) if is_score(metric) else steps

    def _charts(self) -> list[dict[str, Any]]:
        """Return a list of all charts with the number of points in each chart.

        The page uses the number of points to decide which charts to fetch. Charts whose curves have
        one value each contain these values, which are shown as text.
        """
        found: dict[tuple[str, bool], dict[str, Any]] = {}
        keys = [*self._metrics.series, *self._steps.series, *self._losses.series]
        names = {name for name, rank in keys if rank is None}
        for metric, by_rank in dict.fromkeys((metric, rank is not None) for metric, rank in keys):
            name = metric if by_rank else find_group(metric, names)
            if (name, by_rank) in found:
                continue
            curves = self._get_curves(name, by_rank)
            chart: dict[str, Any] = {
                "name": name,
                "by_rank": by_rank,
                "axis": curves[0][2].axis,
                "points": sum(series.points for _, _, series in curves),
                "bad": sum(series.bad for _, _, series in curves),
            }
            if not by_rank and not any(series.varies for _, _, series in curves):
                chart["constant"] = {metric: series.y[0] for metric, _, series in curves}
            found[name, by_rank] = chart
        return sorted(found.values(), key=_chart_order)

    def _loading(self) -> float | None:
        """Return the fraction of the metrics that was read, or None if all of them were read."""
        if not self.behind:
            return None
        lines = [self._metrics.lines, self._steps.lines]
        return round(sum(one.offset for one in lines) / sum(one.size for one in lines), 3)

    def chart(
        self, name: str, by_rank: bool, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """Return the curves of a chart with a limited number of points.

        ``low`` and ``high`` are the limits of the visible range of the x axis.
        """
        with self._lock:
            curves = self._get_curves(name, by_rank)
            most = min(_MOST_POINTS, _MOST_IN_CHART // max(1, len(curves)))
            restarted = {rank for _, rank, series in curves if series.attempt}
            return {
                "name": name,
                "by_rank": by_rank,
                "run": self.name,
                "curves": [
                    {
                        "metric": metric,
                        "rank": rank,
                        "attempt": series.attempt + 1 if rank in restarted else None,
                        **series.to_json(most, low, high),
                    }
                    for metric, rank, series in curves
                ],
            }

    # -- timelines, stacks ------------------------------------------------------------------------

    def timelines(self, seconds: float | None, buckets: int) -> dict[str, Any]:
        """Return how each rank spent its time during the last ``seconds``.

        If ``seconds`` is None, the result covers the entire run. The time range is split into
        ``buckets`` intervals of equal length. For each interval, the result contains the fraction
        of time that a rank spent in each category.
        """
        with self._lock:
            every = list(self._timelines.values())
            begin, end, edges = timelines.get_window(every, seconds, buckets)
            shares = {rank: timeline.shares(edges) for rank, timeline in self._timelines.items()}
        return {"kinds": timelines.KINDS, "begin": begin, "end": end, "timelines": shares}

    def stack(self, rank: int) -> dict[str, Any]:
        """Request the stack of a rank. If the rank can't respond, return its last saved stack.

        Requesting a stack is the only action of the dashboard that affects a run. The server sends
        a signal to the rank, and the flight recorder of the rank handles the signal. If no stack is
        available, raise ``NoStackError`` with the reason.
        """
        file = self._path / "ranks" / f"{rank}.box"
        self._root.inside(file)
        if os.path.lexists(stacks.stack_file(file)):
            self._root.inside(stacks.stack_file(file))
        try:
            record = read_box(file)
        except BoxError as error:
            raise NoStackError(f"Can't read the record of rank {rank}: {error}") from None
        found = stacks.ask({rank: record}).get(rank)
        if found:
            with self._lock:
                self._shown[rank] = (time.time(), found)
            return {"rank": rank, "threads": view.stack_to_json(found), "note": ""}
        why = _explain_missing_stack(record)
        old = self._read_last_stack(file)
        if not old:
            raise NoStackError(f"No stack of rank {rank} is available: {why}.")
        note = f"This is the last saved stack, because {why}."
        return {"rank": rank, "threads": view.stack_to_json(old), "note": note}


def _explain_missing_stack(record: RankRecord) -> str:
    if record.process.stopped:
        return f"the process is stopped (resume it with `kill -CONT {record.pid}`)"
    if not record.alive:
        return "the rank has ended"
    if record.process.alive is None:
        return f"the rank runs on a different machine ({record.host})"
    return "the rank didn't respond within 3 s"


def _chart_order(chart: dict[str, Any]) -> tuple[Any, ...]:
    """Return a key that sorts charts of losses first and charts of durations last.

    Numbers in the names of charts are sorted by their value.
    """
    name = str(chart["name"])
    natural = [(part.isdigit(), part.zfill(12)) for part in re.split(r"(\d+)", name)]
    return "loss" not in name, not chart["by_rank"], name in ("seconds", "num_samples"), natural
