"""Signals that end a run in order: Ctrl-C, SIGTERM, and SIGUSR1 as sent by ``sbatch --signal``.

After the first signal, the run completes the current step, or the current epoch if the workers
train independently, and saves a checkpoint. A second signal, or the end of ``grace_seconds``, stops
the run at once.
SIGTERM during the stop ends the process without any cleanup of this process; its workers end with
it.

Handlers are installed in the main thread only. ``train()`` in a different thread ends with the
process, as without handlers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Part of ``grace_seconds`` in which ranks that didn't finish are stopped.
_RESERVE_S = 2.0
#: Limit for a stop. Then SIGTERM ends the process.
_STOP_TIMEOUT_S = 4.0


class Preempted(KeyboardInterrupt):
    """Ends a run after SIGTERM or SIGUSR1.

    Derives from ``KeyboardInterrupt``, so it isn't handled as an exception of user code.
    """


class StopSignals:
    """Handles the signals that end a run.

    Args:
        grace_seconds: See ``RunOptions``.
        verbose: Print on stderr what happens after the first signal.

    Attributes:
        number: The signal that ends the run; None while there is none.
        is_late: The run was stopped before it finished its step or epoch.
        is_overdue: That was at the end of ``grace_seconds``, not by a second signal.
    """

    def __init__(self, grace_seconds: float, *, verbose: bool = True) -> None:
        self.number: signal.Signals | None = None
        self.is_late = self.is_overdue = False
        self._limit = max(grace_seconds - _RESERVE_S, grace_seconds / 2)
        self._verbose = verbose
        self._on_stop: Callable[[], None] = lambda: None
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = 0
        self._can_finish = self._must_raise = self._is_stopping = False
        # Not an Event: a handler that interrupts it in the main thread would wait forever.
        self._events: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()

    @property
    def is_preemption(self) -> bool:
        """Whether SIGTERM or SIGUSR1 ends the run."""
        return self.number is not None and self.number != signal.SIGINT

    @contextlib.contextmanager
    def handle_signals(self, on_stop: Callable[[], None]) -> Iterator[None]:
        """Handle signals inside, and restore the previous handlers.

        Args:
            on_stop: Called in a signal handler after the first signal in ``finish_in_order``.
        """
        self.number, self.is_late, self.is_overdue = None, False, False
        self._can_finish = self._must_raise = self._is_stopping = False
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._on_stop, self._pid = on_stop, os.getpid()
        self._install()
        watcher = threading.Thread(target=self._escalate, name="miniray-signals", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._pid = 0
            self._events.put(None)
            watcher.join()
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _install(self) -> None:
        from miniray.core.local.waiting import restore_handler

        restore_handler()  # the engine's, which is installed again when it's needed
        found = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        }
        if found[signal.SIGTERM] in (signal.SIG_IGN, None):  # None: a handler written in C
            del found[signal.SIGTERM]
        if found[signal.SIGUSR1] is not signal.SIG_DFL:  # the user's own
            del found[signal.SIGUSR1]
        self._previous = found
        for number in found:
            signal.signal(number, self._interrupt if number == signal.SIGINT else self._receive)

    @contextlib.contextmanager
    def finish_in_order(self) -> Iterator[None]:
        """Let the code inside finish after a first signal. Then raise, if there was a signal."""
        self._can_finish = True
        try:
            yield
        finally:
            self._can_finish = False
        if self.number is not None:
            raise self._create_error()

    def start_stop(self) -> None:
        """Note that the run is being stopped: from now on, signals don't raise ``Preempted``."""
        self._is_stopping, self._must_raise = True, False

    def end_process(self) -> None:
        """End the process as SIGTERM does, after a preemption, outside of ``handle_signals``.

        If the program has its own handler for SIGTERM, call that handler, and raise ``SystemExit``
        if it returns.
        """
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.raise_signal(signal.SIGTERM)
        raise SystemExit(128 + signal.SIGTERM)

    # -- handlers ---------------------------------------------------------------------------------

    def _interrupt(self, number: int, frame: Any) -> None:
        """Handle SIGINT. The engine calls this where an exception does no harm."""
        if self._must_raise:
            self._must_raise = False
            raise self._create_error()
        if self._previous[signal.SIGINT] is not signal.SIG_IGN:
            self._receive(number, frame)

    def _receive(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:  # a forked child, or the end of ``handle_signals``
            self._call_previous(number, frame)
            return
        is_first = self.number is None
        if is_first or number != signal.SIGINT:
            self.number = signal.Signals(number)
        self._events.put(self.number)
        if self._is_stopping:
            self._call_previous(number, frame)
        elif is_first and self._can_finish:
            self._on_stop()
        else:
            self.is_late = self._can_finish
            self._must_raise = True
            signal.raise_signal(signal.SIGINT)

    def _call_previous(self, number: int, frame: Any) -> None:
        """Do what the handler before did: by default, end the process or raise."""
        if number == signal.SIGUSR1 and signal.SIGTERM in self._previous:
            number = signal.SIGTERM
        handler = self._previous[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(signal.Signals(number))

    def _create_error(self) -> KeyboardInterrupt:
        return Preempted() if self.is_preemption else KeyboardInterrupt()

    # -- time limits ------------------------------------------------------------------------------

    def _escalate(self) -> None:
        """Send the signal again when the time limit is reached. Runs in a thread."""
        limit: float | None = None
        while True:
            try:
                number = self._events.get(timeout=limit)
            except queue.Empty:
                main = threading.main_thread().ident
                assert main is not None
                assert self.number is not None
                self.is_overdue = not self._is_stopping
                signal.pthread_kill(main, self.number)
                number = self._events.get()  # from the handler, or from the end
            if number is None:
                return
            if limit is None and self._can_finish and self._verbose:
                name = "Ctrl-C" if number == signal.SIGINT else number.name
                text = (
                    f"{name}: saving a checkpoint after this step or epoch; again to stop at once"
                )
                print(text, file=sys.stderr, flush=True)
            limit = self._limit if limit is None else _STOP_TIMEOUT_S
