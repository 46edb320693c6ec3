"""Lines that are printed while bars stand at the bottom of the terminal go above them.

Without it, what a worker or a hook prints is written on to the bar's own line. Only a terminal is
touched: a pipe, a file or a notebook gets what it always got. Other processes that inherit the
streams (a fork of the driver) write through.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO


class Terminal:
    """stdout and stderr while bars of class ``bars`` are shown on ``stream``.

    A line that is begun and not ended (``print(end="")``, a debugger's prompt) keeps the bars away
    until it is complete.
    """

    def __init__(self, stream: TextIO, bars: Any) -> None:
        self.stream = stream
        self.line_is_open = False
        self._bars, self._process = bars, os.getpid()
        self._replaced: dict[str, _Above] = {}
        for name in ("stdout", "stderr"):
            target = getattr(sys, name)
            if target is not None and not isinstance(target, _Above) and target.isatty():
                self._replaced[name] = _Above(target, self)
                setattr(sys, name, self._replaced[name])

    def write(self, text: str, stream: TextIO | None = None) -> None:
        """Write to ``stream``, above the bars."""
        stream = stream or self.stream
        if os.getpid() != self._process:
            stream.write(text)
            return
        with self._bars.get_lock():
            if not self.line_is_open:
                for bar in self._shown():
                    bar.clear(nolock=True)
                self.stream.flush()
            stream.write(text)
            stream.flush()
            self.line_is_open = not text.endswith("\n")
            for bar in self._shown():
                bar.refresh(nolock=True)

    def _shown(self) -> list[Any]:
        return [bar for bar in self._bars._instances if isinstance(bar, self._bars)]

    def release(self) -> None:
        """Give stdout and stderr back, unless somebody else has replaced them since."""
        if self.line_is_open:
            self.write("\n")
        for name, above in self._replaced.items():
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        self._replaced.clear()


class _Above:
    """A text stream that writes above the bars; everything else is the stream's own."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self.stream = stream
        self._terminal = terminal

    def write(self, text: str) -> int:
        if not text:  # somebody tries what the stream takes: click does it with bytes
            return self.stream.write(text)
        self._terminal.write(text, self.stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def beneath(stream: TextIO) -> TextIO:
    """The stream itself, where ``stream`` stands in for it."""
    return stream.stream if isinstance(stream, _Above) else stream
