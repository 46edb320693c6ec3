"""One run, watched: read again and again, and kept ready for whoever looks at it.

Nothing here fails because of what it reads. A box that is damaged or cut short is named in the
state, a run that was deleted is said to be gone, and what was known of it stays on the page.
"""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from miniray.dashboard import lanes, view
from miniray.dashboard.access import NotFoundError, Root
from miniray.dashboard.series import Metrics
from miniray.doctor import stacks
from miniray.doctor.diagnose import Diagnosis, examine
from miniray.doctor.model import RankRecord, RunRecord, ThreadStack
from miniray.doctor.reader import read_box, read_run
from miniray.errors import BoxError, MinirayError
from miniray.runs.run_info import get_state

#: Seconds between the first two readings of a run that lives: one alone cannot tell who moves.
_GAP = 0.5
#: Seconds for reading metrics in one look; the rest of a long file comes with the next ones.
_READING = 0.25
#: Points of one curve, and of all curves of one chart.
_MOST_POINTS, _MOST_IN_CHART = 2000, 40_000


class NoStackError(MinirayError):
    """The rank cannot be asked for its stack, and has never shown one."""


class Watch:
    """The state of one run. ``poll`` is called by one thread, everything else by any."""

    def __init__(self, root: Root, name: str) -> None:
        self.name = name
        self.state: dict[str, Any] = {}
        self.viewed = time.monotonic()
        self._root = root
        self._path = root.run(name)
        self._lock = threading.Lock()  # of all below, between the poller and the requests
        self._metrics = Metrics(self._path / "metrics.jsonl")
        self._lanes: dict[int, lanes.Lane] = {}
        self._losses = Metrics(self._path)  # from the ranks' boxes; no file is read for it
        self._ended: dict[Path, tuple[tuple[int, ...], RankRecord]] = {}
        self._before: RunRecord | None = None
        self._last_stacks: dict[Path, tuple[ThreadStack, ...]] = {}
        self._shown: dict[int, tuple[float, tuple[ThreadStack, ...]]] = {}

    # -- the poller's -----------------------------------------------------------------------------

    @property
    def live(self) -> bool:
        return bool(self.state.get("live"))

    @property
    def behind(self) -> bool:
        """More of ``metrics.jsonl`` is there than was read."""
        return self._metrics.lines.behind

    def poll(self) -> None:
        """Read what is new."""
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
        diagnosis = examine(record, self._before, self._fresh_stacks(record))
        with self._lock:
            self._look(diagnosis)
            self._read_metrics()
            found = view.of(diagnosis, record.run, state)
            found.update(name=self.name, charts=self._charts(), loading=self._loading())
            if self._metrics.damaged:
                why = f"{self._metrics.damaged} lines are no JSON objects and were passed over"
                found["damaged"]["metrics.jsonl"] = why
        self._before, self.state = record, found

    def _read_box(self, file: Path) -> RankRecord:
        """A box inside of the root; that of a rank which has ended is read once."""
        seen = file.with_suffix(".exit")
        try:
            real = self._root.inside(file)
            if os.path.lexists(seen):
                self._root.inside(seen)
        except NotFoundError:
            raise BoxError("it leads out of the directory that is served") from None
        status = real.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns, int(seen.exists()))
        known = self._ended.get(file)
        if known is not None and known[0] == stamp:
            return known[1]
        record = read_box(file)
        if not record.alive:
            self._ended[file] = (stamp, record)
        return record

    def _look(self, diagnosis: Diagnosis) -> None:
        for facts in diagnosis.case:
            lane = self._lanes.setdefault(facts.rank, lanes.Lane())
            for steps in lane.look(facts):
                if steps.loss is not None:
                    self._losses.add("loss", facts.rank, "step", steps.step, steps.loss)

    def _read_metrics(self) -> None:
        try:
            self._root.inside(self._path / "metrics.jsonl")
        except NotFoundError:
            return
        began = time.monotonic()
        while self._metrics.read() and self.behind and time.monotonic() - began < _READING:
            continue

    def _fresh_stacks(self, run: RunRecord) -> dict[int, tuple[ThreadStack, ...]]:
        """Stacks that were asked for and still hold: their ranks have done nothing since."""
        with self._lock:
            shown = dict(self._shown)
        found = {}
        for rank, (at, threads) in shown.items():
            record = run.ranks.get(rank)
            if record is not None and max(record.phase.since, record.total.ended) < at:
                found[rank] = threads
        for record in run:
            if not record.alive:
                if record.path not in self._last_stacks:  # it will show no other
                    self._last_stacks[record.path] = self._old_stack(record.path)
                if old := self._last_stacks[record.path]:
                    found[record.rank] = old
        return found

    def _old_stack(self, box: Path) -> tuple[ThreadStack, ...]:
        try:
            self._root.inside(stacks.stack_file(box))
        except NotFoundError:
            return ()
        return stacks.read_stacks(box)

    # -- curves -----------------------------------------------------------------------------------

    def _sources(self, name: str, by_rank: bool) -> Metrics:
        """The file's curves, or those from the boxes where the file has none by rank."""
        if by_rank and not any(self._metrics.of(name, True)):
            return self._losses
        return self._metrics

    def _charts(self) -> list[dict[str, Any]]:
        """Which charts there are, with how many points each: what changes tells what to fetch."""
        found: dict[tuple[str, bool], dict[str, Any]] = {}
        keys = [*self._metrics.series, *self._losses.series]
        for name, by_rank in dict.fromkeys((name, rank is not None) for name, rank in keys):
            curves = [s for _, s in self._sources(name, by_rank).of(name, by_rank)]
            found[name, by_rank] = {
                "name": name,
                "by_rank": by_rank,
                "axis": curves[0].axis,
                "points": sum(series.points for series in curves),
                "bad": sum(series.bad for series in curves),
            }
        return sorted(found.values(), key=_by_interest)

    def _loading(self) -> float | None:
        """How much of ``metrics.jsonl`` is read, while that is less than all."""
        lines = self._metrics.lines
        return round(lines.offset / lines.size, 3) if lines.behind else None

    def chart(
        self, name: str, by_rank: bool, low: float | None = None, high: float | None = None
    ) -> dict[str, Any]:
        """The curves of one chart, thinned; ``low`` and ``high`` are what is seen of its axis."""
        with self._lock:
            curves = list(self._sources(name, by_rank).of(name, by_rank))
            most = min(_MOST_POINTS, _MOST_IN_CHART // max(1, len(curves)))
            return {
                "name": name,
                "by_rank": by_rank,
                "run": self.name,
                "curves": [
                    {"rank": rank, **series.to_json(most, low, high)} for rank, series in curves
                ],
            }

    # -- lanes, stacks ----------------------------------------------------------------------------

    def lanes(self, seconds: float | None, buckets: int) -> dict[str, Any]:
        """Shares of each kind of time, in ``buckets`` equal intervals of the last ``seconds``."""
        with self._lock:
            begin, end, edges = lanes.window(list(self._lanes.values()), seconds, buckets)
            shares = {rank: lane.shares(edges) for rank, lane in self._lanes.items()}
        return {"kinds": lanes.KINDS, "begin": begin, "end": end, "lanes": shares}

    def stack(self, rank: int) -> dict[str, Any]:
        """Ask the rank for its stack, or give its last one. ``NoStackError``: why there is none.

        This is the one thing the dashboard does to a run: a signal that the recorder answers.
        """
        file = self._path / "ranks" / f"{rank}.box"
        self._root.inside(file)
        if os.path.lexists(stacks.stack_file(file)):
            self._root.inside(stacks.stack_file(file))
        try:
            record = read_box(file)
        except BoxError as error:
            raise NoStackError(f"the box of rank {rank} cannot be read: {error}") from None
        found = stacks.ask({rank: record}).get(rank)
        if found:
            with self._lock:
                self._shown[rank] = (time.time(), found)
            return {"rank": rank, "threads": view.stack(found), "note": ""}
        why = _why_not(record)
        old = self._old_stack(file)
        if not old:
            raise NoStackError(f"rank {rank} shows no stack: {why}")
        note = f"{why}; this is the stack it showed when it was last asked"
        return {"rank": rank, "threads": view.stack(old), "note": note}


def _why_not(record: RankRecord) -> str:
    if record.process.stopped:
        return f"its process is stopped; `kill -CONT {record.pid}` lets it go on"
    if not record.alive:
        return "it has ended"
    if record.process.alive is None:
        return f"it runs on another machine ({record.host})"
    return "it did not answer in 3 s"


def _by_interest(chart: dict[str, Any]) -> tuple[Any, ...]:
    """Losses first, then what the user measures, then how long it took; layer 2 before layer 10."""
    name = str(chart["name"])
    natural = [(part.isdigit(), part.zfill(12)) for part in re.split(r"(\d+)", name)]
    return "loss" not in name, not chart["by_rank"], name in ("seconds", "num_samples"), natural
