"""``Logger``, the base class of all loggers, and what they have in common."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from miniray.train.run.records import as_float, number

__all__ = [
    "LoggedRun",
    "Logger",
    "NewSteps",
    "StepTracker",
    "flatten",
    "get_axis",
    "get_numbers",
    "get_step",
]

#: Name of the metric with the number of restarts, in loggers that can't delete steps.
RESTARTS = "restarts"


@dataclasses.dataclass
class LoggedRun:
    """The run that a logger writes.

    Attributes:
        path: The run directory.
        name: Name of the run.
        run_id: Id that ``open`` returned in an earlier attempt of this run, or None.
        reached: Largest step (epoch, if records have no step) of all earlier attempts, or None.
        restarts: Number of earlier attempts that didn't finish.
        state: ``"running"``; before ``close``, the state in which the run ended.
    """

    path: Path
    name: str
    run_id: str | None = None
    reached: int | None = None
    restarts: int = 0
    state: str = "running"


class Logger:
    """Base class of loggers. Override the methods you need.

    A trainer calls ``open`` and ``log_config`` before the first record of ``train()``, ``log`` for
    each record, and ``log_artifact`` and ``close`` when ``train()`` ends, also after an error. All
    calls come from one thread of the driver. If a method raises an exception, the logger is
    disabled and the run continues.
    """

    #: Packages that the logger imports, and the extra of miniray that installs them.
    packages: Collection[str] = ()
    extra = ""

    def open(self, run: LoggedRun) -> str | None:
        """Start or continue a run. Return its id in the tracking tool, or None if it has none.

        The id is stored in the run directory. The next attempt gets it as ``run.run_id``.
        """
        return None

    def log_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration of the run: plain values, which may be nested."""

    def log(self, step: int | None, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Write a record. ``step`` is None if records have no global step.

        Steps decrease when a run continues from a checkpoint. Don't keep two values for one step.
        """

    def log_artifact(self, path: Path) -> None:
        """Store a file with the run."""

    def close(self) -> None:
        """Write everything that is buffered. ``open`` may be called again."""

    def _check_packages(self) -> None:
        """Raise ``ImportError`` if a package isn't installed. Import nothing."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise ImportError(
                f"{type(self).__name__} needs {' and '.join(missing)}. "
                f"Install it with: pip install 'miniray[{self.extra}]'"
            )


class StepTracker:
    """Detects records of steps that a run has already logged.

    A step may have several records if they have different metrics, such as a training step and the
    evaluation after it.

    Args:
        reached: Step that an earlier attempt reached, with all of its metrics.
    """

    def __init__(self, reached: int | None = None) -> None:
        self.reached = reached
        self._names: set[str] | None = None  # of the metrics at that step; None means all

    def is_repeated(self, position: int, names: Collection[str]) -> bool:
        """Return whether the run has logged this step, or a later one, with these metrics."""
        if self.reached is None or position > self.reached:
            return False
        return position < self.reached or self._names is None or self._names.issuperset(names)

    def names_at(self, position: int) -> set[str]:
        """Return the names of the metrics that were logged at a step."""
        return set(self._names or ()) if position == self.reached else set()

    def move_to(self, position: int, names: Collection[str]) -> None:
        """Set the last step, and add to the metrics that it has."""
        self._names = {*self.names_at(position), *names}
        self.reached = position


class NewSteps:
    """Selects what to send to tools that can't delete steps: steps above the last one only."""

    def __init__(self, run: LoggedRun) -> None:
        self._tracker = StepTracker(run.reached)
        self._restarts = run.restarts
        self._repeats = 0  # decreases of the step since a record with the restarts of ranks
        self._behind = run.reached is not None  # whether a decrease has been counted

    def select(self, position: int, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that are new; {} if the run repeats a step.

        After a restart, they include the number of restarts so far.
        """
        if self._tracker.is_repeated(position, numbers):
            if not self._behind:
                self._restarts += 1
                self._repeats += 1
            self._behind = True
            return {}
        self._behind = False
        known = self._tracker.names_at(position)
        self._tracker.move_to(position, numbers)
        new = {name: value for name, value in numbers.items() if name not in known}
        if RESTARTS in new:  # of ranks, in this epoch
            self._restarts += max(0, int(new.pop(RESTARTS)) - self._repeats)
            self._repeats = 0
        return {**new, RESTARTS: self._restarts} if self._restarts else new


def get_step(record: Mapping[str, Any]) -> int | None:
    """Return the global step of a record, or None.

    A float is the mean of what workers returned as ``step``, which isn't a global step.
    """
    step = record.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def get_axis(step: int | None, epoch: int) -> int:
    """Return the x value of a record: the global step if it has one, else the epoch."""
    return epoch if step is None else step


def get_numbers(step: int | None, metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, by flat names, without the one that is the x axis."""
    axis = "epoch" if step is None else "step"
    flat = ((name, number(value)) for name, value in _iter_flat(metrics, "/"))
    return {name: as_float(value) for name, value in flat if value is not None and name != axis}


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration with one level: ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``."""
    return dict(_iter_flat(config, "."))


def _iter_flat(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            for inner, item in _iter_flat(value, separator):
                yield f"{name}{separator}{inner}", item
        else:
            yield str(name), value
