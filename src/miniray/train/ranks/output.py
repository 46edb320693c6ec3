"""What a rank prints: every line flushed and marked ``[Rank r/N]``, also into a file of its own."""

from __future__ import annotations

import contextlib
import sys
import threading
from functools import partialmethod
from pathlib import Path
from typing import Any, TextIO


class RankStream:
    """A text stream that marks each line and passes it on at once; everything else is the stream's.

    ``log`` gets the same lines; a full disk ends the log and not the training.
    """

    def __init__(self, stream: TextIO, mark: str, log: TextIO | None) -> None:
        self._stream = stream
        self._mark = mark
        self._log = log
        self._fresh = True  # at the beginning of a line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            shown = ""
            for line in text.splitlines(keepends=True):
                shown += f"{self._mark} {line}" if self._fresh else line
                self._fresh = line.endswith("\n")
            self._stream.write(shown)
            if self._log is not None:
                try:
                    self._log.write(shown)
                except OSError:
                    self._log = None
            if "\n" in text:
                self._stream.flush()
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def marked_output(rank: int, world_size: int, run_dir: str | None) -> Any:
    """Mark what this process prints until the block ends, and copy it to ``ranks/<rank>.log``."""
    mark = f"[Rank {rank}/{world_size}]"
    log: TextIO | None = None
    if run_dir is not None:
        folder = Path(run_dir) / "ranks"
        folder.mkdir(exist_ok=True)
        log = open(folder / f"{rank}.log", "a", buffering=1, encoding="utf-8")
    kept = sys.stdout, sys.stderr
    sys.stdout = RankStream(kept[0], mark, log)
    sys.stderr = RankStream(kept[1], mark, log)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept
        if log is not None:
            log.close()


def tame_tqdm(rank: int) -> None:
    """Bars that the worker's own code makes: on rank 0 only, and without what can hang.

    tqdm's lock is shared with forked processes: a loader's worker that is killed while it holds it
    stops this process for ever. Its monitor is a thread more at every fork.
    """
    from tqdm import std

    std.tqdm.set_lock(threading.RLock())
    std.tqdm.monitor_interval = 0
    if rank != 0:
        silent: Any = partialmethod(std.tqdm.__init__, disable=True)
        std.tqdm.__init__ = silent  # type: ignore[method-assign]
