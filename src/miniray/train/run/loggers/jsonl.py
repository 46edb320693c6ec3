"""JSON lines: ``metrics.jsonl`` of the run directory, which every run writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniray.train.run.directory import RunDirectory
from miniray.train.run.loggers.base import Logger


class JSONLines(Logger):
    """Appends each record to ``metrics.jsonl``. Resuming, the report and all tools read that file.

    Unlike other loggers, it isn't disabled by an error: the run couldn't be resumed.
    """

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def log(self, step: int | None, epoch: int, metrics: Mapping[str, Any]) -> None:
        self._run.append_metrics(metrics)
