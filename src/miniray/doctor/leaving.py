"""Ends that Python tells nobody of: ``sys.exit``, and exceptions that end a thread.

After ``sys.exit`` its exception hook is not called, and whoever runs at exit cannot see the status.
Yet ``except Exception: log(...); sys.exit(1)`` is how many scripts end, and torch's own
``multiprocessing.spawn``: the exception that was being handled is why.

The exception that ends a thread is printed and forgotten. The rank goes on, and waits for ever for
what a loader or a saver in a thread of its own would do: missed much later, somewhere else.
"""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from typing import Any, NoReturn

from miniray.doctor import model, recorder, sites
from miniray.doctor.model import Event, RankRecord
from miniray.doctor.recorder import Recorder

#: (status, the exception that was being handled, the rank's step) of the last call.
_last: tuple[Any, BaseException | None, int] | None = None
_watching = _watching_threads = False
_THREAD_RAISED = "a thread raised"
_LONGEST_MESSAGE = 200


def record(current: Recorder, status: Any, error: BaseException | None) -> None:
    """The process is ending with this status, while it handled ``error``, if any."""
    if not status:
        return
    if isinstance(error, Exception):
        current.record_exception(error)
        return
    code, message = (status, "") if isinstance(status, int) else (1, str(status))
    current.record_exit("exit", code=code, message=message)


def watch() -> None:
    """Have ``record`` called at this process's end if ``sys.exit`` is why it ends.

    One that somebody caught is not: then the rank went on, to further steps. Nor is that of a
    thread, which ends by it alone.
    """
    global _watching
    if _watching:
        return
    _watching = True
    leave = sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        global _last
        current, error = recorder.current(), sys.exc_info()[1]
        if current is not None and threading.current_thread() is threading.main_thread():
            if error is None and _last is not None and _last[0] == status:
                error = _last[1]  # once more, on the way out
            _last = status, error if status else None, current.step_number
        leave(status)

    sys.exit = exit
    atexit.register(_at_exit)


def _at_exit() -> None:
    current = recorder.current()
    if current is not None and _last is not None and _last[2] == current.step_number:
        record(current, *_last[:2])


def watch_threads() -> None:
    """Note the error of every thread that ends by one, from now on, and let Python print it."""
    global _watching_threads
    if _watching_threads:
        return
    _watching_threads = True
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        current, error = recorder.current(), args.exc_value
        if current is not None and error is not None and not isinstance(error, SystemExit):
            said = traceback.format_exception_only(error)[-1].strip()[:_LONGEST_MESSAGE]
            site = sites.error_site(error)
            current.event(model.NOTE, _THREAD_RAISED, said, site="\0".join(map(str, tuple(site))))
        before(args)

    threading.excepthook = hook


def thread_error(record: RankRecord) -> Event | None:
    """The last one that is still remembered; what was raised is its ``op``."""
    noted = (event for event in reversed(record.events) if event.kind == model.NOTE)
    return next((event for event in noted if event.name == _THREAD_RAISED), None)
