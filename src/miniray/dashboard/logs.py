"""Read the logs of ranks.

A log is read in pieces from its end, so that the response time doesn't depend on the size of the
log.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from miniray.report.html import render_terminal_line, strip_escapes
from miniray.runs import files

_PIECE = 128 << 10
_BLOCK = 1 << 20
_MOST_FOUND = 300
#: Number of bytes at the end of a log that are searched.
_MOST_SEARCHED = 64 << 20
_LONGEST_SHOWN = 2000


def tail(path: Path, since: int | None = None, before: int | None = None) -> dict[str, Any]:
    """Return some of the complete lines of a log.

    By default, return the last lines. If ``since`` is set, return the lines after this byte
    position. If ``before`` is set, return the lines before this byte position.

    In the result, ``start`` and ``end`` are byte positions, which the next request can pass as
    ``before`` and ``since``. ``rest`` contains the last line if that line is incomplete. If the
    file is shorter than ``since``, the log was restarted, and the last lines of the new log are
    returned.
    """
    with files.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        restarted = since is None or since > size
        if since is None or restarted:
            stop = size if before is None else min(before, size)
            start = max(0, stop - _PIECE)
        else:
            start, stop = since, min(size, since + _PIECE)
        file.seek(start)
        data = file.read(stop - start)
    if restarted and start > 0:  # skip the incomplete first line
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    whole = data.rfind(b"\n") + 1
    if not whole and len(data) >= _PIECE:  # the line is longer than the piece
        whole = len(data)
    rest = data[whole:] if stop == size else b""
    return {
        "lines": [_shown(line) for line in data[:whole].split(b"\n")[:-1]],
        "rest": _shown(rest),
        "start": start,
        "end": start + whole,
        "size": size,
        "restarted": restarted,
    }


def search(path: Path, text: str) -> dict[str, Any]:
    """Return the last few hundred lines that contain ``text``. The case of letters is ignored."""
    wanted = text.lower()
    found: deque[str] = deque(maxlen=_MOST_FOUND)
    total = 0
    with files.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _MOST_SEARCHED))
        rest, block = b"", b"\n"
        while block:
            block = file.read(_BLOCK)
            *lines, rest = (rest + (block or b"\n")).split(b"\n")  # the last line may be incomplete
            for line in lines:
                if wanted in (shown := line.decode("utf-8", "replace")).lower():
                    total += 1
                    found.append(strip_escapes(shown)[:_LONGEST_SHOWN])
            if len(rest) > _BLOCK:
                rest = b""
    return {"found": list(found), "total": total, "whole": size <= _MOST_SEARCHED}


def _shown(line: bytes) -> str:
    return render_terminal_line(line.decode("utf-8", "replace"))[:_LONGEST_SHOWN]
