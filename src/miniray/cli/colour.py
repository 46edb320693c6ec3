"""Colours on terminals only, and none where ``NO_COLOR`` is set; how wide a line may be."""

from __future__ import annotations

import math
import os
import shutil
import sys
import unicodedata
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.console import Console


def coloured(stream: TextIO) -> bool:
    """Whether it is a terminal that may show colours."""
    dumb = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not dumb


def paint(text: str, colour: str | None, stream: TextIO | None = None) -> str:
    """``text`` in a colour where ``stream`` (standard output) is a terminal that may show one."""
    wanted = colour is not None and coloured(stream or sys.stdout)
    return click.style(text, fg=colour) if wanted else text


def columns() -> float:
    """How wide a line may be: the terminal's width, and any in a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf


def console() -> Console:
    """rich's, which breaks lines between words on a terminal, and none in a pipe."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 100_000)


def width(text: str) -> int:
    """Columns it takes: a Chinese character has two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def printable(text: str) -> str:
    """Without what would move the cursor, colour the rest, or cannot be written at all."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def fitted(line: str, used: int = 0) -> str:
    """The line cut to what the terminal has left after ``used`` columns; whole in a pipe."""
    room = columns() - used
    if width(line) <= room:
        return line
    while line and width(line) >= room:
        line = line[:-1]
    return f"{line}…"
