"""The engine, the run directory and the outcome of a trainer's run.

If ``train`` raises, ``run.json`` records the error, the workers are stopped, and the engine is shut
down if a trainer started it and no other trainer uses it. An engine that the user started keeps
running.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import miniray
from miniray.core import session
from miniray.core.engine import Engine
from miniray.runs.report_writer import write_report
from miniray.train.options import RunOptions
from miniray.train.run.directory import RunDirectory
from miniray.train.run.signals import Preempted, StopSignals
from miniray.train.run.state import TrainState

#: Leases of each engine that trainers use.
_leases: weakref.WeakKeyDictionary[Engine, weakref.WeakSet[EngineLease]] = (
    weakref.WeakKeyDictionary()
)
#: Engines that were started by a lease.
_started: weakref.WeakSet[Engine] = weakref.WeakSet()
_lock = threading.RLock()  # trainers may run in several threads


class EngineLease:
    """The use of an engine by one trainer, which starts the engine if none is running.

    Leases are counted per engine. If a lease started the engine, releasing the last one shuts it
    down.

    Raises:
        RuntimeError: An engine other than ``backend`` is running.
    """

    def __init__(self, backend: str | None) -> None:
        with _lock:
            if not miniray.is_initialized():
                _started.add(miniray.init(backend=backend).engine)
            self._engine = session.engine()
            if backend not in (None, self._engine.name):
                raise RuntimeError(
                    f"backend={backend!r}, but miniray is running on {self._engine.name!r}"
                )
            _leases.setdefault(self._engine, weakref.WeakSet()).add(self)

    def release(self) -> bool:
        """Return whether this shut down the engine, and with it all actors."""
        with _lock:
            leases = _leases[self._engine]
            leases.discard(self)
            is_running = session.is_initialized() and session.engine() is self._engine
            if leases or self._engine not in _started or not is_running:
                return False
            miniray.shutdown()
            return True


@dataclasses.dataclass
class Attempt:
    """One call of ``train()``. ``fields`` are added to ``run.json`` if the call succeeds."""

    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


class RunSession:
    """The engine lease, the run directory and the outcome of a trainer's run.

    Args:
        title: Start of the directory's name, if neither ``name`` nor ``run_dir`` is set.
        options: The options of the trainer. With ``progress``, what replaced workers and ended the
            run is printed on stderr.
    """

    def __init__(self, title: str, options: RunOptions) -> None:
        self.title = title
        self.verbose = options.progress
        self.signals = StopSignals(options.grace_seconds, verbose=self.verbose)
        self._grace_seconds = options.grace_seconds
        #: The directory of the run, once it is open.
        self.run: RunDirectory | None = None
        self._name, self._backend = options.name, options.backend
        self._run_dir = None if options.run_dir is None else Path(options.run_dir)
        self._lease: EngineLease | None = None

    # -- start ------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Start an engine, or use the one that is running."""
        lease = EngineLease(self._backend)
        if self._lease is not None:  # released second, so that the engine keeps running
            self._lease.release()
        self._lease = lease

    @property
    def requested_path(self) -> Path | None:
        """The directory that ``run_dir`` or ``name`` names."""
        return self._run_dir or (None if self._name is None else Path("runs") / self._name)

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run. Raise ``RuntimeError`` before it is open."""
        if self.run is None:
            raise RuntimeError("the run directory doesn't exist before train()")
        return self.run

    def open(self, *, restart: bool = False) -> RunDirectory:
        """Create the run directory unless it is open, and return it.

        With ``restart``, it may hold a run that left no checkpoint and starts again. Its records
        are discarded.
        """
        path = self.requested_path
        if self.run is None and restart and path is not None and (path / "run.json").exists():
            self.run = RunDirectory.reopen(path)
            self.run.truncate_metrics(-1)
            self.run.truncate_steps(0)
        elif self.run is None:
            self.run = RunDirectory.open(self._run_dir, self._name, self.title)
        return self.run

    def open_for(self, checkpoint: Path | None) -> RunDirectory:
        """Open and return the run directory in which to continue from ``checkpoint``.

        None is a checkpoint from ``checkpoint_dir``.

        It is the directory of the checkpoint's run, unless ``name`` or ``run_dir`` names a
        different one or the checkpoint isn't in a run directory. Then a new run starts from it.
        """
        if self.run is not None:
            return self.run
        wanted = self.requested_path
        source = wanted if checkpoint is None else checkpoint.parent.parent
        is_same = source is not None and (wanted is None or wanted.resolve() == source.resolve())
        if source is not None and is_same and (source / "run.json").exists():
            self.run = RunDirectory.reopen(source)
        else:
            shown = "checkpoint_dir" if checkpoint is None else str(checkpoint)
            self.open().append_event({"event": "started_from", "checkpoint": shown})
        return self.directory

    def write_description(self, description: Mapping[str, Any]) -> None:
        """Write ``run.json`` for a new attempt, with ``description`` as its configuration."""
        self.directory.write_run(description, self._name)

    # -- during the run ---------------------------------------------------------------------------

    def append_event(self, event: Mapping[str, Any]) -> None:
        """Add an event to ``events.jsonl``. Print it if workers or their number have changed."""
        self.directory.append_event(event)
        is_shown = event["event"] in ("ranks_restarted", "world_size_changed")
        text = event["message"] if is_shown else None
        if event["event"] == "worker_replaced":
            reason = event["reason"].partition("\n")[0]
            text = f"worker {event.get('worker')} was replaced: {reason}"
        if text is not None and self.verbose:
            print(text, file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def record_attempt(
        self,
        stop: Callable[[], None],
        find_checkpoint: Callable[[], Path | None],
        on_signal: Callable[[str], None],
        state: TrainState,
    ) -> Iterator[Attempt]:
        """Record how the code inside ends, in ``run.json`` and the report.

        If it raises, call ``stop()``, which stops the workers and may save a later step, and print
        the name of the checkpoint that ``find_checkpoint()`` returns. The error of the code takes
        precedence over errors of writing, which are printed.

        Signals that end the run are handled inside; see ``StopSignals``. ``on_signal(name)`` is
        called if the code can finish its step or epoch.
        """

        def stop_in_order() -> None:
            assert self.signals.number is not None
            on_signal(self.signals.number.name)

        with (
            self.signals.handle_signals(stop_in_order),
            self._record_end(stop, find_checkpoint, state) as attempt,
        ):
            yield attempt

    @contextlib.contextmanager
    def _record_end(
        self,
        stop: Callable[[], None],
        find_checkpoint: Callable[[], Path | None],
        state: TrainState,
    ) -> Iterator[Attempt]:
        attempt = Attempt()
        try:
            yield attempt
        except BaseException as error:
            self.signals.start_stop()
            with self.printing_errors("its end is not in"):
                if self.run is not None:
                    self._record_failure(self.run, error, state.step)
            step = state.step
            stop()
            with self.printing_errors("its end is not in"):
                if self.run is not None and state.step != step:  # a checkpoint of a snapshot
                    self._record_failure(self.run, error, state.step)
            with self.printing_errors("how its workers ended is not in"):
                if self.run is not None:
                    from miniray.train.workers.exits import record_ends  # only after a failure

                    record_ends(self.run.path / "ranks", error)
            self._write_report()
            with self.printing_errors("cannot say how to resume"):
                self._print_how_to_resume(find_checkpoint)
            raise
        with self.printing_errors("its end is not in"):
            self.directory.finish(**attempt.fields)
        self._write_report()

    def _record_failure(self, run: RunDirectory, error: BaseException, step: int) -> None:
        signals = self.signals
        if not signals.is_preemption:
            if isinstance(error, KeyboardInterrupt):
                run.finish("interrupted", error=error, step=step)
            else:
                run.finish("failed", error=error)
            return
        assert signals.number is not None
        name = signals.number.name
        if not isinstance(error, Preempted):  # the process ends before anything prints it
            traceback.print_exception(error)
            run.finish("preempted", error=error, step=step, stop_reason=name)
            return
        text = f"{name} ended the run after step {step}"
        if signals.is_late:
            text += f": the running step or epoch takes longer than {self._grace_seconds:g} s"
        run.finish("preempted", error=text, step=step, stop_reason=name)

    @contextlib.contextmanager
    def pass_on_preemption(self) -> Iterator[None]:
        """End the process as SIGTERM does after the code inside, if a signal preempted the run."""
        try:
            yield
        finally:
            if self.signals.is_preemption:
                self.signals.end_process()

    def _print_how_to_resume(self, find_checkpoint: Callable[[], Path | None]) -> None:
        if not self.verbose or self.run is None:
            return
        newest = find_checkpoint()
        how = f"; resume=True continues from {newest.name}" if newest is not None else ""
        print(f"the run is in {self.run.path}{how}", file=sys.stderr, flush=True)

    def _write_report(self) -> None:
        with self.printing_errors("no report of"):
            if self.run is not None:
                write_report(self.run.path)

    @contextlib.contextmanager
    def printing_errors(self, failed: str) -> Iterator[None]:
        """Print errors of writing at the end of a run: the run's own error takes precedence."""
        try:
            yield
        except Exception as error:  # reading and writing files may raise anything
            path = None if self.run is None else self.run.path
            print(f"{failed} {path}: {error}", file=sys.stderr, flush=True)

    # -- end --------------------------------------------------------------------------------------

    def close(self) -> bool:
        """Release the engine. Return whether that shut it down. Safe to call twice."""
        lease, self._lease = self._lease, None
        return lease is not None and lease.release()
