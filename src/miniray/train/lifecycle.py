"""What a trainer starts and must end: the engine, the run's directory, its checkpoints on disk.

If anything raises while training, the run's directory says so, the workers are ended, and so is the
engine if the trainer started it. A user's own engine is left running.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import miniray
from miniray.core import session
from miniray.train.checkpoint import CheckpointStore
from miniray.train.rundir import RunDirectory
from miniray.train.workers import WorkerGroup


class Lifecycle:
    """The part of every trainer that is about starting and ending; see the module."""

    def __init__(
        self,
        name: str | None,
        run_dir: str | Path | None,
        backend: str | None,
        keep_last: int,
        keep_best: tuple[str, str] | None,
    ) -> None:
        self.run: RunDirectory | None = None
        self.checkpoints: CheckpointStore | None = None
        self._name, self._run_dir = name, run_dir
        self._backend = backend
        self._keep_last, self._keep_best = keep_last, keep_best
        self._group: WorkerGroup | None = None
        self._owned_session: session.Session | None = None

    @property
    def workers(self) -> list[Any]:
        """The workers' handles, by worker id. A worker that is replaced has a new one here."""
        return self._group.handles if self._group is not None else []

    # -- the start --------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        if not miniray.is_initialized():
            self._owned_session = miniray.init(backend=self._backend)
        elif self._backend not in (None, session.engine().name):
            raise RuntimeError(
                f"backend={self._backend!r}, but miniray is running on {session.engine().name!r}"
            )

    def _open_run(self) -> None:
        if self.run is None:
            self.run = RunDirectory.open(self._run_dir, self._name, type(self).__name__)
        if self.checkpoints is None:
            self.checkpoints = self._store(self.run.checkpoints)
        self.run.write_run(self._describe())

    def _store(self, directory: Path) -> CheckpointStore:
        return CheckpointStore(
            directory,
            keep_last=self._keep_last,
            keep_best=self._keep_best,
            on_event=self._on_worker_event,
        )

    def _describe(self) -> dict[str, Any]:
        """What ``run.json`` says about this run besides versions and machine."""
        return {"trainer": type(self).__name__, "backend": session.engine().name}

    def _on_worker_event(self, event: dict[str, Any]) -> None:
        assert self.run is not None
        self.run.append_event(event)

    # -- the end ----------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        if self.run is not None:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self.run.finish(state, error=error)
        self.shutdown()
        if self.run is not None:
            from miniray.train.ending import record_ends  # nothing before a failure needs it

            record_ends(self.run.path / "ranks", error)
        self._write_report()

    def _write_report(self) -> None:
        """The run as a page, at its end. A page that cannot be written is said, and is no error."""
        if self.run is None:
            return
        try:
            from miniray.report import write_report  # nothing before the end of a run needs it

            write_report(self.run.path)
        except Exception as error:  # whatever a reader of files may meet; the training is done
            print(f"no report of {self.run.path}: {error}", file=sys.stderr, flush=True)

    def shutdown(self) -> None:
        """End the workers, and the engine if ``train`` started it. Safe to call twice."""
        group, self._group = self._group, None
        if self.checkpoints is not None:
            self.checkpoints.close()
        if self._owned_session is not None:
            owned, self._owned_session = self._owned_session, None
            if session.is_initialized() and session.engine() is owned.engine:
                miniray.shutdown()
        elif group is not None and miniray.is_initialized():
            group.stop()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.shutdown()
