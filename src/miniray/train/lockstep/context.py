"""``RankContext``: the position, the status and the barriers that the parts of a rank share."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
from typing import TYPE_CHECKING, Any

from miniray.doctor import barriers, recorder
from miniray.train.lockstep import process_group
from miniray.train.lockstep.health.status import HeartbeatSender
from miniray.train.lockstep.options import RunFacts
from miniray.train.lockstep.schedule import Action
from miniray.train.run.state import RankState
from miniray.train.torch_worker import TorchWorker
from miniray.train.workers.context import BoundAttributes, MetricLog, WorkerContext

if TYPE_CHECKING:
    from miniray.train.run.state import TrainTarget


@dataclasses.dataclass(frozen=True)
class WorkerTraits:
    """The methods that the user's class defines itself, instead of inheriting ``TorchWorker``'s.

    Attributes:
        has_steps: ``StepLoop`` trains the epochs, with ``training_step``. If the class has its own
            ``train_epoch`` or ``optimize``, that is used instead.
        shards_data: The class has its own ``load_data_shard``.
        own_methods: Its own methods among ``get_weights``, ``set_weights`` and ``evaluate``.
        gets_loader: The trainer sets ``self.train_loader`` (``data=``).
    """

    has_steps: bool
    shards_data: bool
    own_methods: tuple[str, ...]
    gets_loader: bool = False

    @classmethod
    def from_class(cls, user_class: type) -> WorkerTraits:
        def is_own(name: str) -> bool:
            return defines(user_class, name)

        return cls(
            is_own("training_step") and not (is_own("train_epoch") or is_own("optimize")),
            is_own("load_data_shard"),
            tuple(filter(is_own, ("get_weights", "set_weights", "evaluate"))),
        )


def defines(user_class: type, name: str) -> bool:
    """Return whether a worker class has a method that isn't ``TorchWorker``'s."""
    method = getattr(user_class, name, None)
    return method is not None and method is not getattr(TorchWorker, name, None)


class RankContext:
    """The state that the parts of a rank share: number, device, position, status, barriers."""

    status: HeartbeatSender

    def __init__(self, rank: int, world_size: int, facts: RunFacts, user: Any) -> None:
        import torch  # not in the driver, which imports this module

        self.rank, self.world_size, self.facts = rank, world_size, facts
        self.device: Any = torch.device("cpu")
        self.state: RankState = RankState()
        self.recorder: Any = None
        self._attributes = BoundAttributes.of(user, WorkerContext.from_environment())
        #: The metrics that the user's object logs.
        self.log = MetricLog.find(user)
        self.until: int | None = None  # the step at which the driver wants the ranks to pause
        self._shares_boxes = False
        self._opened = contextlib.ExitStack()

    def describe(self) -> dict[str, Any]:
        """Return the machine, process and device of this rank."""
        gpu = None
        if self.device.type == "cuda":
            import torch

            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        where = {"host": socket.gethostname(), "pid": os.getpid()}
        return {**where, "device": self.device.type, "gpu": gpu}

    def join(self, spec: process_group.ProcessGroupSpec, one_machine: bool) -> None:
        """Join the process group. ``one_machine``: all ranks see each other's flight recorders."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.set_device(self.device)
        if self.facts.own_process:
            self.recorder = recorder.current()  # None if there is no run directory
            self._shares_boxes = one_machine and self.recorder is not None
        store = process_group.join(spec, self.rank)
        self._opened.callback(process_group.leave)
        self.status = HeartbeatSender(spec, self.rank, store)
        self._opened.callback(self.status.close)

    def start_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch."""
        self.state.start_epoch(epoch)
        self.status.epoch, self.status.step = epoch, -1
        if self.recorder is not None:
            self.recorder.tell_epoch(epoch)
            self.recorder.set_global_step(self.state.step)
            done = self.state.step_in_epoch
            self.recorder.note(steps_before_epoch=self.recorder.step_number - done)

    def is_next_step_logged(self, steps_per_epoch: int | None) -> bool:
        """Return whether there is a log record at the end of the step under way."""
        state = self.state
        is_last = state.step_in_epoch + 1 == steps_per_epoch
        actions = self.facts.step_schedule.get_actions(state.step + 1)
        return Action.LOG in actions or is_last or state.step + 1 == self.until

    def set_target(
        self, target: TrainTarget, start: RankState, steps_per_epoch: int | None
    ) -> int | None:
        """Set the number of epochs and steps of the user's object; return the number of steps."""
        total = target.count_steps(start, steps_per_epoch)
        self._attributes.update(epochs=target.epochs, total_steps=total)
        return total

    def count_step(self, samples: int = 0, steps: int = 1) -> None:
        """Count completed optimizer steps on ``samples`` of this rank."""
        self.state.advance(samples, steps)
        self._attributes.update(global_step=self.state.step)

    def barrier(self, name: str) -> None:
        """Wait for all ranks: by the flight recorders, which the doctor reads, or by the store."""
        if not self._shares_boxes:
            self.status.barrier(name)
            return
        self.status.set_phase(f"barrier {name!r}")
        barriers.barrier(name, timeout=self.status.limit)
        self.status.set_phase(f"after barrier {name!r}")

    def post_status(self) -> None:
        """Report the step of an error: the last heartbeat may be of an earlier one."""
        with contextlib.suppress(RuntimeError):  # the store is closed: the driver reads it no more
            self.status.post()

    def leave(self) -> None:
        """Leave the process group and restore the process."""
        self._opened.close()
