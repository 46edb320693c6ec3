"""Log records of steps, merged in the driver from the windows of all ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

#: Records per second, at most: shorter windows are merged.
_RATE = 1.0


class LogWindow(NamedTuple):
    """The report of a rank about the steps since its last report.

    Attributes:
        step: The last of these steps; completed steps of the run.
        epoch: The epoch of that step.
        sums: A pair of sum and count by metric, and ``num_samples``.
        facts: Values at the last step, such as the learning rate.
        tokens: Number of tokens, if batches have them.
        steps: Number of steps.
        seconds: Duration.
    """

    step: int
    epoch: int
    sums: Mapping[str, Any]
    facts: Mapping[str, float]
    tokens: int
    steps: int
    seconds: float


class LogMerger:
    """Merges the log windows of all ranks into records.

    A record covers the steps since the last one. Its metrics are means over all samples of all
    ranks. The first step that is logged has its own record. Others come at most once per second,
    and at once if the caller asks for them.

    Args:
        world_size: Number of ranks.

    Attributes:
        restart_step: A restart continues from this step or a later one. Windows of records after it
            are kept. By default, records end where a restart can begin.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._waiting: dict[int, list[LogWindow]] = {}  # by step, until all ranks have reported
        self._merged: list[list[LogWindow]] = []
        self._recorded: list[list[list[LogWindow]]] = []  # of steps after ``restart_step``
        self.restart_step = math.inf
        self._last_record: float | None = None

    def resize(self, world_size: int) -> None:
        """Merge the windows of a different number of ranks from now on."""
        self._world_size = world_size

    def add(self, windows: Iterable[LogWindow]) -> None:
        """Add windows of any ranks."""
        for window in windows:
            self._waiting.setdefault(window.step, []).append(window)
        complete = [s for s, found in self._waiting.items() if len(found) >= self._world_size]
        self._merged += [self._waiting.pop(step) for step in sorted(complete)]

    def take_records(self, *, at_once: bool = False) -> list[dict[str, Any]]:
        """Return records of what all ranks have reported, or none if it is too early."""
        now, taken = time.monotonic(), []
        if self._last_record is None and self._merged:
            taken.append(self._merged[:1])
            self._merged, self._last_record = self._merged[1:], now
        if self._merged and (at_once or now - (self._last_record or 0.0) >= 1 / _RATE):
            taken.append(self._merged)
            self._merged, self._last_record = [], now
        recorded = [*self._recorded, *taken]
        self._recorded = [found for found in recorded if found[-1][0].step > self.restart_step]
        return [merge_windows(merged) for merged in taken]

    def complete(self) -> None:
        """Use incomplete windows too: at the end of an epoch, no rank will report more of them."""
        self._merged += [self._waiting[step] for step in sorted(self._waiting)]
        self._waiting.clear()

    def restart(self, step: int) -> None:
        """Drop incomplete windows, and those after ``step``, from which training continues.

        Records of later steps are written again. Steps up to ``step`` that they covered aren't
        repeated, so their windows are kept for the next record.
        """
        self._waiting.clear()
        removed = [found for found in self._recorded if found[-1][0].step > step]
        candidates = itertools.chain(*removed, self._merged)
        self._merged = [windows for windows in candidates if windows[0].step <= step]
        self._recorded.clear()


def merge_windows(merged: list[list[LogWindow]]) -> dict[str, Any]:
    """Return the record of windows, which are one list of all ranks' per reported step."""
    windows = [window for found in merged for window in found]
    last = merged[-1]
    seconds = sum(max(window.seconds for window in found) for found in merged)
    steps = sum(max(window.steps for window in found) for found in merged)
    samples = sum(window.sums.get("num_samples", 0) for window in windows)
    tokens = sum(window.tokens for window in windows)
    record: dict[str, Any] = {"step": last[0].step, "epoch": last[0].epoch}
    record |= dict(_get_means(window.sums for window in windows))
    for name in sorted({name for window in last for name in window.facts}):
        values = [window.facts[name] for window in last if name in window.facts]
        record[name] = max(values) if name.endswith("memory_mb") else values[0]
    record["step_seconds"] = seconds / max(steps, 1)
    if seconds > 0:
        record["samples_per_second"] = samples / seconds
        if tokens:
            record["tokens_per_second"] = tokens / seconds
    return record


def _get_means(sums: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    totals: dict[str, float] = {}
    counts: dict[str, float] = {}
    for found in sums:
        for name, value in found.items():
            if name != "num_samples":
                totals[name] = totals.get(name, 0.0) + value[0]
                counts[name] = counts.get(name, 0.0) + value[1]
    for name, total in totals.items():
        if counts[name]:
            yield name, total / counts[name]
