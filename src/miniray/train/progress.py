"""Progress on the driver: a tqdm bar on a terminal, plain lines elsewhere.

Workers never print it: they do not know of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from miniray.train.records import number

if TYPE_CHECKING:
    from typing_extensions import Self

_HIDDEN = ("epoch", "seconds", "num_samples", "synced")


class Steps:
    """Counts ``count`` steps of something as they get done.

    On a terminal it is one tqdm bar with a note and the time left. Elsewhere it is about ``lines``
    lines in all, so that a log file stays readable. ``enabled=False``: nothing at all. Writes to
    stderr; a stream that was closed ends the progress and not the run.
    """

    def __init__(
        self,
        count: int,
        label: str,
        unit: str,
        *,
        start: int = 0,
        enabled: bool = True,
        stream: TextIO | None = None,
        lines: int = 10,
    ) -> None:
        self.count = count
        self.done = 0
        self.began = time.monotonic()
        self._label, self._unit = label, unit
        self._stream = stream or sys.stderr
        self._enabled = enabled and count > 0 and self._stream is not None
        self._every = max(1, count // lines)
        self._bar: Any = None
        if self._enabled and self._stream.isatty():
            self._bar = _bar_class()(
                total=start + count,
                initial=start,
                desc=label,
                unit=f" {unit}",
                file=self._stream,
                **_size(self._stream),
            )

    def advance(self, count: int = 1, note: str = "") -> None:
        """Say that ``count`` more steps are done."""
        before, self.done = self.done, self.done + count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self.done // self._every > before // self._every or self.done == self.count:
            self._print(self._line(note))

    def _line(self, note: str) -> str:
        return f"{self._label}: {self.done}/{self.count} {self._unit}  {note}".rstrip()

    def note(self, text: str) -> None:
        """A line of its own, above the bar: what a reader should know now."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        if not self._enabled:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # a closed pipe or file: nobody looks any more
            self._enabled = False

    def close(self) -> None:
        """Leave the bar as it is and the terminal as it was. Safe to call twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Progress(Steps):
    """Shows epochs ``start`` to ``start + epochs - 1`` with their metrics and the time left."""

    def __init__(
        self, start: int, epochs: int, *, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        super().__init__(
            epochs, "epochs", "epochs", start=start, enabled=enabled, stream=stream, lines=100
        )
        self._end = start + epochs

    def update(self, epoch: int, metrics: Mapping[str, Any]) -> None:
        """Say that ``epoch`` is done, with these results."""
        self.advance(1, describe(metrics))

    def _line(self, note: str) -> str:
        each = (time.monotonic() - self.began) / self.done
        left = each * (self.count - self.done)
        text = f"epoch {self._end - self.count + self.done}/{self._end}  {note}".rstrip()
        return f"{text}  [{each:.3g} s/epoch, {_clock(left)} left]"


def describe(metrics: Mapping[str, Any]) -> str:
    """The numbers in ``metrics`` as ``loss=0.1234 accuracy=0.98``; NaN and infinities show."""
    parts = []
    for key, value in metrics.items():
        plain = number(value)
        if plain is not None and key not in _HIDDEN:
            parts.append(f"{key}={plain:.4g}")
    return " ".join(parts)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _size(stream: TextIO) -> dict[str, Any]:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    # A terminal that does not know its size: tqdm would take that for no room at all.
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}


def _bar_class() -> Any:
    """tqdm with a lock of this process alone and without its monitor thread.

    Its own lock is shared with forked children: one that is killed while holding it would hang this
    process for ever. The thread is one more reason for a fork to be unsafe. On a class of our own,
    so that bars of the user's keep what they have.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0

    Bar.set_lock(threading.RLock())
    return Bar
