"""What a running filter shows: a bar on a terminal, a line at the end elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any


class FilterBar:
    """Rows filtered so far, by all ranks. A filter that is done within a second says nothing."""

    def __init__(self, total: int) -> None:
        self._bar: Any = None
        self._began = time.monotonic()
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            # A lock of this process alone: a forked child that is killed must not keep it.
            kind: Any = type("Bar", (tqdm,), {"monitor_interval": 0})
            kind.set_lock(threading.RLock())
            self._bar = kind(total=total, desc="filter", unit=" rows", file=sys.stderr)

    def update(self, rows: int) -> None:
        if self._bar is not None:
            self._bar.update(rows)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def summary(self, rows: int, kept: int, here: int, path: Path | None) -> None:
        """``here``: rows that this rank has filtered; ``path``: where that is remembered."""
        seconds = time.monotonic() - self._began
        if sys.stderr is not None and (self._bar is not None or seconds > 1):
            where = "" if path is None else f"; remembered in {path}"
            print(
                f"filter: {kept:,} of {rows:,} rows kept, {here / max(seconds, 1e-9):,.0f} rows/s"
                f" on rank 0{where}",
                file=sys.stderr,
                flush=True,
            )
