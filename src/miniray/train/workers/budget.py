"""``FailureBudget``: decides whether the loss of a worker may be repaired."""

from __future__ import annotations

import enum

from miniray.errors import ActorDiedError, GetTimeoutError, TaskError, WorkerTimeoutError
from miniray.train.workers.nodes import NodeLosses


class Decision(enum.Enum):
    """What to do after a failure."""

    RETRY = "retry"
    RAISE = "raise"


def is_loss(error: BaseException) -> bool:
    """Return whether ``error`` reports a lost worker; see ``FailureBudget``."""
    if isinstance(error, TaskError) or getattr(error, "in_init", False):
        return False
    return isinstance(error, (ActorDiedError, GetTimeoutError, WorkerTimeoutError))


class FailureBudget:
    """Counts lost workers, up to ``max_failures`` of which are repaired.

    A worker is lost if its process died, or if it hung or was too slow. Exceptions of user code, in
    ``__init__`` too, aren't losses: they would be raised again.
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
            error: What happened.
            is_repairing: It happened while an earlier loss was repaired. If a node was lost
                meanwhile, both are one failure.
        """
        if not is_loss(error):
            return Decision.RAISE
        self.failures += not (is_repairing and self._node_losses.explain_failure())
        return Decision.RAISE if self.failures > self.max_failures else Decision.RETRY

    def settle(self) -> None:
        """Wait until lost nodes are known, so that no replacement is placed on them."""
        self._node_losses.settle()
