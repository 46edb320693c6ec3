"""A rank's resident memory over its whole life, in a few points: does it grow without end?

``History`` keeps at most 48 points, evenly spaced: when it is full, every second one goes and the
space between them doubles. So it is written less and less often, and a run of a week fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

_MOST = 48


class History:
    """Points (seconds since the start, step, bytes)."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int]] = []
        self._space = 0.0
        self._began: float | None = None

    def add(self, now: float, step: int, rss: int) -> bool:
        """Note a point if enough time has passed; whether it was noted."""
        if self._began is None:
            self._began = now
        seconds = now - self._began
        if self.points and seconds - self.points[-1][0] < self._space:
            return False
        if len(self.points) >= _MOST:
            self.points = self.points[::2]
            self._space = self.points[-1][0] / (len(self.points) - 1)
        self.points.append((round(seconds, 1), step, rss))
        return True


@dataclasses.dataclass(frozen=True)
class Growth:
    """``rate`` is bytes a second, over the second half of the run's life."""

    rate: float
    since_step: int
    steps: int
    grown: int


def growth(points: Sequence[Sequence[float]], least_seconds: float = 120.0) -> Growth | None:
    """Steady growth in the second half of a rank's life, or None.

    The first half is left out: memory rightly grows while caches and buffers fill. Steady means
    that a straight line fits, and that at least a fifth was added to what there was.
    """
    late = [point for point in points if point[0] >= points[-1][0] / 2]
    if len(late) < 8 or late[-1][0] - late[0][0] < least_seconds / 2:
        return None
    times = [point[0] for point in late]
    sizes = [point[2] for point in late]
    mean_t, mean_s = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((t - mean_t) ** 2 for t in times)
    slope = sum((t - mean_t) * (s - mean_s) for t, s in zip(times, sizes, strict=True)) / spread
    total = sum((s - mean_s) ** 2 for s in sizes)
    rest = sum((s - mean_s - slope * (t - mean_t)) ** 2 for t, s in zip(times, sizes, strict=True))
    grown = slope * (times[-1] - times[0])
    if slope <= 0 or total == 0 or rest / total > 0.1 or grown < 0.2 * sizes[0]:
        return None
    return Growth(slope, int(late[0][1]), int(late[-1][1] - late[0][1]), round(grown))
