"""Logs of ranks, read from their end: a screenful at a time, however long the file is."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from miniray.report.html import on_screen, uncoloured
from miniray.runs import files

_PIECE = 128 << 10
_BLOCK = 1 << 20
_MOST_FOUND = 300
#: Of a longer log only the end is searched.
_MOST_SEARCHED = 64 << 20
_LONGEST_SHOWN = 2000


def tail(path: Path, since: int | None = None, before: int | None = None) -> dict[str, Any]:
    """Whole lines: the last ones, those after byte ``since``, or those up to byte ``before``.

    ``start`` and ``end`` say which bytes they are, for the next request; ``rest`` is a last line
    that has no end yet. A file that became shorter than ``since`` was begun anew and is read so.
    """
    with files.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        anew = since is None or since > size
        if since is None or anew:
            stop = size if before is None else min(before, size)
            start = max(0, stop - _PIECE)
        else:
            start, stop = since, min(size, since + _PIECE)
        file.seek(start)
        data = file.read(stop - start)
    if anew and start > 0:  # in the middle of a line, which begins before
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    whole = data.rfind(b"\n") + 1
    if not whole and len(data) >= _PIECE:  # one line longer than all we read
        whole = len(data)
    rest = data[whole:] if stop == size else b""
    return {
        "lines": [_shown(line) for line in data[:whole].split(b"\n")[:-1]],
        "rest": _shown(rest),
        "start": start,
        "end": start + whole,
        "size": size,
        "anew": anew,
    }


def search(path: Path, text: str) -> dict[str, Any]:
    """Lines that contain ``text``, letters large or small: the last few hundred of them."""
    wanted = text.lower()
    found: deque[str] = deque(maxlen=_MOST_FOUND)
    total = 0
    with files.open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _MOST_SEARCHED))
        rest, block = b"", b"\n"
        while block:
            block = file.read(_BLOCK)
            *lines, rest = (rest + (block or b"\n")).split(b"\n")  # the last line may have no end
            for line in lines:
                if wanted in (shown := line.decode("utf-8", "replace")).lower():
                    total += 1
                    found.append(uncoloured(shown)[:_LONGEST_SHOWN])
            if len(rest) > _BLOCK:
                rest = b""
    return {"found": list(found), "total": total, "whole": size <= _MOST_SEARCHED}


def _shown(line: bytes) -> str:
    return on_screen(line.decode("utf-8", "replace"))[:_LONGEST_SHOWN]
