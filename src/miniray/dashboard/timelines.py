"""Compute timelines, which show how each rank spent its time.

For each step, a rank records how much time it spent on loading data, on computation, on the
backward pass and on waiting for other ranks. For the time between steps, and for ranks that record
no steps, the timeline uses the phases that the server observed when it polled the run.

A timeline records, at several moments, the cumulative time that the rank has spent in each
category. To compute the time spent in a category during an interval, subtract the value at the
start of the interval from the value at its end. The result is still correct if some of these
values are deleted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniray.doctor.facts import Facts
from miniray.doctor.model import Steps

#: Categories of time, in the order in which they are sent and drawn.
KINDS = ("compute", "backward", "data", "sync", "other")
_COMPUTE, _BACKWARD, _DATA, _SYNC, _OTHER = range(len(KINDS))
_PHASES = {"data": _DATA, "compute": _COMPUTE, "forward": _COMPUTE, "backward": _BACKWARD,
           "optimizer": _COMPUTE}  # fmt: skip
_MOST_MOMENTS = 4096
_MOST_OBSERVATIONS = 512
_LEVELS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Timeline:
    """The timeline of a rank.

    ``update`` must be called at each poll. The page displays the values that ``shares`` returns.
    """

    def __init__(self) -> None:
        self._moments: list[float] = []
        self._sums: list[tuple[float, ...]] = []
        # (begin, end, kind) tuples for the time after the last step record
        self._observed: list[tuple[float, float, int]] = []
        self._step = 0  # number of the newest step in this attempt
        self._last = (0, 0)  # attempt and number of the newest step
        self._pid = 0

    @property
    def begin(self) -> float | None:
        return self._moments[0] if self._moments else None

    @property
    def end(self) -> float | None:
        if self._observed:
            return self._observed[-1][1]
        return self._moments[-1] if self._moments else None

    def update(self, facts: Facts) -> list[Steps]:
        """Append the new data from the rank's record to the timeline.

        Return the new steps of all attempts of the rank.
        """
        record = facts.record
        attempt = record.total.attempt
        if record.pid != self._pid:  # the rank was restarted, and its steps start at 1 again
            self._pid, self._step = record.pid, 0
            if self._last[0] == attempt:
                self._last = attempt, 0
        if not self._moments:
            self._moments, self._sums = [record.attached], [(0.0,) * len(KINDS)]
        fresh = [s for s in record.history if (s.attempt, s.step) > self._last]
        for steps in fresh:
            self._last = steps.attempt, steps.step
            if steps.attempt == attempt:
                self._add_steps(steps)
        self._observe(facts)
        if len(self._moments) > _MOST_MOMENTS:
            half = len(self._moments) // 2
            del self._moments[1:half:2], self._sums[1:half:2]
        return fresh

    def _add_steps(self, steps: Steps) -> None:
        lost = self._step and steps.step - steps.count > self._step
        self._step = steps.step
        if not lost:  # lost step records are assumed to be similar to this one
            self._commit_until(max(self._moments[-1], steps.ended - steps.seconds))
        length = steps.ended - self._moments[-1]
        parts = (steps.compute, steps.backward, steps.data, steps.collective, 0.0)
        if length <= 0 or sum(parts) <= 0:
            return
        scale = length / sum(parts)
        self._append(steps.ended, [part * scale for part in parts])
        self._observed = [
            (max(a, steps.ended), b, k) for a, b, k in self._observed if b > steps.ended
        ]

    def _commit_until(self, until: float) -> None:
        """Permanently store the observations before ``until``, which no step record covers."""
        for begin, end, kind in self._observed:
            begin, end = max(begin, self._moments[-1]), min(end, until)
            if end > begin:
                if begin > self._moments[-1]:
                    self._append(begin, _one_kind(_OTHER, begin - self._moments[-1]))
                self._append(end, _one_kind(kind, end - begin))
        if until > self._moments[-1]:
            self._append(until, _one_kind(_OTHER, until - self._moments[-1]))
        self._observed = [(max(a, until), b, k) for a, b, k in self._observed if b > until]

    def _append(self, moment: float, parts: Sequence[float]) -> None:
        self._moments.append(moment)
        self._sums.append(tuple(a + b for a, b in zip(self._sums[-1], parts, strict=True)))

    def _observe(self, facts: Facts) -> None:
        """Add the current phase of the rank to the observations.

        The phase ends at the current time, or at the time at which the rank ended.
        """
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
            before = self._observed[-1][2] if self._observed else _OTHER
            self._add_observation(last, since, before)
        self._add_observation(since, now, kind)

    def _add_observation(self, begin: float, end: float, kind: int) -> None:
        if self._observed and self._observed[-1][2] == kind and self._observed[-1][1] == begin:
            begin = self._observed.pop()[0]
        self._observed.append((begin, end, kind))
        if len(self._observed) > _MOST_OBSERVATIONS:
            self._commit_until(self._observed[_MOST_OBSERVATIONS // 2][0])

    def shares(self, edges: np.ndarray) -> str:
        """Return the fraction of each interval that the rank spent in each category.

        The result is a string that encodes each fraction as one of 36 characters.
        """
        whole = Timeline()  # a copy in which all observations are committed
        whole._moments, whole._sums = [*self._moments], [*self._sums]
        whole._observed = self._observed
        whole._commit_until(self.end or 0.0)
        table = np.array(whole._sums)
        parts = np.stack([np.diff(np.interp(edges, whole._moments, sums)) for sums in table.T], 1)
        levels = np.rint(parts / np.diff(edges)[:, None] * 35).clip(0, 35).astype(int)
        return "".join(_LEVELS[level] for level in levels.ravel())


def get_window(
    timelines: Sequence[Timeline], seconds: float | None, buckets: int
) -> tuple[float, float, np.ndarray]:
    """Return the time range to display and the edges of its intervals.

    The range covers the last ``seconds``, or the whole timeline if ``seconds`` is None.

    Returns:
        A ``(begin, end, edges)`` tuple.
    """
    begin = min((t.begin for t in timelines if t.begin is not None), default=0.0)
    end = max((t.end for t in timelines if t.end is not None), default=1.0)
    if seconds is not None:
        begin = max(begin, end - seconds)
    end = max(end, begin + 1e-3)
    return begin, end, np.linspace(begin, end, buckets + 1)


def _one_kind(kind: int, seconds: float) -> list[float]:
    return [seconds if kind == index else 0.0 for index in range(len(KINDS))]
