"""Environment and memory settings of a trainer's worker process."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

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
