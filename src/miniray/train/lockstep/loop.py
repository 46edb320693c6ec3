"""The steps of an epoch on one rank: one loop for every kind of replica.

If ranks could differ in something that must be equal, it is checked, and the error names rank and
step. A rank never continues alone: if it left out a backward pass, the others would wait for its
gradients. So a step without a loss, a loss that isn't finite, a parameter without a gradient and a
loader that ends early are errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from miniray.doctor.instrument_training import observe_loss
from miniray.train.workers import torch_utils as parts

if TYPE_CHECKING:
    from miniray.train.lockstep.rank import RankContext

_CHECK_EVERY = 50  # steps between two checks of losses on a GPU: each check waits for it


class MicroBatch(NamedTuple):
    """One forward and backward pass of a step."""

    number: int  # of the batch within the epoch
    batch: Any
    weight: float = 1.0  # of the loss; 0 for a batch that only keeps other ranks company
    is_last: bool = True  # of its step


class StepOutput(NamedTuple):
    """The result of a forward pass; ``loss`` is None on ranks that don't compute it."""

    loss: Any
    metrics: Mapping[str, Any]
    samples: int


@dataclasses.dataclass
class RankState:
    """The position of a rank in the run.

    Attributes:
        step: Completed optimizer steps of the run, including those before a restart or resume.
        epoch: The current epoch.
        step_in_epoch: Completed steps of this epoch.
        samples: Samples of this epoch that this rank has trained on.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0

    def start_epoch(self, epoch: int) -> None:
        self.epoch, self.step_in_epoch, self.samples = epoch, 0, 0

    def advance(self, samples: int, steps: int = 1) -> None:
        """Count ``steps`` completed optimizer steps on ``samples`` of this rank's samples."""
        self.step += steps
        self.step_in_epoch += steps
        self.samples += samples

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class EpochReport(NamedTuple):
    """The report of a rank after an epoch.

    Attributes:
        step: Completed optimizer steps of the run.
        metrics: Means over this rank's samples and ``num_samples``, or the result of the worker's
            own ``train_epoch``.
        details: Further values of this kind of replica.
    """

    step: int
    metrics: Any
    details: Mapping[str, Any] = {}


class Replica(Protocol):
    """The part of the model that one rank holds, and how it computes a step with it."""

    #: The source line of losses for the flight recorder, such as ``"train.py:17"``.
    site: str

    @property
    def checks_losses(self) -> bool:
        """Whether a loss that is NaN or infinite ends the run."""

    def prepare(self) -> dict[str, Any]:
        """Check the user's objects and return what the driver compares; before ranks wait."""

    def wrap(self, agreed: Any) -> int | None:
        """Connect the model with the other ranks'; return the steps of an epoch, if known."""

    def start_epoch(self, epoch: int) -> Iterator[Iterable[MicroBatch]]:
        """Start the loader and return the micro-batches of each step. No collective."""

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

    def end_epoch(self) -> None:
        """Share buffers, and step a scheduler that goes by epochs."""

    def get_details(self) -> Mapping[str, Any]:
        """Return ``EpochReport.details``."""


class StepLoop:
    """Trains epochs with a replica. Every exit is at a step boundary, the same on all ranks."""

    def __init__(self, replica: Replica, context: RankContext) -> None:
        self.replica, self.context, self.state = replica, context, context.state
        self._means = parts.Means()
        self._unchecked: list[tuple[int, Any]] = []
        if context.recorder is not None:
            context.recorder.explicit_losses = True  # not those that backward is called on

    def run(self, epoch: int) -> EpochReport:
        """Train one epoch."""
        replica, context = self.replica, self.context
        self._means = parts.Means()
        context.status.set_phase("starting the loader")
        steps = replica.start_epoch(epoch)  # starts loader processes, which no rank waits for
        context.barrier("before-iteration")
        with replica.epoch_context():
            for micro_batches in steps:
                self._run_step(micro_batches)
        self._check_losses()
        context.status.set_phase("end of the epoch")
        context.barrier("epoch-end")
        replica.end_epoch()
        return EpochReport(self.state.step, self._means.means(), replica.get_details())

    def _run_step(self, micro_batches: Iterable[MicroBatch]) -> None:
        replica, samples = self.replica, 0
        replica.zero_grad()
        for number, batch, weight, is_last in micro_batches:
            with replica.micro_batch_context(is_last):
                output = replica.forward(batch, number)
                if weight:
                    self._record(output)
                    samples += output.samples
                replica.backward(output.loss, weight)
        self.context.status.set_phase("gradients")
        replica.check_gradients()
        self.context.status.set_phase("optimizer")
        replica.step_optimizer()
        self.state.advance(samples)

    def _record(self, output: StepOutput) -> None:
        """Check the loss, now or soon, and add the metrics to the means of the epoch."""
        if output.loss is None:
            return
        if self.context.recorder is not None:
            observe_loss(self.context.recorder, output.loss, self.replica.site)
        if self.replica.checks_losses:
            self._unchecked.append((self.state.step_in_epoch, output.loss.detach()))
            if output.loss.is_cpu or len(self._unchecked) >= _CHECK_EVERY:
                self._check_losses()
        self._means.add(output.metrics, output.samples)

    def _check_losses(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for step, loss in unchecked:
            value = loss.item()
            if value - value != 0:
                raise FloatingPointError(
                    f"the loss is {value} on rank {self.context.rank} at step {step} of epoch "
                    f'{self.state.epoch}; on_nonfinite="ignore" would train on with it'
                )


def check_scheduler(scheduler: Any, name: str) -> None:
    """Raise ``ValueError`` for a learning rate schedule that depends on the rank's own loss."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"{name} cannot be a ReduceLROnPlateau: each rank has a loss of its own, and their "
            "learning rates would part. on_epoch_end() of the trainer has the result of all ranks: "
            'lower the rate there, with self.call_workers("set_lr", lr)'
        )
