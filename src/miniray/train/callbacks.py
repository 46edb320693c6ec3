"""Callbacks, whose methods are called by trainers.

An exception in a callback stops the run, like one in a hook of the trainer. Callbacks are called in
order, after the hook of the trainer. All of them run on the driver.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import miniray
from miniray.checks import check_bool, check_int, check_number, suggest_options
from miniray.train.options import warn
from miniray.train.run import records
from miniray.train.run.loggers.base import Logger
from miniray.train.run.loggers.csv import CSVLogger
from miniray.train.run.loggers.tensorboard import TensorBoardLogger
from miniray.train.run.result import better_direction

__all__ = ["CSVLogger", "Callback", "Checkpoint", "EarlyStopping", "LRSchedule", "TensorBoard"]


class Callback:
    """Base class of callbacks. ``kwargs`` are those of ``train()``.

    Implement ``get_state`` and ``set_state`` to keep state across a resume: a dict of plain values,
    stored in checkpoints. A ``Checkpoint`` saves callbacks that come after it in the state before
    the epoch.
    """

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called when the workers are ready, before the first epoch."""

    def on_epoch_start(self, trainer: Any, epoch: int, **kwargs: Any) -> None:
        """Called before each epoch."""

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        """Called after each epoch. Values that are added to ``result`` appear in the history."""

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, Any], **kwargs: Any) -> None:
        """Called at the logging interval with means over the last steps, while workers train.

        Only trainers that count steps call it, such as ``DDPTrainer``. ``step`` is the number of
        completed steps of the run. Don't call workers here. Set ``trainer.should_stop`` to end the
        run at one of the next steps.
        """

    def on_evaluate_end(
        self, trainer: Any, step: int, scores: dict[str, Any], **kwargs: Any
    ) -> None:
        """Called after an evaluation inside an epoch (``eval_every_steps``)."""

    def on_worker_replaced(self, trainer: Any, worker_id: int) -> None:
        """Called when a replacement has the shard and weights of the lost worker.

        This can be at any time, also inside an epoch. Call no other worker here: if it is lost, the
        replacement is taken for lost.
        """

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        """Called after the last epoch with the result, unless the run failed."""

    def get_state(self) -> dict[str, Any]:
        """Return plain values that a resumed run needs."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the values of ``get_state`` before the first epoch of a resumed run."""


