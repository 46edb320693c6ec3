"""``sys.exit``: a process that ends itself, and what it was about to handle when it did.

Python tells nobody: its exception hook is not called, and whoever runs at exit cannot see the
status. Yet ``except Exception: log(...); sys.exit(1)`` is how many scripts end, and torch's own
``multiprocessing.spawn``: the exception that was being handled is why.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any, NoReturn

from miniray.doctor import recorder
from miniray.doctor.recorder import Recorder

#: (status, the exception that was being handled, the rank's step) of the last call.
_last: tuple[Any, BaseException | None, int] | None = None


_watching = False


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
