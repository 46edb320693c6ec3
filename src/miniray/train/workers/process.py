"""Environment and output of a trainer's worker process.

A worker's output is flushed line by line, starts with ``[Rank r/N]`` and is also written to
``ranks/<r>.log`` in the run directory. This starts before the user's object is created: what its
``__init__`` prints is included, and a logging handler created there keeps the stream that it finds.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from miniray.core import session, startup
from miniray.core.engine import Engine
from miniray.doctor import actors, recorder

#: Modules that the local engine imports once for all workers if the driver has imported the key.
#: ``torch._dynamo`` takes as long to import as torch, and torch's optimizers import it.
PRELOADED_WITH = {"torch": "torch._dynamo"}


def environment(
    run_dir: Path, worker_id: int, num_workers: int, modules: Sequence[str], set_up: str
) -> dict[str, str]:
    """Return the variables that set up the recorder and name the modules to preload."""
    preloaded = [module for key, module in PRELOADED_WITH.items() if key in sys.modules]
    return {
        **actors.environment(run_dir, worker_id, num_workers),
        startup.SET_UP: set_up,
        startup.LABEL: format_label(worker_id, num_workers),
        startup.PRELOAD: " ".join([*preloaded, *actors.MODULES, *modules]),
    }


def format_label(rank: int | str, world_size: int | str) -> str:
    """Return what starts each line of output."""
    return f"[Rank {rank}/{world_size}]"


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


def set_up_worker() -> Callable[[Any], None] | None:
    """Prepare the process of a worker: its output, and its recorder.

    Called before the worker is created. The recorder also notes the use of the object store.
    """
    _label_output()
    name_sections = actors.set_up()
    current = recorder.current()
    if current is not None and session.is_initialized():
        current.gauges["object_store"] = ObjectStoreGauge(session.engine())
    return name_sections


class ObjectStoreGauge:
    """Measures what the object store uses: memory, the most so far, its limit, and disk."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._peak = engine, 0

    def __call__(self) -> tuple[int, int, int, int] | None:
        usage = self._engine.measure_object_store()
        if usage is None:
            return None
        self._peak = max(self._peak, usage.memory_bytes)
        return usage.memory_bytes, self._peak, usage.limit_bytes, usage.disk_bytes


def set_up_rank() -> Callable[[Any], None] | None:
    """Prepare the process of a rank: its progress bars, and the setup of every worker."""
    tame_tqdm(int(os.environ[actors.RANK]))
    return set_up_worker()


def _label_output() -> None:
    """Label the lines of this process's output, and copy them to the run directory.

    They aren't copied if the directory doesn't exist, because this is a different machine than the
    driver's.
    """
    run_dir, rank, world_size = (
        os.environ[name] for name in (actors.RUN_DIR, actors.RANK, actors.WORLD_SIZE)
    )
    label, log = format_label(rank, world_size), None
    if os.access(run_dir, os.W_OK):
        folder = Path(run_dir) / "ranks"
        folder.mkdir(exist_ok=True)
        log = open(folder / f"{rank}.log", "a", buffering=1, encoding="utf-8")
    sys.stdout = RankStream(sys.stdout, label, log)
    sys.stderr = RankStream(sys.stderr, label, log)


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
