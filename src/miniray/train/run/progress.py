"""Show progress on the driver: a tqdm bar on a terminal, plain lines elsewhere.

Workers don't print progress. While bars are shown, stdout and stderr of the driver are redirected,
so that the output of workers and hooks appears above the bars and not on the same line. Output to
pipes, files and notebooks isn't redirected, and neither is that of forked processes.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from miniray.counting import format_epoch
from miniray.train.run.records import number

if TYPE_CHECKING:
    from typing_extensions import Self

    from miniray.train.run.state import TrainState, TrainTarget

_HIDDEN = ("epoch", "seconds", "synced")
#: Suffixes of metrics that are only written to ``metrics.jsonl``, such as ``val_num_samples``.
_HIDDEN_ENDS = ("num_samples", "_bytes")


class Steps:
    """Shows the progress of ``count`` steps.

    On a terminal, this is a tqdm bar with a note and the remaining time, below all other output
    (``Terminal``). Elsewhere, about ``lines`` lines are printed in total, which keeps log files
    short. With ``enabled=False``, nothing is shown. Progress is written to stderr. If the stream is
    closed, the run continues without progress.
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
        self._stream = unwrap_stream(stream or sys.stderr)
        self._enabled = enabled and count > 0 and self._stream is not None
        self._every = max(1, count // lines)
        self._bar: Any = None
        self._terminal: Terminal | None = None
        if self._enabled and self._stream.isatty():
            bars = _bar_class()
            if bars.terminal is None:
                bars.terminal = self._terminal = Terminal(self._stream, bars)
            self._bar = bars(
                total=start + count,
                initial=start,
                desc=label,
                unit=f" {unit}",
                file=self._stream,
                **_size(self._stream),
            )

    def advance(self, count: int = 1, note: str = "") -> None:
        """Show that ``count`` more steps are complete."""
        before, self.done = self.done, self.done + count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self.done // self._every > before // self._every or self.done == self.count:
            self._print(self._line(note))

    def _line(self, note: str) -> str:
        return f"{self._label}: {self.done}/{self.count} {self._unit}  {note}".rstrip()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.terminal.write(f"{text}\n")
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        if not self._enabled:
            return
        try:
            print(text, file=self._stream, flush=True)
        except (OSError, ValueError):  # the pipe or file is closed
            self._enabled = False

    def close(self) -> None:
        """Leave the bar in its last state, and restore stdout and stderr. Safe to call twice."""
        bar, self._bar = self._bar, None
        if bar is None:
            return
        if self._terminal is not None:
            self._terminal.release()
            type(bar).terminal = self._terminal = None
        bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Progress(Steps):
    """Shows the epochs or steps of a call of ``train``, with their metrics and the time left."""

    def __init__(
        self,
        start: int,
        count: int,
        *,
        unit: str = "epoch",
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        many = f"{unit}s"
        super().__init__(count, many, many, start=start, enabled=enabled, stream=stream, lines=100)
        self._end, self._one = start + count, unit

    @classmethod
    def create(cls, state: TrainState, target: TrainTarget, unit: str, enabled: bool) -> Progress:
        """Return the progress from ``state`` to ``target`` in epochs (called ``unit``) or steps."""
        if target.steps is not None:
            return cls(state.step, target.steps - state.step, unit="step", enabled=enabled)
        assert target.epochs is not None
        return cls(state.epoch, target.epochs - state.epoch, unit=unit, enabled=enabled)

    def update(self, epoch: int, metrics: Mapping[str, Any], count: int = 1) -> None:
        """Show the results of ``epoch``, after ``count`` more epochs or steps."""
        self.advance(count, describe(metrics))

    def _line(self, note: str) -> str:
        each = (time.monotonic() - self.began) / self.done
        left = each * (self.count - self.done)
        done = self._end - self.count + self.done
        text = f"{self._one} {done} of {self._end}  {note}".rstrip()
        return f"{text}  [{each:.3g} s/{self._one}, {_clock(left)} left]"


def describe(metrics: Mapping[str, Any]) -> str:
    """Format the numbers in ``metrics``, including NaN, as ``loss=0.1234 accuracy=0.98``."""
    parts = []
    for key, value in metrics.items():
        plain = number(value)
        if plain is not None and key not in _HIDDEN and not key.endswith(_HIDDEN_ENDS):
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
    # If the size of the terminal is unknown, tqdm would assume a width of 0.
    return {"dynamic_ncols": True} if columns else {"ncols": 80, "nrows": 24}


@functools.cache
def _bar_class() -> Any:
    """Return a subclass of tqdm with a lock for this process only and without a monitor thread.

    tqdm's default lock is shared with forked processes: if one is killed while holding it, this
    process hangs forever. The monitor thread makes forks less safe. A subclass doesn't affect the
    bars of user code.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0
        terminal: Terminal | None = None  #: of the outermost ``Steps``

        def __init__(self, *, file: TextIO, **options: Any) -> None:
            super().__init__(file=unwrap_stream(file), **options)

        @staticmethod
        def format_meter(  # type: ignore[override]
            *, unit: str, postfix: str | None, ncols: int | None, **rest: Any
        ) -> str:
            """Format the bar with as many metrics as fit, and the rate as ``1.2 s/epoch``."""
            note = postfix or ""
            while ncols and note:
                if len(tqdm.format_meter(unit=unit, postfix=note, **rest)) <= ncols:
                    break  # the default width of the bar is ten columns
                note = note.rpartition(" ")[0]
            line = tqdm.format_meter(unit=unit, postfix=note, ncols=ncols, **rest)
            one = unit.strip().removesuffix("s")
            return line.replace(f"s/{unit}", f" s/{one}")

        def display(self, *args: Any, **kwargs: Any) -> Any:
            if self.terminal is not None and self.terminal.line_is_open:
                return False
            return super().display(*args, **kwargs)

    Bar.set_lock(threading.RLock())
    return Bar


class Terminal:
    """Redirects stdout and stderr while bars of class ``bars`` are shown on ``stream``.

    Bars are hidden while the last line of output is incomplete, for example after
    ``print(end="")`` or at the prompt of a debugger.
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
                for bar in self._get_visible_bars():
                    bar.clear(nolock=True)
                self.stream.flush()
            stream.write(text)
            stream.flush()
            self.line_is_open = not text.endswith("\n")
            for bar in self._get_visible_bars():
                bar.refresh(nolock=True)

    def _get_visible_bars(self) -> list[Any]:
        return [bar for bar in self._bars._instances if isinstance(bar, self._bars)]

    def release(self) -> None:
        """Restore stdout and stderr, unless other code has replaced them."""
        if self.line_is_open:
            self.write("\n")
        for name, above in self._replaced.items():
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        self._replaced.clear()


class _Above:
    """A text stream that writes above the bars. Other attributes are those of the stream."""

    def __init__(self, stream: TextIO, terminal: Terminal) -> None:
        self.stream = stream
        self._terminal = terminal

    def write(self, text: str) -> int:
        if not text:  # click writes b"" to find out whether the stream accepts bytes
            return self.stream.write(text)
        self._terminal.write(text, self.stream)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unwrap_stream(stream: TextIO) -> TextIO:
    """Return the original stream if ``stream`` is redirected."""
    return stream.stream if isinstance(stream, _Above) else stream


class StepBar:
    """Shows the steps of an epoch below the bar of epochs, on terminals only.

    The driver creates the bar when all ranks have passed the barrier before the first step. It
    doesn't take part in the barrier.
    """

    def __init__(
        self, epoch: int, steps: int | None, enabled: bool, epochs: int | None = None
    ) -> None:
        self._epoch, self._steps, self._epochs = epoch, steps, epochs
        self._enabled = enabled and sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None

    def update(self, places: Sequence[Any]) -> None:
        """Show the step of rank 0, once all ranks are training."""
        if not self._enabled:
            return
        if self._bar is None:
            if any(place.epoch != self._epoch or place.step < 0 for place in places):
                return
            self._bar = _bar_class()(
                total=self._steps,
                desc=format_epoch(self._epoch, self._epochs),
                unit=" steps",
                leave=False,
                position=1,
                file=sys.stderr,
                **_size(sys.stderr),
            )
        done = places[0].step + 1
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
