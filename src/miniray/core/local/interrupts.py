"""Ctrl-C where it does no harm.

Python raises ``KeyboardInterrupt`` in the main thread between any two of its steps. Between reading
a result off a connection and handing it over, that would lose the result, and whoever asks for it
later would wait for ever. So while the main thread is in the engine's own bookkeeping an interrupt
is noted, and raised as soon as it waits or goes back to the user's code: some microseconds later.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enums of all it returns
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

#: Python's own handler only sets a flag. If that happens just before the main thread goes to sleep
#: in the kernel, nothing wakes it. So the main thread never sleeps longer than this many seconds.
LONGEST_SLEEP = 0.5

_main = threading.main_thread().ident
_held = False
_noted: Callable[[int, Any], Any] | None = None


class _Guard:
    """A handler for SIGINT that calls the user's, later if need be."""

    def __init__(self, handler: Callable[[int, Any], Any]) -> None:
        self.handler = handler

    def __call__(self, signum: int, frame: Any) -> None:
        global _noted
        if _held:
            _noted = self.handler
        else:
            self.handler(signum, frame)


def hold() -> bool:
    """Put interrupts off. True when ``release`` must follow: in the main thread, the first time."""
    global _held
    if _held or threading.get_ident() != _main:
        return False
    # Looked at each time: notebooks install a handler of their own for every cell.
    handler: Any = _signal.getsignal(_signal.SIGINT)
    if type(handler) is not _Guard and callable(handler):
        _signal.signal(_signal.SIGINT, _Guard(handler))
    _held = True
    return True


def release() -> None:
    """Let interrupts through again; one that came meanwhile is raised here."""
    global _held, _noted
    _held = False
    if _noted is not None:
        handler, _noted = _noted, None
        handler(_signal.SIGINT, sys._getframe())


def pause() -> bool:
    """Let interrupts through while waiting. True when ``resume`` must follow."""
    if not _held or threading.get_ident() != _main:
        return False
    release()
    return True


def resume() -> None:
    global _held
    _held = True


def restore() -> None:
    """Give the user's handler its place back, at the end of a session."""
    handler: Any = _signal.getsignal(_signal.SIGINT)
    if type(handler) is _Guard and threading.get_ident() == _main:
        _signal.signal(_signal.SIGINT, handler.handler)


def _after_fork() -> None:
    global _main, _held, _noted
    _main = threading.main_thread().ident
    _held, _noted = False, None  # the state of a thread that is not there


os.register_at_fork(after_in_child=_after_fork)
