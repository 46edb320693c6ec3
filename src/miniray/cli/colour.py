"""Colours on terminals only, and none where ``NO_COLOR`` is set; how wide a line may be."""

from __future__ import annotations

import math
import os
import shutil
import sys
from typing import TextIO

import click


def paint(text: str, colour: str | None, stream: TextIO | None = None) -> str:
    """``text`` in a colour where ``stream`` (standard output) is a terminal that may show one."""
    stream = stream or sys.stdout
    wanted = colour is not None and stream.isatty() and not os.environ.get("NO_COLOR")
    return click.style(text, fg=colour) if wanted else text


def columns() -> float:
    """How wide a line may be: the terminal's width, and any in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def fitted(line: str, used: int = 0) -> str:
    """The line cut to what the terminal has left after ``used`` columns; whole in a pipe."""
    room = columns() - used
    return line if len(line) <= room else f"{line[: max(0, int(room) - 1)]}…"
