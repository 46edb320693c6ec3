"""What a trainer starts and must end: the engine, the run's directory, its checkpoints on disk.

If anything raises while training, the run's directory says so, the workers are ended, and so is the
engine if a trainer started it and no other one uses it. A user's own is left running.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import miniray
from miniray.checks import check_bool
from miniray.core import session
from miniray.core.engine import Engine
from miniray.train.run.checkpoint_store import CheckpointStore, check_keeping
from miniray.train.run.directory import RunDirectory, check_name
from miniray.train.workers.group import WorkerGroup

#: Trainers that have started: of those that share an engine the last one ends it.
_started: weakref.WeakSet[Lifecycle] = weakref.WeakSet()
_starting = threading.RLock()  # trainers may run in several threads


class Lifecycle:
    """The part of every trainer that is about starting and ending; see the module."""

    def __init__(
        self,
        name: str | None,
        run_dir: str | Path | None,
        backend: str | None,
        keep_last: int,
        keep_best: tuple[str, str] | None,
        progress: bool,
    ) -> None:
        check_keeping(keep_last, keep_best)
        check_name(name)
        self.run: RunDirectory | None = None
        self.checkpoints: CheckpointStore | None = None
        self._name = name
        self._run_dir = None if run_dir is None else Path(run_dir).expanduser()
        self._backend = None if backend is None else session.choose_backend(backend)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._group: WorkerGroup | None = None
        self._owned_session: session.Session | None = None
        self._used: Engine | None = None  # the engine, from its start to shutdown()
        self._progress = check_bool("progress", progress)

    @property
    def _title(self) -> str:
        """By what its runs are named, and known where the newest is to be taken up."""
        return type(self).__name__

    @property
    def workers(self) -> list[Any]:
        """The workers' handles, by worker id. A worker that is replaced has a new one here."""
        return self._group.handles if self._group is not None else []

    # -- the start --------------------------------------------------------------------------------

    def _start_engine(self) -> None:
        with _starting:
            if not miniray.is_initialized():
                self._owned_session = miniray.init(backend=self._backend)
            elif self._backend not in (None, session.engine().name):
                running = session.engine().name
                raise RuntimeError(
                    f"backend={self._backend!r}, but miniray is running on {running!r}"
                )
            self._used = session.engine()
            _started.add(self)

    def _open_run(self) -> None:
        if self.run is None:
            self.run = RunDirectory.open(self._run_dir, self._name, self._title)
        if self.checkpoints is None:
            self.checkpoints = self._store(self.run.checkpoints)
        self.run.write_run(self._describe(), self._name)

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
        """Who fails is in the run's directory; that somebody else goes on is also said aloud."""
        assert self.run is not None
        self.run.append_event(event)
        done = {
            "worker_replaced": f"worker {event.get('worker')} was replaced",
            "ranks_restarted": "all ranks were started again",
        }.get(event["event"])
        if done and self._progress:
            why = event["reason"].partition("\n")[0]
            print(f"{done}: {why}", file=sys.stderr, flush=True)

    # -- the end ----------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        with self._writing("its end is not in"):
            if self.run is not None:
                state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                self.run.finish(state, error=error)
        self.shutdown()
        with self._writing("how its workers ended is not in"):
            if self.run is not None:
                from miniray.train.workers.exits import (
                    record_ends,  # nothing before a failure needs it
                )

                record_ends(self.run.path / "ranks", error)
        self._write_report()
        with self._writing("no way to go on with"):
            if self._progress and self.run is not None and self.checkpoints is not None:
                newest = self.checkpoints.newest()
                how = f"; resume=True goes on from {newest.name}" if newest is not None else ""
                print(f"the run is in {self.run.path}{how}", file=sys.stderr, flush=True)

    def _write_report(self) -> None:
        """The run as a page, at its end."""
        with self._writing("no report of"):
            if self.run is not None:
                from miniray.report import write_report  # nothing before the end of a run needs it

                write_report(self.run.path)

    @contextlib.contextmanager
    def _writing(self, failed: str) -> Iterator[None]:
        """What cannot be written at the end of a run is said: the run's own error comes first."""
        try:
            yield
        except Exception as error:  # whatever a reader and writer of files may meet
            assert self.run is not None
            print(f"{failed} {self.run.path}: {error}", file=sys.stderr, flush=True)

    def shutdown(self) -> None:
        """End the workers, and the engine if ``train`` started it. Safe to call twice."""
        group, self._group = self._group, None
        if self.checkpoints is not None:
            self.checkpoints.close()
        with _starting:
            self._used = None
            owned, self._owned_session = self._owned_session, None
            if owned is not None and session.is_initialized() and session.engine() is owned.engine:
                heir = next((t for t in _started if t._used is owned.engine), None)
                if heir is None:
                    miniray.shutdown()
                    return
                heir._owned_session = owned
        if group is not None:
            group.stop()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
