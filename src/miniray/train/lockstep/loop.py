"""The loop over the steps of an epoch on one rank, for every kind of replica.

Conditions that must be equal on all ranks are checked, and errors name the rank and the step. A
rank never skips a backward pass, because the others would wait for its gradients. A step without a
loss, a loss that isn't finite, a parameter without a gradient and a loader that ends early are
therefore errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from miniray.counting import format_epoch
from miniray.doctor.instrument_training import observe_loss
from miniray.train.lockstep.replica import EpochReport, MicroBatch, Replica, StepOutput
from miniray.train.lockstep.schedule import Action, Agreement
from miniray.train.run.step_log import LogWindow
from miniray.train.workers import torch_utils as parts

if TYPE_CHECKING:
    from miniray.train.lockstep.context import RankContext

_CHECK_EVERY = 50  # steps between two checks of losses on a GPU: each check waits for it


class StepLoop:
    """Trains epochs with a replica. Every exit is at a step boundary, the same on all ranks."""

    def __init__(self, replica: Replica, context: RankContext) -> None:
        self.replica, self.context, self.state = replica, context, context.state
        self.schedule = context.facts.step_schedule
        self.agreement: Agreement | None = None
        #: Writes a snapshot of this step; None without memory for snapshots.
        self.save_snapshot: Callable[[], Any] | None = None
        self._epoch_means, self._log_means = parts.Means(), parts.Means()
        self._tokens: Any = 0
        self._window_step, self._window_start = self.state.step, time.monotonic()
        self._unchecked: list[tuple[int, Any]] = []
        self._steps: Iterator[Iterable[MicroBatch]] | None = None  # of the epoch that is open
        self._opened = contextlib.ExitStack()
        self._position = self.state.state_dict()  # when ``run`` returned
        if context.recorder is not None:
            context.recorder.explicit_losses = True  # not those that backward is called on

    def run(self, epoch: int, until: int | None = None) -> EpochReport:
        """Train to the end of the epoch, or until ``until`` steps of the run are complete.

        The last step of an epoch doesn't count for ``until``: the epoch ends with it.
        """
        self.context.until = until
        if self._steps is None or self._position != self.state.state_dict():
            self._open_epoch()
        elif not self._log_means.samples:
            self._window_start = time.monotonic()  # without the pause
        assert self._steps is not None
        if self._is_pause(until):  # a restart from a snapshot of this very step
            return self._pause()
        for micro_batches in self._steps:
            self._run_step(micro_batches)
            if self._act() or self._is_pause(until):
                return self._pause()
        self._check_losses()
        self._close_epoch()
        report = self._report(0)
        self.state.end_epoch()
        self._epoch_means = parts.Means()
        return report

    def _is_pause(self, until: int | None) -> bool:
        step = self.state.step_in_epoch
        is_due = until is not None and step and self.state.step >= until
        return bool(is_due and step != self.replica.count_epoch_steps())

    def set_snapshot_interval(self, steps: int | None) -> None:
        """Write a snapshot after every ``steps`` steps of the run, or none inside epochs."""
        self.schedule = dataclasses.replace(self.schedule, snapshot_every=steps)

    def _open_epoch(self) -> None:
        """Start the loader and wait for the other ranks."""
        state, context = self.state, self.context
        self._opened.close()
        context.status.set_phase("starting the loader")
        if not state.step_in_epoch:
            self._epoch_means = parts.Means()
        random_state = parts.random_state()
        self._steps = self.replica.start_epoch()  # its processes start before ranks wait
        if state.step_in_epoch:  # a run that wasn't interrupted has started the loader before
            parts.set_random_state(random_state)
        self.agreement = self.replica.create_agreement()
        context.barrier("before-iteration")
        context.count_step(steps=0)  # the position may have been restored
        if not self._log_means.samples:  # else a restored window continues
            self._window_step, self._window_start = state.step, time.monotonic()
        self._opened.enter_context(self.replica.epoch_context())

    def _close_epoch(self) -> None:
        self._steps = None
        self._opened.close()
        self.context.status.set_phase("end of the epoch")
        self.context.barrier("epoch-end")
        self.replica.end_epoch()

    def _pause(self) -> EpochReport:
        """Return to the driver inside an epoch.

        Buffers are synchronized, so that an evaluation uses the same model as a checkpoint.
        """
        self.replica.share_buffers()
        return self._report(self.state.step_in_epoch)

    def _report(self, step_in_epoch: int) -> EpochReport:
        self._position = self.state.state_dict()
        if self.state.step > self._window_step:
            self._post_log()
        return EpochReport(
            self.state.step,
            self._epoch_means.means(),
            self.replica.get_details(),
            step_in_epoch,
            self.context.status.take_logs(),
        )

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
        self.context.count_step(samples)

    def _act(self) -> bool:
        """Run the actions that are due after a step. Return whether to return to the driver."""
        action = self.schedule.get_actions(self.state.step)
        if self.agreement is not None:
            action |= self.agreement.decide(self.state.step)
        if Action.INTERVAL in action:
            assert self.agreement is not None
            self.set_snapshot_interval(self.agreement.argument)
        if Action.LOG in action:
            self._post_log()
        if Action.SNAPSHOT in action and self.save_snapshot is not None:
            self.save_snapshot()
        return Action.STOP in action

    def _post_log(self) -> None:
        now = time.monotonic()
        window = LogWindow(
            self.state.step,
            self.state.epoch,
            self._log_means.sums() if self.replica.logs_samples else {},
            {**self.replica.get_facts(), **parts.measure_memory(self.context.device)},
            int(self._tokens),
            self.state.step - self._window_step,
            now - self._window_start,
        )
        self._log_means, self._tokens = parts.Means(), 0
        self._window_step, self._window_start = self.state.step, now
        self.context.status.post_log(window)

    def _record(self, output: StepOutput) -> None:
        """Check the loss, now or soon, and add the metrics to the means."""
        self._tokens = self._tokens + output.tokens  # the first stage has them, the last the loss
        if output.loss is None:
            return
        if self.context.recorder is not None:
            observe_loss(self.context.recorder, output.loss, self.replica.site)
        if self.replica.checks_losses:
            self._unchecked.append((self.state.step_in_epoch, output.loss.detach()))
            if output.loss.is_cpu or len(self._unchecked) >= _CHECK_EVERY:
                self._check_losses()
        self._epoch_means.add(output.metrics, output.samples)
        self._log_means.add(output.metrics, output.samples)

    def _check_losses(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for step, loss in unchecked:
            value = loss.item()
            if value - value != 0:
                raise FloatingPointError(
                    f"the loss is {value} on rank {self.context.rank} at step {step} of "
                    f"{format_epoch(self.state.epoch)}; "
                    'to continue anyway, set on_nonfinite="ignore"'
                )

    def get_means(self) -> dict[str, Any]:
        """Return the sums of the epoch so far, to resume inside the epoch."""
        return self._epoch_means.state_dict() if self.state.step_in_epoch else {}

    def load_means(self, state: Mapping[str, Any]) -> None:
        """Restore ``get_means``. The loader starts again: the position has been set."""
        self._steps = None
        self._epoch_means = parts.Means()
        if state:
            self._epoch_means.load_state_dict(state)

    def get_window(self) -> dict[str, Any]:
        """Return what isn't logged yet of the last steps, for a restart between two records."""
        return {
            "means": self._log_means.state_dict(),
            "tokens": self._tokens,
            "step": self._window_step,
            "seconds": time.monotonic() - self._window_start,
        }

    def load_window(self, state: Mapping[str, Any]) -> None:
        """Restore ``get_window``."""
        self._log_means.load_state_dict(state["means"])
        self._tokens, self._window_step = state["tokens"], state["step"]
        self._window_start = time.monotonic() - state["seconds"]


def check_scheduler(scheduler: Any, name: str) -> None:
    """Raise ``ValueError`` for a learning rate schedule that depends on the rank's own loss."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"{name} can't be a ReduceLROnPlateau, because each rank has a different loss, so "
            "their learning rates would differ. Change the learning rate in on_epoch_end() of the "
            'trainer, which has the result of all ranks: self.call_workers("set_lr", lr)'
        )
