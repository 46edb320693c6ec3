"""The run directory, which is readable at any time, even if the run was killed.

::

    runs/<name>/
      run.json          what ran, with which versions, where; how it ended
      metrics.jsonl     one line per epoch (RL: per step)
      steps.jsonl       means over the last steps, and scores at a step
      events.jsonl      failures, restarts, truncations: what happened and when
      checkpoints/…     see ``checkpoint``
      loggers.json      ids of the run in tracking tools; see ``loggers``
      .lock             locked by the process that trains; contains its pid and host

``run.json`` is replaced atomically. The ``.jsonl`` files grow by one ``write(2)`` per line and
follow the rules of ``records`` (NaN is ``"NaN"``). Reading doesn't need the process of the run. If
it was killed, ``run.json`` still contains ``"state": "running"``; ``status()`` returns ``died``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miniray.doctor import runfile
from miniray.errors import MinirayError, RunLockedError, TaskError
from miniray.files import replace_atomically
from miniray.runs.run_info import get_state, read_run_info
from miniray.train.run import records
from miniray.train.run.lock import (
    LOCK,
    RunLock,
    create_continued_error,
    create_locked_error,
)

#: Lines that were removed from metrics.jsonl, because the run went back to an earlier epoch.
DISCARDED = "metrics.discarded.jsonl"
#: Lines that were removed from steps.jsonl, for the same reason.
DISCARDED_STEPS = "steps.discarded.jsonl"
#: Ends of a run that may have left nothing behind.
_FAILED = ("failed", "interrupted", "preempted", "died")
#: Fields that are kept of an attempt when the run is resumed.
_ATTEMPT = ("started", "ended", "state", "error", "pid", "host", "world_size", "stop_reason")


class RunDirectory:
    """The directory of one run. ``open`` creates a new one, ``reopen`` continues an existing one.

    ``RunDirectory(path)`` is for reading. It creates nothing, and raises ``FileNotFoundError`` if
    the directory doesn't exist.

    One process writes at a time. ``open``, ``reopen``, ``write_run`` and ``truncate_metrics`` lock
    the directory for this process. ``finish`` releases the lock, and so does the end of the
    process, however it ends. If a different process holds it, they raise ``RunLockedError``. So
    does ``write_run`` if a different process has continued the run since this object last wrote it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"there is no run directory {self.path}")
        self.run_file = self.path / "run.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.steps_file = self.path / "steps.jsonl"
        self.events_file = self.path / "events.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.lock_file = self.path / LOCK
        self._lock = RunLock(self.path)
        #: Number of earlier attempts in run.json when this object last wrote it.
        self._num_attempts: int | None = None

    @classmethod
    def open(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        prefix: str = "run",
        *,
        root: str | os.PathLike[str] = "runs",
    ) -> RunDirectory:
        """Create the directory of a new run: ``run_dir``, or ``root/name``, or a name with the
        time.

        The default name is ``<prefix>-<YYYYmmdd-HHMMSS>``, with ``-2`` and so on for runs that
        start in the same second. If the directory already contains a run, ``FileExistsError`` is
        raised, unless that run failed before it had trained an epoch. In this case, the new run is
        its next attempt. If ``name`` isn't the name of a directory, ``ValueError`` is raised.
        """
        check_name(name)
        if run_dir is not None:
            return cls._claim(Path(run_dir))
        if name is not None:
            return cls._claim(Path(root) / name)
        clean = re.sub(r"[^\w.-]+", "_", prefix).lstrip(".-") or "run"
        run = cls(runfile.new_directory(Path(root), clean))
        run._lock.acquire()
        return run

    @classmethod
    def _claim(cls, path: Path) -> RunDirectory:
        runfile.make_private(path)
        run = cls(path)
        run._lock.acquire()
        trained = run.metrics_file.exists() or run.checkpoints.exists()
        if trained or (run.run_file.exists() and not run._has_failed()):
            raise FileExistsError(
                f"{path} already contains a run. Pass resume=True to continue it, or choose a "
                "different name"
            )
        run.truncate_steps(0)
        return run

    def _has_failed(self) -> bool:
        try:
            return self.status() in _FAILED
        except ValueError:  # damaged, but still a run
            return False

    @classmethod
    def reopen(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Continue the run at ``path``. Raise ``RunLockedError`` while a different process runs it.

        On a file system without locks, only processes of this host are noticed.
        """
        run = cls(path)
        run._lock.acquire()
        info = run.read_run()
        if run.status() == "running" and info.get("pid") != os.getpid():
            raise create_locked_error(run.path, info)
        return run

    # -- run.json ---------------------------------------------------------------------------------

    def write_run(self, config: Mapping[str, Any], name: str | None = None) -> None:
        """Write ``run.json`` with state ``running``. Values that JSON lacks become strings.

        ``seed`` and ``world_size`` (or ``num_workers``) are taken from ``config``. If the run was
        written before, the previous attempt and its outcome are kept under ``attempts``.
        """
        self._lock.acquire()
        before = self.read_run()
        attempts = before.pop("attempts", [])
        if self._was_continued(attempts):
            self._lock.release()
            raise create_continued_error(self.path, before)
        if before:
            if before.get("state") == "running" and before.get("pid") != os.getpid():
                before["state"] = "died"  # its process ended without recording a state
            attempts.append({key: before[key] for key in _ATTEMPT if before.get(key) is not None})
            self._put_ranks_aside()
        size = config.get("world_size", config.get("num_workers"))
        begun = runfile.beginning(name or self.path.name, config.get("seed"), size, config)
        self._write({**begun, "attempts": attempts})
        self._num_attempts = len(attempts)

    def _was_continued(self, attempts: list[Any]) -> bool:
        """Return whether a different process has written the run since this object did."""
        return self._num_attempts not in (None, len(attempts))

    def _put_ranks_aside(self) -> None:
        """Archive the records of the previous attempt, which may have had more ranks."""
        for box in (self.path / "ranks").glob("*.box"):
            _archive_box(box)

    def change_world_size(self, world_size: int) -> None:
        """Record a different number of ranks, and put the records of dropped ranks aside."""
        for box in (self.path / "ranks").glob("*.box"):
            if box.stem.isdigit() and int(box.stem) >= world_size:
                _archive_box(box)
        self._write({**self.read_run(), "world_size": world_size})

    def finish(
        self, state: str = "finished", error: BaseException | str | None = None, **fields: Any
    ) -> None:
        """Record how the run ended, with one of ``STATES``, and why.

        Record type, message and traceback of ``error``, and the fields of a ``MinirayError``. Add
        ``fields`` to ``run.json``. Do nothing if a different process has continued the run, because
        ``run.json`` then describes that process.
        """
        try:
            self._lock.acquire()
        except RunLockedError:
            return
        run = self.read_run()
        if self._was_continued(run.get("attempts", [])):
            self._lock.release()
            return
        run.update(fields)
        run.update(state=state, ended=runfile.now())
        if isinstance(error, BaseException):
            run["error"] = {
                "type": type(error).__qualname__,
                "message": str(error),
                "traceback": "".join(traceback.format_exception(error)),
                **_get_error_fields(error),
            }
        elif error is not None:
            run["error"] = {"type": None, "message": error, "traceback": None}
        self._write(run)
        self._lock.release()

    def discard_if_empty(self) -> None:
        """Delete the directory unless a run, this one or an earlier one, left files in it."""
        if {path.name for path in self.path.iterdir()} <= {LOCK}:
            self.lock_file.unlink(missing_ok=True)
            self.path.rmdir()
        self._lock.release()

    def read_run(self) -> dict[str, Any]:
        """Return the fields of ``run.json``; {} if it doesn't exist.

        Raise ``ValueError`` if it's damaged.
        """
        run, problem = read_run_info(self.path)
        if problem:
            raise ValueError(f"{self.run_file} is damaged: {problem}")
        return run

    def status(self) -> str:
        """Return the state in ``run.json``, ``died`` if its process has ended, or ``unknown``.

        For a run on a different machine, only the recorded state is known.
        """
        return get_state(self.read_run())

    def _write(self, run: Mapping[str, Any]) -> None:
        text = json.dumps(records.to_json(run), indent=2, ensure_ascii=False, allow_nan=False)
        replace_atomically(self.run_file, (text + "\n").encode())

    # -- metrics.jsonl, events.jsonl --------------------------------------------------------------

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add a line to ``metrics.jsonl``; see ``records`` for values that JSON doesn't support."""
        records.append_record(self.metrics_file, record)

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all complete lines. An incomplete last line is ignored."""
        return records.read_records(self.metrics_file)

    def truncate_metrics(self, epoch: int) -> int:
        """Remove the lines of epochs after ``epoch``, which will be trained again.

        The lines are moved to ``metrics.discarded.jsonl``, and the move is recorded as an event.
        Lines without an epoch are kept. Return the number of lines that were moved. If the process
        is killed during the call, ``metrics.jsonl`` is either unchanged or truncated.
        """
        self._lock.acquire()
        self._num_attempts = None  # the caller continues from what the last attempt left
        count = _move_records(self.metrics_file, self.path / DISCARDED, "epoch", epoch)
        if count:
            self.append_event({"event": "metrics_truncated", "epoch": epoch, "lines": count})
        return count

    def rewind(self, epoch: int, step: int, history: Iterable[Mapping[str, Any]]) -> None:
        """Truncate the records at a position to which the run returns.

        Args:
            epoch: Number of completed epochs.
            step: Number of completed steps.
            history: The records of the epochs. Those that aren't in ``metrics.jsonl`` are added:
                all in the directory of a new run, the last one if a hook was killed.
        """
        self.truncate_metrics(epoch - 1)
        self.truncate_steps(step)
        written = {record.get("epoch") for record in self.read_metrics()}
        for record in history:
            if record["epoch"] not in written:
                self.append_metrics(record)

    def append_step(self, record: Mapping[str, Any]) -> None:
        """Add a line to ``steps.jsonl``: means over the last steps, or scores at a step."""
        records.append_record(self.steps_file, record)

    def read_steps(self) -> list[dict[str, Any]]:
        """Return the records of steps, oldest first, without an incomplete last line."""
        return records.read_records(self.steps_file)

    def truncate_steps(self, step: int) -> None:
        """Move the records of steps after ``step`` to ``steps.discarded.jsonl``.

        These steps are trained again.
        """
        _move_records(self.steps_file, self.path / DISCARDED_STEPS, "step", step)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add a line to ``events.jsonl``, with the time. ``event["event"]`` is the type."""
        records.append_record(self.events_file, {"time": runfile.now(), **event})

    def read_events(self) -> list[dict[str, Any]]:
        """Return failures, restarts, checkpoints and other events, oldest first."""
        return records.read_records(self.events_file)

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"


def _move_records(source: Path, target: Path, field: str, last: int) -> int:
    """Move the records whose ``field`` is above ``last`` to a different file; return how many."""
    kept: list[dict[str, Any]] = []
    moved: list[dict[str, Any]] = []
    for record in records.read_records(source):
        number = records.number(record.get(field))
        (kept if number is None or number <= last else moved).append(record)
    for record in moved:
        records.append_record(target, record)
    if moved:
        replace_atomically(source, b"".join(records.dump_line(record) for record in kept))
    return len(moved)


def _archive_box(box: Path) -> None:
    """Keep what an ended rank left, in a directory of its attempt."""
    from miniray.doctor.reader import read_box
    from miniray.doctor.recorder import archive
    from miniray.errors import BoxError

    with contextlib.suppress(BoxError):  # nothing that could be kept
        if not (left := read_box(box)).process.alive:
            archive(box, left.attempt)


def check_name(name: str | None) -> None:
    """Raise ``ValueError`` if ``name`` isn't a valid name of a run."""
    if name is not None and (name in ("", ".", "..") or Path(name).name != name):
        raise ValueError(f"{name!r} can't be the name of a run: it must be a plain directory name")


def _get_error_fields(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, MinirayError):
        return {}
    fields = {name: getattr(error, name) for name in error.FIELDS}
    if isinstance(error, TaskError):
        fields["remote_traceback"] = error.remote_traceback
    return {name: value for name, value in fields.items() if value is not None}
