"""A rank's process: process group, pulse, barriers, and the way out.

An error leaves the group in an unknown state: the driver ends all ranks, and the process is not
used again.
"""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from miniray.doctor import barriers, recorder
from miniray.train.lockstep import process_group as group
from miniray.train.lockstep.options import RunFacts
from miniray.train.lockstep.status import PulseThread
from miniray.train.workers import process as launching


class Member(ABC):
    """One rank of a run; see the module."""

    def __init__(self, rank: int, world_size: int, facts: RunFacts) -> None:
        self.rank, self.world_size, self.facts = rank, world_size, facts
        self.device: Any = torch.device("cpu")
        self.pulse: Any = None
        self.recorder: Any = None
        self._has_boxes = False
        self._open = contextlib.ExitStack()

    def whereabouts(self) -> dict[str, Any]:
        """Which machine, process and device this is."""
        gpu = None
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        return {**where, "device": self.device.type, "gpu": gpu}

    def enter(self, spec: group.ProcessGroupSpec, one_machine: bool) -> None:
        """Join the group. ``one_machine``: all ranks see each other's black boxes."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.facts.own_process:
            self.recorder = recorder.current()  # none where there is no run directory
            self._has_boxes = one_machine and self.recorder is not None
            launching.keep_freed_memory()
        store = group.join(spec, self.rank)
        self._open.callback(group.leave)
        self.pulse = PulseThread(spec, self.rank, store)
        self._open.callback(self.pulse.close)

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train one epoch; what this rank has to say about it."""
        self.pulse.epoch, self.pulse.step = epoch, -1
        if self.recorder is not None:
            self.recorder.tell_epoch(epoch)
            self.recorder.note(steps_before_epoch=self.recorder.step_number)
        try:
            said = self._epoch(epoch)
        except Exception:  # the driver says in which step, and the last pulse may be of another
            with contextlib.suppress(RuntimeError):  # the store may be gone: then nobody reads it
                self.pulse.post()
            raise
        if self.recorder is not None:
            self.recorder.flush()
        return said

    @abstractmethod
    def _epoch(self, epoch: int) -> dict[str, Any]:
        """The steps of an epoch."""

    def barrier(self, name: str) -> None:
        """Wait for all ranks; over the black boxes, which the doctor reads, or over the store."""
        if not self._has_boxes:
            self.pulse.barrier(name)
            return
        self.pulse.at(f"barrier {name!r}")
        barriers.barrier(name, timeout=self.pulse.limit)
        self.pulse.at(f"after barrier {name!r}")

    def leave(self) -> None:
        """Leave the group and give the process back as it was."""
        self._open.close()


def share_buffers(modules: Iterable[Any], source: int = 0, group: Any = None) -> None:
    """Give all ranks the buffers of rank ``source`` (running statistics). A collective."""
    for module in modules:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=source, group=group)


def check_scheduler(scheduler: Any, name: str) -> None:
    """``ValueError`` for a learning rate schedule that goes by a number of the rank's own."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"{name} cannot be a ReduceLROnPlateau: each rank has a loss of its own, and their "
            "learning rates would part. on_epoch_end() of the trainer has the result of all ranks: "
            'lower the rate there, with self.call_workers("set_lr", lr)'
        )


def check_loss(value: float, on_nonfinite: str, rank: int, step: int, epoch: int) -> None:
    """``FloatingPointError`` for a loss that is NaN or infinite, unless that is to be ignored."""
    if on_nonfinite == "error" and value - value != 0:
        raise FloatingPointError(
            f"the loss is {value} on rank {rank} at step {step} of epoch {epoch}; "
            'on_nonfinite="ignore" would train on with it'
        )
