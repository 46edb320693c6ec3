"""``FailureBudget``: decides whether the loss of a worker may be repaired.

``WorldSize`` decides how many workers that step together continue afterwards.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Any

from miniray.errors import ActorDiedError, GetTimeoutError, TaskError, WorkerTimeoutError
from miniray.train.workers.nodes import NodeLosses

#: Seconds to wait for the resources of lost ranks before a run continues without them.
PLACEMENT_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.2


class Decision(enum.Enum):
    """Reaction to a failure."""

    RETRY = "retry"
    RAISE = "raise"


def is_loss(error: BaseException) -> bool:
    """Return whether ``error`` reports a lost worker; see ``FailureBudget``."""
    if isinstance(error, TaskError) or getattr(error, "in_init", False):
        return False
    return isinstance(error, (ActorDiedError, GetTimeoutError, WorkerTimeoutError))


class FailureBudget:
    """Counts lost workers, up to ``max_failures`` of which are repaired.

    A worker is lost if its process crashed, hung or exceeded a timeout. Exceptions of user code,
    including ``__init__``, aren't losses, because they would be raised again.
    """

    def __init__(self, max_failures: int) -> None:
        self.max_failures = max_failures
        self.failures = 0
        self._node_losses = NodeLosses()

    @property
    def is_spent(self) -> bool:
        """Whether the next loss ends the run."""
        return self.failures >= self.max_failures

    def decide(self, error: BaseException, *, is_repairing: bool = False) -> Decision:
        """Count a loss, and decide whether to repair it. Other errors are raised.

        Args:
            error: The error of the failure.
            is_repairing: Whether an earlier loss was being repaired. If a node was lost, both
                losses count as one failure.
        """
        if not is_loss(error):
            return Decision.RAISE
        self.failures += not (is_repairing and self._node_losses.explain_failure())
        return Decision.RAISE if self.failures > self.max_failures else Decision.RETRY

    def settle(self) -> None:
        """Wait until lost nodes are known, so that no replacement is placed on them."""
        self._node_losses.settle()


class TooFewRanksError(Exception):
    """After a loss, the engine has resources for fewer ranks than ``min_workers``."""


class WorldSize:
    """Decides how many ranks restart after a loss, and when a smaller group grows again.

    Args:
        most: Number of ranks at the start.
        fewest: ``min_workers``; None if the number can't change.
        count_room: Returns how many more ranks the engine could start now; None for any number.
    """

    def __init__(
        self,
        most: int = 1,
        fewest: int | None = None,
        count_room: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._most, self._fewest, self._count_room = most, fewest, count_room
        self._last_loss: tuple[int, int | None] | None = None

    def shrink(self, count: int, rank: int | None, step: int | None) -> int:
        """Return the number of ranks to restart. Call it after all ranks have been stopped.

        A rank is dropped if it is lost twice in a row and the second time no newer state exists to
        restart from. Otherwise, as many restart as can be placed within ``PLACEMENT_TIMEOUT_S``.

        Args:
            count: Number of ranks before the loss.
            rank: The lost rank, if it is known.
            step: The step from which the ranks restart.

        Raises:
            TooFewRanksError: Fewer than ``min_workers`` can be placed.
        """
        if self._fewest is None:
            return count
        loss = None if rank is None else (rank, step)
        if loss is not None and loss == self._last_loss:
            count, loss = max(self._fewest, count - 1), None
        self._last_loss = loss
        placed = self._wait_for_room(count)
        if placed < self._fewest:
            raise TooFewRanksError
        return placed

    def find_larger(self, count: int) -> int | None:
        """Return a number of ranks above ``count`` that the engine has resources for, or None."""
        missing = 0 if self._fewest is None else self._most - count
        room = self._count_room() if missing else 0
        larger = count + (missing if room is None else min(room, missing))
        return larger if larger > count else None

    def grow(self, count: int) -> int:
        """Return the number of ranks to start, up to ``count``. Call it while none is running.

        Other programs may have taken resources since ``find_larger``.
        """
        return max(self._fewest or count, self._wait_for_room(count))

    def _wait_for_room(self, count: int) -> int:
        """Wait until ``count`` ranks can be placed. Return how many can be placed in the end."""
        deadline = time.monotonic() + PLACEMENT_TIMEOUT_S
        while True:
            room = self._count_room()
            if room is None or room >= count:
                return count
            if time.monotonic() >= deadline:
                return room
            time.sleep(_POLL_INTERVAL_S)


def create_resize_event(before: int, count: int, step: int, size: int | None) -> dict[str, Any]:
    """Return the event for a run that continues on ``count`` ranks; ``size``: its global batch."""
    text = f"training continues on {count} ranks instead of {before} at step {step}"
    if size is not None:
        text += f"; the global batch size is {size} instead of {size // count * before}"
    event = {"event": "world_size_changed", "from": before, "to": count, "step": step}
    return {**event, "global_batch_size": size, "message": text}