@suggest_options(
    {
        "save_top_k": "Use keep_best=True and keep_last=.",
        "dirpath": "Checkpoints are in the run directory. Pass run_dir= to the trainer.",
    }
)
class Checkpoint(Callback):
    """Saves a checkpoint every ``every`` epochs, and at the end of the run.

    Args:
        every: Number of epochs between two checkpoints. Default: 1. PPO and GRPO trainers count
            steps in place of epochs; with ``every_steps`` or ``every_minutes``, their default is
            None, which leaves out these checkpoints.
        keep_last: How many of the newest to keep. None keeps all. By default, the trainer's
            ``keep_last``.
        keep_best: Also keep the best one by ``monitor``: the lowest with ``mode="min"``, the
            highest with ``"max"``. ``"auto"`` decides by the metric's name
            (``better_direction``). By default, the trainer's ``keep_best``. If no epoch has the
            metric, a warning is shown at the end.
        every_steps: Also save after every ``every_steps`` optimizer steps of the run, at the same
            step on all ranks. For trainers that count steps, such as ``DDPTrainer``.
        every_minutes: Also save if the newest checkpoint of this callback is ``every_minutes`` old:
            at the next step of trainers that count steps, at the end of the epoch of others.
    """

    def __init__(
        self,
        every: int | None = None,
        keep_last: int | EllipsisType | None = ...,
        keep_best: bool = False,
        monitor: str = "loss",
        mode: str = "auto",
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
    ) -> None:
        self.every = None if every is None else check_int("every", every, 1)
        self.keep_last = keep_last
        self.keep_best = (
            (monitor, better_direction(monitor, mode))
            if check_bool("keep_best", keep_best)
            else None
        )
        self.every_steps = (
            None if every_steps is None else check_int("every_steps", every_steps, 1, " or None")
        )
        if every_minutes is not None and not every_minutes > 0:
            raise ValueError(f"every_minutes must be a number > 0 or None, not {every_minutes!r}")
        self.every_minutes = every_minutes
        self._saved_step = 0
        self._saved_at = 0.0

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        before = trainer.checkpoints.retention
        trainer.checkpoints.configure(
            keep_last=before.keep_last if self.keep_last is ... else self.keep_last,
            keep_best=self.keep_best or before.keep_best,
        )
        self._saved_step, self._saved_at = trainer.state.step, time.monotonic()

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        has_interval = self.every_steps is not None or self.every_minutes is not None
        every = self.every or (None if has_interval and trainer.counts_only_steps else 1)
        if (every is not None and (epoch + 1) % every == 0) or self._is_due(trainer):
            self._save(trainer)

    def save_if_due(self, trainer: Any) -> None:
        """Save inside an epoch, if ``every_steps`` or ``every_minutes`` asks for it.

        If the last checkpoint is still being written, this one is left out.
        """
        if not self._is_due(trainer):
            return
        if trainer.checkpointer.is_writing():
            event = {"event": "checkpoint_skipped", "step": trainer.state.step}
            trainer.session.append_event(event)
            self._saved_at = time.monotonic()
        else:
            self._save(trainer)

    def is_time_due(self) -> bool:
        """Return whether the newest checkpoint is older than ``every_minutes``."""
        if self.every_minutes is None:
            return False
        return time.monotonic() - self._saved_at >= 60 * self.every_minutes

    def _is_due(self, trainer: Any) -> bool:
        at_step = self.every_steps is not None and trainer.state.step % self.every_steps == 0
        return at_step or self.is_time_due()

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(trainer.epoch - 1, background=True)
        self._saved_step, self._saved_at = trainer.state.step, time.monotonic()

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        if self._saved_step != trainer.state.step:
            self._save(trainer)
        if self.keep_best is not None and trainer.checkpoints.best() is None:
            _warn_unless_seen("Checkpoint kept no best one", self.keep_best[0], trainer.history)


@suggest_options()
class EarlyStopping(Callback):
    """End the run after ``patience`` epochs without an improvement of ``monitor``.

    An improvement is a value that is better than the best one by more than ``min_delta``. NaN isn't
    an improvement. The callback sets ``trainer.should_stop``, and stores the reason in
    ``trainer.stop_reason`` and in the last record of the history. Epochs without the metric don't
    count, for example if it is evaluated every few epochs. If no epoch has the metric, a warning is
    shown. See ``Checkpoint`` for ``mode``.
    """

    def __init__(
        self, monitor: str = "loss", patience: int = 3, mode: str = "auto", min_delta: float = 0.0
    ) -> None:
        check_int("patience", patience, 1)
        self.monitor = monitor
        self.patience = patience
        self.mode = better_direction(monitor, mode)
        self.min_delta = check_number("min_delta", min_delta, 0)
        self.best: float | None = None
        self.waited = 0
        self._seen: int | None = None  # the last epoch it knows of

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        if self._seen is not None:  # a checkpoint may have been written before it saw the epoch
            for record in trainer.history:
                if record["epoch"] > self._seen:
                    self._look_at(record["epoch"], record)

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        if not self._look_at(epoch, result) and self.waited >= self.patience:
            best = "never was a number" if self.best is None else f"is {self.best:.6g} at best"
            reason = f"early stopping: {self.monitor} {best}, {self.waited} epochs without better"
            trainer.should_stop = True
            trainer.stop_reason = result["stop_reason"] = reason

    def _look_at(self, epoch: int, result: Mapping[str, Any]) -> bool:
        """Return False if the metric isn't better than the best so far."""
        self._seen = epoch
        value = records.number(result.get(self.monitor))
        if value is None and self.monitor in result:
            kind = type(result[self.monitor]).__name__
            raise TypeError(f"EarlyStopping: {self.monitor!r} must be a number, not a {kind}")
        if value is None:
            return True
        if self._is_improvement(value):
            self.best, self.waited = value, 0
            return True
        self.waited += 1
        return False

    def _is_improvement(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        if self.best is None and not self.waited:
            _warn_unless_seen("EarlyStopping never stopped", self.monitor, trainer.history)

    def get_state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "seen": self._seen}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited, self._seen = state["best"], state["waited"], state.get("seen")


