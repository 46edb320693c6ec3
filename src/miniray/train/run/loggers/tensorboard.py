"""TensorBoard: event files, written without torch or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.checks import check_path, suggest_options
from miniray.train.run.loggers.base import (
    LoggedRun,
    Logger,
    StepTracker,
    flatten,
    get_axis,
    get_numbers,
)


@suggest_options()
class TensorBoardLogger(Logger):
    """Writes numbers as TensorBoard scalars, and the configuration to the tab HPARAMS.

    When a run continues from a checkpoint, TensorBoard hides the earlier values of repeated steps.

    Args:
        directory: Directory of the event files; ``tensorboard`` in the run directory by default.
    """

    packages = ("tensorboard",)
    extra = "tensorboard"

    def __init__(self, directory: str | Path | None = None) -> None:
        self._given = None if directory is None else Path(check_path("directory", directory))
        self._writer: Any = None
        self._config: dict[str, Any] = {}
        self._tracker = StepTracker()
        self._started = False  # whether this attempt has written a record
        self._check_packages()

    def open(self, run: LoggedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory = self._given or run.path / "tensorboard"
        self._writer = EventFileWriter(str(directory))
        self._tracker, self._started = StepTracker(), False

    def log_config(self, config: Mapping[str, Any]) -> None:
        self._config = flatten(config)

    def log(self, step: int | None, epoch: int, metrics: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = get_numbers(step, metrics)
        position = get_axis(step, epoch)
        if not self._started or self._tracker.is_repeated(position, numbers):
            self._purge(position)
        if not self._started:
            self._write_config()
            self._started = True
        self._tracker.move_to(position, numbers)
        values = [Summary.Value(tag=k, simple_value=v) for k, v in numbers.items()]
        self._add_event(step=position, summary=Summary(value=values))
        self._writer.flush()  # so that TensorBoard shows it, even if the process is killed

    def _purge(self, position: int) -> None:
        """Make TensorBoard hide what was written for this step and later ones."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add_event(step=position, session_log=SessionLog(status=SessionLog.START))

    def _write_config(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        info = SessionStartInfo(start_time_secs=time.time())
        for name, value in self._config.items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, (int, float)):
                info.hparams[name].number_value = value
            elif value is not None:
                info.hparams[name].string_value = str(value)
        content = HParamsPluginData(session_start_info=info, version=0).SerializeToString()
        data = SummaryMetadata.PluginData(plugin_name="hparams", content=content)
        metadata = SummaryMetadata(plugin_data=data)
        tag = "_hparams_/session_start_info"
        self._add_event(summary=Summary(value=[Summary.Value(tag=tag, metadata=metadata)]))

    def _add_event(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), **fields))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
