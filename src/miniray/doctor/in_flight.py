"""Exceptions on their way out: a ``finally`` or ``__exit__`` that waits keeps them from everybody.

Nothing is printed and no process ends before they have left the script, and they never do where
what they pass waits for ranks that wait for this one. The heartbeat sees them all the same.
"""

from __future__ import annotations

import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from miniray.doctor import sites
from miniray.doctor.model import RankRecord, Site
from miniray.doctor.waiting import blames_others

if TYPE_CHECKING:
    from miniray.doctor.recorder import Recorder

_LONGEST = 300


def look(recorder: Recorder, known: int) -> int:
    """Note what the main thread is handling. Gives the error's id, 0 for none: ``known`` next time.

    Holds on to nothing: an error keeps the variables of all its frames.
    """
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # before Python 3.12: as exc_info()
    if error is None:
        if known:
            recorder.note_later(in_flight=None)
        return 0
    if id(error) != known:
        recorder.note_later(
            in_flight={
                "type": type(error).__qualname__,
                "message": _message(error)[:_LONGEST].partition("\n")[0],
                "site": list(sites.error_site(error)),
                "step": recorder.step_number,
            }
        )
    return id(error)


def root(error: BaseException) -> BaseException:
    """Of an error that only says that other ranks did not come: the one it was raised on top of."""
    while (before := error.__context__) is not None:
        if not blames_others(type(error).__qualname__, _message(error)):
            break
        if not sites.is_users(sites.error_site(before).file):
            break  # something that torch itself was handling
        error = before
    return error


def raised(record: RankRecord) -> tuple[str, Site] | None:
    """(type and message, where) of an error the rank has raised since its last step and still has.

    None also for one that only follows from what became of other ranks.
    """
    note = record.notes.get("in_flight")
    if not isinstance(note, dict) or note["step"] != record.step:
        return None  # it has gone on since: the training itself runs in an `except`
    if blames_others(note["type"], note["message"]):
        return None
    return f"{note['type']}: {note['message']}".rstrip(": "), Site(*note["site"])


def _message(error: BaseException) -> str:
    """Its text, whatever its ``__str__`` may do."""
    return str(traceback.TracebackException(type(error), error, None))
