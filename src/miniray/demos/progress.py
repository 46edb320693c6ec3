"""Progress on the driver: a tqdm bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from types import TracebackType
from typing import Any, TextIO


class Progress:
    """Counts to ``total``; ``advance(n, note)`` shows the note beside the count.

    Elsewhere than on a terminal it writes ``lines`` lines in all, so a log file stays readable.
    """

    def __init__(
        self, total: int, label: str, unit: str, stream: TextIO | None = None, lines: int = 10
    ) -> None:
        self._total = total
        self._label = label
        self._unit = unit
        self._stream = stream or sys.stderr
        self._every = max(total // lines, 1)
        self._done = 0
        self._bar: Any = None
        if self._stream.isatty():
            size: dict[str, Any] = {"dynamic_ncols": True}
            if not os.get_terminal_size(self._stream.fileno()).columns:
                # It does not know its size, and tqdm would take that for no room at all.
                size = {"ncols": 80, "nrows": 24}
            self._bar = _quiet_tqdm()(
                total=total, desc=label, unit=f" {unit}", file=self._stream, **size
            )

    def advance(self, count: int = 1, note: str = "") -> None:
        before, self._done = self._done, self._done + count
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(count)
        elif self._done // self._every > before // self._every or self._done == self._total:
            text = f"{self._label}: {self._done}/{self._total} {self._unit}  {note}"
            print(text.rstrip(), file=self._stream, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _quiet_tqdm() -> Any:
    """tqdm without its multiprocessing lock and its monitor thread.

    The lock is shared with forked children: one that is killed while holding it would hang this
    process for ever. The thread is one more reason for a fork to be unsafe.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0
    return tqdm