@suggest_options()
class LRSchedule(Callback):
    """Call ``set_lr(schedule(epoch))`` on every worker before each epoch.

    If a worker doesn't implement ``set_lr``, ``TypeError`` is raised when training starts. ``lr``
    is the current value. A replacement of a worker starts with this value.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        if not callable(schedule):
            raise TypeError(f"schedule must be a function of the epoch, not {schedule!r}")
        self.schedule = schedule
        self.lr: float | None = None

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        for worker_id, worker in enumerate(trainer.workers):
            if not hasattr(worker, "set_lr"):
                raise TypeError(
                    f"LRSchedule needs workers with a method set_lr(self, lr); worker {worker_id} "
                    f"({worker!r}) has none"
                )

    def on_epoch_start(self, trainer: Any, epoch: int, **kwargs: Any) -> None:
        value = records.finite(self.schedule(epoch))
        if value is None or value < 0:
            raise ValueError(f"schedule({epoch}) must give a number >= 0")
        self.lr = value
        trainer.call_workers("set_lr", value, epoch=epoch)

    def on_worker_replaced(self, trainer: Any, worker_id: int) -> None:
        if self.lr is not None:
            miniray.get(trainer.workers[worker_id].set_lr.remote(self.lr))


#: The name of this logger in version 0.1.
TensorBoard = TensorBoardLogger


class CallbackStates:
    """The states of callbacks, as a part of checkpoints.

    States are matched to callbacks by type and then by order, because a resumed run may have
    different callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> list[dict[str, Any]]:
        """Return types and states, in order."""
        return [{"type": _get_type(c), "state": c.get_state()} for c in self._callbacks]

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states."""
        left = list(saved)
        for callback in self._callbacks:
            kind = _get_type(callback)
            mine = next((i for i, entry in enumerate(left) if entry["type"] == kind), None)
            if mine is not None:
                callback.set_state(left.pop(mine)["state"])


def _get_type(callback: Callback) -> str:
    return type(callback).__qualname__


def check_callbacks(callbacks: Any) -> tuple[list[Callback], list[Logger]]:
    """Return callbacks as a list, and loggers among them, which are deprecated here.

    Raise ``TypeError`` for other objects and for classes.
    """
    given = [callbacks] if isinstance(callbacks, (Callback, Logger)) else list(callbacks)
    loggers = [callback for callback in given if isinstance(callback, Logger)]
    found = [callback for callback in given if not isinstance(callback, Logger)]
    for callback in found:
        if not isinstance(callback, Callback):
            hint = f"; write {callback.__name__}()" if isinstance(callback, type) else ""
            raise TypeError(f"callbacks must be Callback objects, not {callback!r}{hint}")
    for logger in loggers:
        name = type(logger).__name__
        warn(
            f"{name} in callbacks= is deprecated. Pass loggers=[{name}(...)] instead.",
            DeprecationWarning,
        )
    return found, loggers


def _warn_unless_seen(consequence: str, metric: str, history: list[dict[str, Any]]) -> None:
    if history and all(metric not in record for record in history):
        known = ", ".join(history[-1])
        warn(f"{consequence}: no epoch had {metric!r}, only {known}")
