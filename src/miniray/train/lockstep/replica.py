"""``Replica``: the part of the model on one rank, as ``StepLoop`` and ``RankActor`` see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from miniray.train.lockstep.schedule import Agreement
from miniray.train.run.step_log import LogWindow


class MicroBatch(NamedTuple):
    """One forward and backward pass of a step."""

    number: int  # of the batch within the epoch
    batch: Any
    weight: float = 1.0  # of the loss; 0 for a repeated batch, if other ranks still have batches
    is_last: bool = True  # of its step


class StepOutput(NamedTuple):
    """The result of a forward pass; ``loss`` is None on ranks that don't compute it."""

    loss: Any
    metrics: Mapping[str, Any]
    samples: int
    tokens: Any = 0


class EpochReport(NamedTuple):
    """The report of a rank after an epoch, or after a part of it.

    Attributes:
        step: Completed optimizer steps of the run.
        metrics: Means over this rank's samples and ``num_samples``, or the result of the worker's
            ``train_epoch``. They cover the epoch up to this step.
        details: Further values of this kind of replica.
        step_in_epoch: Completed steps of an epoch that isn't complete; 0 at its end.
        logs: Log windows that weren't posted yet.
    """

    step: int
    metrics: Any
    details: Mapping[str, Any] = {}
    step_in_epoch: int = 0
    logs: Sequence[LogWindow] = ()


class Replica(Protocol):
    """The part of the model on one rank, and the computation of its steps."""

    #: The source line of losses for the flight recorder, such as ``"train.py:17"``.
    site: str

    @property
    def state(self) -> ReplicaState:
        """Weights, optimizers and positions."""

    @property
    def checks_losses(self) -> bool:
        """Whether a loss that is NaN or infinite ends the run."""

    @property
    def logs_samples(self) -> bool:
        """Whether log records contain this rank's samples. Of ranks that share them, one does."""

    def prepare(self) -> dict[str, Any]:
        """Check the user's objects and return what the driver compares; before ranks wait."""

    def wrap(self, agreed: Any) -> int | None:
        """Connect the model with the other ranks'; return the steps of each epoch, if known."""

    def start_epoch(self) -> Iterator[Iterable[MicroBatch]]:
        """Start the loader and return the micro-batches of each step that is left of the epoch.

        The position is ``context.state``. Ranks may exchange how many batches they have.
        """

    def count_epoch_steps(self) -> int | None:
        """Return the steps of the epoch under way, if they are known."""

    def epoch_context(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager around the steps of an epoch."""

    def zero_grad(self) -> None:
        """Clear the gradients."""

    def micro_batch_context(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager around a forward and a backward pass."""

    def forward(self, batch: Any, number: int) -> StepOutput:
        """Compute the loss of a batch."""

    def backward(self, loss: Any, weight: float) -> None:
        """Add the gradients of ``weight * loss``."""

    def check_gradients(self) -> None:
        """Check, average and clip the gradients."""

    def step_optimizer(self) -> None:
        """Update the parameters."""

    def share_buffers(self) -> None:
        """Copy the buffers of the first replica, such as running statistics. A collective."""

    def end_epoch(self) -> None:
        """Share buffers, and step a scheduler that goes by epochs."""

    def get_details(self) -> Mapping[str, Any]:
        """Return ``EpochReport.details``."""

    def get_facts(self) -> Mapping[str, float]:
        """Return what is logged of the last step: learning rate, gradient norm."""

    def configure_scheduler(self, total_steps: int | None) -> None:
        """Create a scheduler that depends on the number of steps of the run."""

    def create_agreement(self) -> Agreement | None:
        """Return what distributes rank 0's decisions; None if ranks make unequal steps."""

    @property
    def has_position(self) -> bool:
        """Whether this rank's loader can start inside an epoch."""

    def check_validation(self, max_batches: int) -> None:
        """Validate on a few batches, and discard the scores. No state may change."""


class ReplicaState(Protocol):
    """Saves and restores the state of a replica.

    Methods that gather are collectives if the model is sharded.
    """

    def get_weights(self) -> Any:
        """Return the weights of this rank. A collective if the model is sharded."""

    def set_weights(self, weights: Any) -> None:
        """Load this rank's part of the whole weights."""

    def gather_weights(self) -> Any:
        """Return this rank's part of the weights for the driver; None if others' are enough."""

    def gather_shared(self) -> Any:
        """Return the state that all ranks share for the driver; None if others' is enough."""

    def load_shared(self, shared: Any) -> None:
        """Restore the merged results of ``gather_shared``."""

    def get_checksums(self) -> dict[str, int]:
        """Return a checksum of each parameter, to compare with other ranks."""

    def get_local_state(self, take: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the state that all ranks share, and what only this rank has. No collective.

        The tensors are those in use: the caller copies them before the next step. ``take`` returns
        what is stored of a tensor that may be sharded.
        """

    def load_local_state(self, shared: Any, own: Any) -> None:
        """Restore ``get_local_state(take_part)`` of the same rank in the same layout."""

    def get_data_state(self) -> dict[str, Any]:
        """Return the state of this rank's loader."""

    def load_data_state(self, state: Any) -> None:
        """Restore ``get_data_state``."""
