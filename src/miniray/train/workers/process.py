"""Environment, memory settings and output of a trainer's worker process.

A rank's output is flushed line by line, starts with ``[Rank r/N]`` and is also written to
``ranks/<r>.log`` in the run directory. This starts before the user's object is created: what its
``__init__`` prints is included, and a logging handler created there keeps the stream that it finds.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from miniray.core import startup
from miniray.doctor import actors

#: If the driver has the one, the local engine loads the other once for all workers.
LOADED_LATE = {"torch": "miniray.train.dynamo"}

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
#: What glibc itself comes to in a process that has freed large blocks.
_LARGEST, _KEPT = 32 << 20, 64 << 20


def environment(
    run_dir: Path, worker_id: int, num_workers: int, modules: Sequence[str], set_up: str
) -> dict[str, str]:
    """Variables by which a worker records what it does, and the engine loads its modules early."""
    late = [late for early, late in LOADED_LATE.items() if early in sys.modules]
    return {
        **actors.environment(run_dir, worker_id, num_workers),
        startup.SET_UP: set_up,
        startup.PRELOAD: " ".join([*late, *actors.MODULES, *modules]),
    }


def keep_freed_memory() -> None:
    """Keep up to 64 MB that were freed, and blocks of up to 32 MB in the heap, for the next step.

    glibc gives freed memory back to the kernel above limits that begin at 128 KB and grow with what
    is freed: a training step then takes the same pages from the kernel again and again, zeroed each
    time. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)


#: Lines that Ray prints for its own display of a worker's output, which knows them by these.
_FOR_RAY = (":actor_name:", ":task_name:", ":job_id:")


class RankStream:
    """A text stream that marks and flushes each line; everything else is the wrapped stream's.

    ``log`` gets the same lines. A full disk ends the log, not the training.
    """

    def __init__(self, stream: TextIO, mark: str, log: TextIO | None) -> None:
        self._stream = stream
        self._mark = mark
        self._log = log
        self._fresh = True  # at the beginning of a line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        if text.startswith(_FOR_RAY):
            return self._stream.write(text)
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


def set_up_rank() -> Callable[[Any], None] | None:
    """Prepare the process of a rank: its output, its progress bars, its recorder.

    Called before the worker is created. If the run directory doesn't exist, because this is a
    different machine than the driver's, the output is marked and not copied.
    """
    run_dir, rank, world_size = (
        os.environ[name] for name in (actors.RUN_DIR, actors.RANK, actors.WORLD_SIZE)
    )
    mark, log = f"[Rank {rank}/{world_size}]", None
    if os.access(run_dir, os.W_OK):
        folder = Path(run_dir) / "ranks"
        folder.mkdir(exist_ok=True)
        log = open(folder / f"{rank}.log", "a", buffering=1, encoding="utf-8")
    sys.stdout = RankStream(sys.stdout, mark, log)
    sys.stderr = RankStream(sys.stderr, mark, log)
    tame_tqdm(int(rank))
    return actors.set_up()


def tame_tqdm(rank: int) -> None:
    """Show progress bars of the worker's code on rank 0 only, without tqdm's lock and monitor.

    The lock is shared with forked processes: if a loader process is killed while it holds the lock,
    this process hangs. The monitor is one more thread at every fork.
    """
    from tqdm import std  # the driver imports this module, and doesn't need tqdm

    std.tqdm.set_lock(threading.RLock())
    std.tqdm.monitor_interval = 0
    if rank != 0:
        make = std.tqdm.__init__

        def silent(self: Any, *args: Any, **options: Any) -> None:
            make(self, *args, **{**options, "disable": True})

        std.tqdm.__init__ = silent  # type: ignore[method-assign]
