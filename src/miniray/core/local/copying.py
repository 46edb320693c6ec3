"""Copying of large memory by two threads: one core alone does not use what the memory can give."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import Any

#: Below this a second thread costs more than it saves.
_LARGE = 32 << 20
_PIECE = 4 << 20
_CORES = os.cpu_count() or 1


def copy(target: Any, source: Any) -> None:
    """Copy flat arrays of bytes. numpy does that with the interpreter's lock released.

    The helper takes pieces as it gets to them, so that with all cores busy nobody waits for it
    longer than a piece takes. When an error (Ctrl-C) ends the copying it has ended, too: the memory
    may be used again.
    """
    if len(source) < _LARGE or _CORES < 2:
        target[:] = source
        return
    places = iter(range(0, len(source), _PIECE))

    def work() -> None:
        for at in places:  # each place is given out once
            target[at : at + _PIECE] = source[at : at + _PIECE]

    helper = threading.Thread(target=work, name="miniray-copy", daemon=True)
    helper.start()
    try:
        work()
    finally:
        deque(places, maxlen=0)  # nothing is left to do for it
        helper.join()
