"""Decide the actions of ranks after a step, such as logging, with few messages.

With ``StepSchedule``, every rank computes the same actions without messages. If only one process
can decide, for example after a request to stop, rank 0 decides and ``Agreement`` broadcasts it.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable
from typing import Any


class Action(enum.IntFlag):
    """Actions of all ranks after the same step."""

    NONE = 0
    LOG = enum.auto()
    SNAPSHOT = enum.auto()
    STOP = enum.auto()
    #: The argument is the number of steps between two snapshots from now on.
    INTERVAL = enum.auto()


@dataclasses.dataclass(frozen=True)
class StepSchedule:
    """Actions that are due at a step, equal on all ranks.

    Attributes:
        log_every: Steps between two log records. The first step is logged too.
        snapshot_every: Steps between two snapshots; None for none inside an epoch.
    """

    log_every: int = 10
    snapshot_every: int | None = None

    def get_actions(self, step: int) -> Action:
        """Return the actions that are due after ``step`` completed steps of the run."""
        action = Action.NONE
        if step == 1 or step % self.log_every == 0:
            action |= Action.LOG
        if self.snapshot_every and step % self.snapshot_every == 0:
            action |= Action.SNAPSHOT
        return action


class Agreement:
    """Broadcasts the decisions of rank 0, so that all ranks act after the same step.

    Each broadcast contains the step of the next one, so there is one broadcast about every
    ``interval`` seconds. All ranks must call ``decide`` after every step, with the same steps.

    Args:
        is_source: Whether this is rank 0.
        step: Number of steps that are complete. The first broadcast follows the next step.
        request: Called on rank 0 only. Returns the requested action and its argument, which is
            available on all ranks as ``argument``.
        interval: Seconds between two broadcasts.
        device: Device of the broadcast tensor. NCCL needs a GPU's.
    """

    def __init__(
        self,
        is_source: bool,
        step: int,
        request: Callable[[], tuple[int, int]],
        *,
        interval: float = 0.5,
        device: Any = "cpu",
    ) -> None:
        import torch
        import torch.distributed as dist

        self.argument = 0
        self._is_source, self._request, self._interval = is_source, request, interval
        self._broadcast = dist.broadcast
        self._word = torch.zeros(3, dtype=torch.int64, device=device)
        self._next_step = step + 1
        self._last = (step, time.monotonic())

    def decide(self, step: int) -> Action:
        """Return the action for all ranks after ``step``. Most steps need no broadcast."""
        if step < self._next_step:
            return Action.NONE
        if self._is_source:
            action, argument = self._request()
            self._word.copy_(self._word.new_tensor([action, argument, self._choose_next(step)]))
        self._broadcast(self._word, src=0)
        action_value, self.argument, self._next_step = self._word.tolist()
        return Action(action_value)

    def _choose_next(self, step: int) -> int:
        """Return the step that is expected to complete in about ``interval`` seconds."""
        last_step, last_time = self._last
        now = time.monotonic()
        self._last = (step, now)
        seconds_per_step = max(now - last_time, 1e-6) / max(step - last_step, 1)
        return step + max(1, round(self._interval / seconds_per_step))
