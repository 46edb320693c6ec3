"""The environment that a trainer's worker starts in, where workers are processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miniray.core import startup
from miniray.doctor import actors
from miniray.doctor.hooks import when_imported

#: If the driver has the one, the local engine loads the other once for all workers.
LOADED_LATE = {"torch": "miniray.train.dynamo"}


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


def set_up() -> Callable[[Any], None] | None:
    """In the worker, before its object is made: record it, and seed torch however late it comes."""
    seed = os.environ.get(startup.SEED)
    if seed is not None:
        when_imported("torch", lambda torch: torch.manual_seed(int(seed)))
    return actors.set_up()
