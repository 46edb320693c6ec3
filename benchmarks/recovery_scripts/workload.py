"""The model and data of all scripts, a record of their steps, and the end of one rank.

They are those of ``train_scripts``. Importing this registers a hook of torch that
records when each optimizer step ended and how many steps Adam has made, restored ones included: one
file per process in the directory ``$BENCH_RECORDS``, 16 bytes per step. With
``BENCH_KILL=rank:step:delay``, this rank kills itself with SIGKILL ``delay`` seconds after this
step, once, and writes the time to ``killed``. No script has a line for it.
"""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from pathlib import Path

import shared
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

#: Steps of the run, and steps between two checkpoints; 0 for a run that doesn't protect itself.
STEPS = int(os.environ.get("BENCH_STEPS_TOTAL", "100"))
EVERY = int(os.environ.get("BENCH_EVERY", "0"))
#: Steps of a turn of ``miniray_turns.py``: three epochs.
TURN_STEPS = 96


# Functions of this module, so that a process that unpickles a reference to them has the hook.
def make_model() -> torch.nn.Module:
    return shared.make_model()


def make_data() -> torch.utils.data.TensorDataset:
    return shared.make_data()


def _record_steps(directory: Path, kill: str) -> None:
    files: dict[int, int] = {}  # by process: a forked child has its own
    victim, last_step, delay = kill.split(":") if kill else ("", "0", "0")

    def record(optimizer: torch.optim.Optimizer, *_: object) -> None:
        now, pid = time.monotonic(), os.getpid()
        step = int(next(iter(optimizer.state.values()))["step"])
        if pid not in files:
            path = directory / f"{pid}.steps"
            files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(files[pid], struct.pack("dq", now, step))
        if kill and step == int(last_step) and _get_rank() == int(victim):
            threading.Thread(target=_kill_once, args=(directory, float(delay))).start()

    register_optimizer_step_post_hook(record)


def _get_rank() -> int:
    group = os.environ.get("REPLICA_GROUP_ID")  # torchft has no default process group
    return dist.get_rank() if group is None else int(group)


def _kill_once(directory: Path, delay: float) -> None:
    time.sleep(delay)
    try:
        file = os.open(directory / "killed", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:  # this step is made again after a restart
        return
    os.write(file, struct.pack("dq", time.monotonic(), os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)


if "BENCH_RECORDS" in os.environ:
    _record_steps(Path(os.environ["BENCH_RECORDS"]), os.environ.get("BENCH_KILL", ""))
