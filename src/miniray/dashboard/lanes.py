"""Lanes: what a rank did when, for as long as its steps are recorded and the server looks on.

The rank's own record of its steps says how long each took and how that time is divided: waiting
for data, computing, backward, waiting for other ranks. Between steps, and for ranks that record
none, it is what was seen at each look. A lane keeps the running sum of each kind of time at some
moments; the share of each in any interval is a difference of two sums, so old moments can be
dropped without the shares becoming wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.doctor.facts import Facts
from miniray.doctor.model import Steps

#: Kinds of time, in the order they are drawn and sent.
KINDS = ("compute", "backward", "data", "sync", "other")
_COMPUTE, _BACKWARD, _DATA, _SYNC, _OTHER = range(len(KINDS))
_PHASES = {"data": _DATA, "compute": _COMPUTE, "forward": _COMPUTE, "backward": _BACKWARD,
           "optimizer": _COMPUTE}  # fmt: skip
_MOST_MOMENTS = 4096
_MOST_SEEN = 512
_LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Lane:
    """One rank's. ``look`` at every reading; ``shares`` for the page."""

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._sums: list[tuple[float, ...]] = []
        self._seen: list[tuple[float, float, int]] = []  # from, to, kind: not covered by steps yet
        self._step = 0
        self._pid = 0

    @property
    def begin(self) -> float | None:
        return self._moments[0] if self._moments else None

    @property
    def end(self) -> float | None:
        if self._seen:
            return self._seen[-1][1]
        return self._moments[-1] if self._moments else None

    def look(self, facts: Facts) -> list[Steps]:
        """Take in what is new in the rank's record; returns its new steps, for their losses."""
        record = facts.record
        if record.pid != self._pid:  # a new process is the rank now: its steps begin anew
            self._pid, self._step = record.pid, 0
        if not self._moments:
            self._moments, self._sums = [record.attached], [(0.0,) * len(KINDS)]
        fresh = [s for s in record.steps if s.step > self._step]
        for steps in fresh:
            self._take(steps)
        self._see(facts)
        if len(self._moments) > _MOST_MOMENTS:
            half = len(self._moments) // 2
            del self._moments[1:half:2], self._sums[1:half:2]
        return fresh

    def _take(self, steps: Steps) -> None:
        lost = self._step and steps.step - steps.count > self._step
        self._step = steps.step
        if not lost:  # else nobody wrote down the steps between: they were like these
            self._settle(max(self._moments[-1], steps.ended - steps.seconds))
        length = steps.ended - self._moments[-1]
        parts = (steps.compute, steps.backward, steps.data, steps.collective, 0.0)
        if length <= 0 or sum(parts) <= 0:
            return
        scale = length / sum(parts)
        self._grow(steps.ended, [part * scale for part in parts])
        self._seen = [(max(a, steps.ended), b, k) for a, b, k in self._seen if b > steps.ended]

    def _settle(self, until: float) -> None:
        """What was seen before ``until`` is all that will be known of it."""
        for begin, end, kind in self._seen:
            begin, end = max(begin, self._moments[-1]), min(end, until)
            if end > begin:
                if begin > self._moments[-1]:
                    self._grow(begin, _one(_OTHER, begin - self._moments[-1]))
                self._grow(end, _one(kind, end - begin))
        if until > self._moments[-1]:
            self._grow(until, _one(_OTHER, until - self._moments[-1]))
        self._seen = [(max(a, until), b, k) for a, b, k in self._seen if b > until]

    def _grow(self, moment: float, parts: Sequence[float]) -> None:
        self._moments.append(moment)
        self._sums.append(tuple(a + b for a, b in zip(self._sums[-1], parts, strict=True)))

    def _see(self, facts: Facts) -> None:
        """What it does now, since when; up to the moment of its end where it has ended."""
        record = facts.record
        ended = record.exit
        now = facts.now
        if ended is not None or record.process.alive is False:
            now = ended.at if ended is not None and ended.at else facts.last_move
        last = self.end or record.attached
        if now <= last:
            return
        if facts.wait is not None:
            kind, since = _SYNC, facts.wait.since
        else:
            since = record.phase.since
            kind = _PHASES.get(record.phase.name, _OTHER)
            if record.section is not None and kind == _OTHER:
                kind, since = _COMPUTE, record.section.since
        since = min(max(since, last), now)
        if since > last:
            before = self._seen[-1][2] if self._seen else _OTHER
            self._add_seen(last, since, before)
        self._add_seen(since, now, kind)

    def _add_seen(self, begin: float, end: float, kind: int) -> None:
        if self._seen and self._seen[-1][2] == kind and self._seen[-1][1] == begin:
            begin = self._seen.pop()[0]
        self._seen.append((begin, end, kind))
        if len(self._seen) > _MOST_SEEN:
            self._settle(self._seen[_MOST_SEEN // 2][0])

    def shares(self, edges: np.ndarray) -> str:
        """For each interval between two edges and each kind, its share as one of 36 signs."""
        whole = Lane()  # with what was seen as if it were known for good
        whole._moments, whole._sums = [*self._moments], [*self._sums]
        whole._seen = self._seen
        whole._settle(self.end or 0.0)
        table = np.array(whole._sums)
        parts = np.stack([np.diff(np.interp(edges, whole._moments, sums)) for sums in table.T], 1)
        levels = np.rint(parts / np.diff(edges)[:, None] * 35).clip(0, 35).astype(int)
        return "".join(_LEVELS[level] for level in levels.ravel())


def window(
    lanes: Sequence[Lane], seconds: float | None, buckets: int
) -> tuple[float, float, np.ndarray]:
    """(begin, end, edges) of the last ``seconds``, or of everything."""
    begin = min((lane.begin for lane in lanes if lane.begin is not None), default=0.0)
    end = max((lane.end for lane in lanes if lane.end is not None), default=1.0)
    if seconds is not None:
        begin = max(begin, end - seconds)
    end = max(end, begin + 1e-3)
    return begin, end, np.linspace(begin, end, buckets + 1)


def _one(kind: int, seconds: float) -> list[float]:
    return [seconds if kind == index else 0.0 for index in range(len(KINDS))]
