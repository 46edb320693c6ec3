"""Fold tracebacks: hide the frames of miniray, torch and other frameworks, and show the user's.

With ``MINIRAY_DEBUG=1``, all frames are shown.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_MINIRAY = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: Installed packages whose frames are hidden. All other installed packages may be the user's.
_FRAMEWORKS = frozenset(
    (
        "miniray", "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate",
        "transformers", "ray", "tqdm", "torchmetrics", "cloudpickle",
    )
)  # fmt: skip
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_STDLIB = re.compile(r"[/\\]lib[/\\]python3\.\d+t?[/\\](?!(?:site|dist)-packages)|^<frozen ")
_HEADER = re.compile(r"^(?:  \+ Exception Group )?Traceback \(most recent call last\):$")
_FRAME = re.compile(r'^(?P<prefix>[ |]*)File "(?P<file>.+)", line \d+, in .+$')


def is_debug() -> bool:
    """Return whether ``MINIRAY_DEBUG`` asks for all frames."""
    return os.environ.get("MINIRAY_DEBUG", "") not in ("", "0")


def find_library(filename: str) -> str | None:
    """Return the library that a file belongs to; None for a file of the user.

    Names of files on other machines are recognized by their path.
    """
    if filename.startswith(_MINIRAY):
        return "miniray"
    installed = _INSTALLED.findall(filename)
    if installed:
        return installed[-1] if installed[-1] in _FRAMEWORKS else None
    if filename.startswith("<eval_with_key>"):  # code that torch.compile generated
        return "torch"
    if filename.startswith("python/ray/"):  # compiled by Cython
        return "ray"
    return "Python" if _STDLIB.search(filename) else None


def hide_frames(error: BaseException) -> None:
    """Remove miniray's frames from the traceback of an exception that leaves a public function.

    Call it in an ``except`` block that ends with ``raise``. The frame of the public function is
    removed too. If miniray raised a builtin exception, its frames below the user's innermost frame
    stay, because this may be a bug in miniray.
    """
    trace = error.__traceback__
    if trace is None or is_debug():
        return
    entries = list(_iterate(trace))
    libraries = [find_library(entry.tb_frame.f_code.co_filename) for entry in entries]
    is_ours = type(error).__module__.partition(".")[0] == "miniray"
    may_be_bug = not is_ours and isinstance(error, Exception) and libraries[-1] == "miniray"
    last_user = max((i for i, library in enumerate(libraries) if library is None), default=-1)
    if may_be_bug and last_user < 0:
        return
    kept: list[TracebackType] = []
    hidden = True  # a library's frame is hidden if it was called by a hidden frame
    for i, (entry, library) in enumerate(zip(entries, libraries, strict=True)):
        hidden = library == "miniray" or (hidden and library is not None)
        if not hidden or (may_be_bug and i > last_user):
            kept.append(entry)
    head = None
    for entry in reversed(kept):
        entry.tb_next = head
        head = entry
    if head is not trace:
        trace.tb_next = head  # before Python 3.11, `raise` restores this entry
    error.__traceback__ = head


def hides_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: call ``hide_frames`` with the exceptions that leave it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            hide_frames(error)
            raise

    return call


def _iterate(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def fold(text: str) -> str:
    """Return a formatted traceback with one line in place of the hidden frames of each block.

    A block is the frames of one exception. The innermost frame of a block stays if all are hidden.
    Handles chained exceptions, exception groups, and messages that contain tracebacks.
    """
    lines: list[str] = []
    for part in _split(text):
        if isinstance(part, str):
            lines.append(part)
            continue
        shown = [frame for frame in part if frame.library is None] or part[-1:]
        hidden = Counter(frame.library for frame in part if frame not in shown)
        lines += [line for frame in shown for line in frame.lines]
        if hidden:
            count, names = hidden.total(), ", ".join(sorted(filter(None, hidden), key=str.lower))
            frames = "frame" if count == 1 else "frames"
            lines.append(
                f"{part[0].prefix}... {count} {frames} of {names} hidden; "
                "set MINIRAY_DEBUG=1 to show them"
            )
    return "\n".join(lines)


def find_location(text: str) -> str:
    """Return the ``File`` line of the user's innermost frame, or of the innermost frame at all.

    If the text has several exceptions, use the last one, which was raised. Return "" for a text
    without frames.
    """
    location, is_next = "", False
    for part in _split(text):
        if isinstance(part, str):
            is_next = is_next or bool(_HEADER.match(part))
        elif is_next:
            frames = [frame for frame in part if frame.library is None] or part
            location, is_next = frames[-1].lines[0].lstrip(" |"), False
    return location


class _Frame:
    """A frame in a formatted traceback: its ``File`` line, and source lines."""

    def __init__(self, line: str, prefix: str, file: str) -> None:
        self.lines = [line]
        self.prefix = prefix
        self.library = find_library(file)

    def has_line(self, line: str) -> bool:
        return line.startswith((f"{self.prefix}  ", f"{self.prefix}[Previous line repeated "))


def _split(text: str) -> Iterator[str | list[_Frame]]:
    """Split a formatted traceback into blocks of frames, and the lines between them."""
    block: list[_Frame] = []
    for line in text.splitlines():
        match = _FRAME.match(line)
        if match is not None:
            if block and block[0].prefix != match["prefix"]:
                yield block
                block = []
            block.append(_Frame(line, match["prefix"], match["file"]))
        elif block and block[-1].has_line(line):
            block[-1].lines.append(line)
        else:
            if block:
                yield block
                block = []
            yield line
    if block:
        yield block
