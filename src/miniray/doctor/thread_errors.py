"""Threads that end by an exception: the rank goes on, and waits for ever for what they would do.

Python prints such an error and thinks no more of it. A loader or a saver that works in a thread of
its own is missed much later, somewhere else.
"""

from __future__ import annotations

import threading
import traceback

from miniray.doctor import model, recorder, sites
from miniray.doctor.model import Event, RankRecord

_NAME = "a thread raised"
_LONGEST = 200
_watching = False


def watch() -> None:
    """Note the error of every thread that ends by one, from now on, and let Python print it."""
    global _watching
    if _watching:
        return
    _watching = True
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        current, error = recorder.current(), args.exc_value
        if current is not None and error is not None and not isinstance(error, SystemExit):
            said = traceback.format_exception_only(error)[-1].strip()[:_LONGEST]
            site = sites.error_site(error)
            current.event(model.NOTE, _NAME, said, site="\0".join(map(str, tuple(site))))
        before(args)

    threading.excepthook = hook


def last(record: RankRecord) -> Event | None:
    """The last one that is still remembered; what was raised is its ``op``."""
    noted = (event for event in reversed(record.events) if event.kind == model.NOTE)
    return next((event for event in noted if event.name == _NAME), None)
