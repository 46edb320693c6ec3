"""``LoggerList``: all loggers of a trainer. Their exceptions never end the run."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from miniray.doctor.runfile import mask_secrets
from miniray.files import replace_atomically
from miniray.runs import files
from miniray.runs.run_info import read_run_info
from miniray.train.options import warn
from miniray.train.run import records
from miniray.train.run.directory import DISCARDED, DISCARDED_STEPS, RunDirectory
from miniray.train.run.loggers.base import LoggedRun, Logger, get_axis, get_step
from miniray.train.run.loggers.jsonl import JSONLines
from miniray.train.run.loggers.registry import create_loggers
from miniray.train.run.loggers.system import SystemMetrics
from miniray.train.run.state import TrainState

#: File in the run directory with the ids of the run in tracking tools.
IDS = "loggers.json"


@dataclasses.dataclass(eq=False)
class _Entry:
    """A logger that is enabled, its name in ``loggers.json``, and the run while it is open."""

    logger: Logger
    name: str
    run: LoggedRun | None = None


class LoggerList:
    """Writes each record to ``metrics.jsonl``, then passes it to the loggers.

    A logger whose method raises an exception is disabled: a warning is shown, and the event
    ``logger_failed`` records logger, method and error. The ids that loggers return are kept in
    ``loggers.json``, so that later attempts continue the same runs.

    Args:
        given: Names, see ``registry.LOGGERS``, or ``Logger`` objects.
    """

    def __init__(self, given: str | Logger | Iterable[str | Logger] = ()) -> None:
        self._entries = _name_loggers(create_loggers(given))
        self._run: RunDirectory | None = None
        self._lines: JSONLines | None = None
        self._system: SystemMetrics | None = None
        self._logs_steps = False
        self._step: int | None = None  # of the latest record that has one
        self._scores: set[str] = set()  # names of the scores that were logged at that step

    def open(self, run: RunDirectory, kwargs: Mapping[str, Any]) -> None:
        """Start to log a run, or continue it.

        Args:
            run: Its directory, with ``run.json`` written.
            kwargs: Keyword arguments of ``train()``. They are part of the configuration.
        """
        self._run, self._lines = run, JSONLines(run)
        if not self._entries:
            return
        self._system, self._step, self._scores = SystemMetrics(), None, set()
        info = run.read_run()
        attempts = info.get("attempts", [])
        restarts = sum(attempt.get("state") != "finished" for attempt in attempts)
        ids = files.read_json(run.path / IDS)[0]
        config = {
            **info.get("config", {}),
            "kwargs": records.to_json(mask_secrets(kwargs)),
            "versions": info.get("versions", {}),
        }
        for entry in list(self._entries):
            run_id = ids.get(entry.name)
            reached = None if run_id is None else _find_reached(run)
            entry.run = LoggedRun(run.path, run.path.name, run_id, reached, restarts)
            found = self._call(entry, "open", entry.run)
            if found not in (None, run_id):
                ids[entry.name] = found
                text = json.dumps(ids, indent=2) + "\n"
                replace_atomically(run.path / IDS, text.encode())
            if entry in self._entries:
                self._call(entry, "log_config", config)

    def log_epoch(self, state: TrainState) -> None:
        """Write the last record of the history, which hooks could change, unless it is written."""
        record = state.close_record()
        if record is None:
            return
        assert self._run is not None
        if state.replaces_part:  # which was written
            self._run.truncate_metrics(record["epoch"] - 1)
        self.log(record)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write the record of an epoch, which has an ``epoch`` and may have a global ``step``.

        If steps are logged too, loggers get the means over the epoch as ``epoch_...``, and each
        score of a step once.
        """
        assert self._lines is not None
        self._lines.log(get_step(record), record["epoch"], record)
        if self._logs_steps:
            known = self._scores if get_step(record) in (None, self._step) else set()
            kept = {name: value for name, value in record.items() if name not in known}
            record = {_name_epoch_metric(name): value for name, value in kept.items()}
        self._log(record)

    def log_step(self, record: Mapping[str, Any]) -> None:
        """Write a record of steps, which has a global ``step`` and an ``epoch``."""
        assert self._run is not None
        self._logs_steps = True
        self._run.append_step(record)
        self._log(record)

    def _log(self, record: Mapping[str, Any]) -> None:
        if self._entries:
            assert self._system is not None
            metrics = {**record, **self._system.sample()}
            step = get_step(record)
            # Between records with steps, one without them belongs to the latest step.
            if step not in (None, self._step):
                self._step, self._scores = step, set()
            self._scores |= {name for name in record if _is_score(name)}
            for entry in list(self._entries):
                self._call(entry, "log", self._step, record["epoch"], metrics)

    def close(self) -> None:
        """Store the report with the run, and close all loggers. Do nothing if none is open."""
        if self._run is None:
            return
        state = read_run_info(self._run.path)[0].get("state", "unknown")
        report = self._run.path / "report.html"
        for entry in list(self._entries):
            if entry.run is None:  # open() was interrupted before it
                continue
            entry.run.state = state
            if report.exists():
                self._call(entry, "log_artifact", report)
            if entry in self._entries:
                self._call(entry, "close")
            entry.run = None
        self._run = self._lines = self._system = None

    def _call(self, entry: _Entry, method: str, *arguments: Any) -> Any:
        """Call a method of a logger. Disable the logger if it raises."""
        try:
            return getattr(entry.logger, method)(*arguments)
        except Exception as error:  # whatever a tracking tool raises
            self._disable(entry, method, error)
            return None

    def _disable(self, entry: _Entry, method: str, error: Exception) -> None:
        self._entries.remove(entry)
        name, problem = type(entry.logger).__name__, f"{type(error).__name__}: {error}"
        warn(f"{name}.{method}() failed. The run continues without this logger. {problem}")
        event = {"event": "logger_failed", "logger": name, "method": method, "error": problem}
        assert self._run is not None
        with contextlib.suppress(OSError):  # the disk is full; the warning names the logger
            self._run.append_event(event)
        if method not in ("open", "close"):
            with contextlib.suppress(Exception):  # a consequence of the error above
                entry.logger.close()


def _name_epoch_metric(name: str) -> str:
    is_shared = name in ("step", "epoch", "seconds", "restarts") or _is_score(name)
    return name if is_shared else f"epoch_{name}"


def _is_score(name: str) -> bool:
    return name.startswith("val_")


def _name_loggers(loggers: list[Logger]) -> list[_Entry]:
    """Give each logger a name for ``loggers.json``: its class, and a number from the second on."""
    entries: list[_Entry] = []
    counts: collections.Counter[str] = collections.Counter()
    for logger in loggers:
        kind = type(logger).__name__
        counts[kind] += 1
        name = kind if counts[kind] == 1 else f"{kind}-{counts[kind]}"
        entries.append(_Entry(logger, name))
    return entries


def _find_reached(run: RunDirectory) -> int | None:
    """Return the largest step (epoch, without steps) of all attempts."""
    files = (DISCARDED, DISCARDED_STEPS)
    discarded = [record for name in files for record in records.read_records(run.path / name)]
    found = [
        get_axis(get_step(record), record["epoch"])
        for record in (*run.read_metrics(), *run.read_steps(), *discarded)
        if isinstance(record.get("epoch"), int)
    ]
    return max(found, default=None)
