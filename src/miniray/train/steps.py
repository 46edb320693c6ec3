"""Log, evaluate and save checkpoints inside an epoch, for trainers that count steps.

Workers train until the next step at which the driver acts (``StepActions.find_pause``), or to the
end of the epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from miniray.checks import check_int
from miniray.train.callbacks import Callback, Checkpoint
from miniray.train.run.step_log import LogMerger, LogWindow

if TYPE_CHECKING:
    from miniray.train.run.state import TrainState, TrainTarget


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of trainers that count steps. ``DDPTrainer`` documents them."""

    log_every: int = 10
    eval_every_steps: int | None = None
    sync_every_steps: int | None = None
    sanity_batches: int = 2
    limit_train_batches: int | None = None
    limit_val_batches: int | None = None
    overfit_batches: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "log_every", check_int("log_every", self.log_every, 1))
        sanity = check_int("sanity_batches", self.sanity_batches, 0)
        object.__setattr__(self, "sanity_batches", sanity)
        for name in ("eval_every_steps", "sync_every_steps", *_LIMITS):
            object.__setattr__(self, name, check_optional_int(name, getattr(self, name)))
        if self.overfit_batches is not None and self.limit_train_batches is not None:
            raise ValueError("pass either overfit_batches or limit_train_batches, not both")

    @property
    def train_limit(self) -> int | None:
        """Batches of an epoch per rank; None for all."""
        return self.overfit_batches or self.limit_train_batches

    @property
    def sanity_limit(self) -> int:
        """Validation batches per rank before the first step."""
        return min(self.sanity_batches, self.limit_val_batches or self.sanity_batches)

    @property
    def overfits(self) -> bool:
        """Whether every epoch has the same batches."""
        return self.overfit_batches is not None

    def create_limits_error(self, worker: str) -> TypeError:
        """Return the error for a worker class that chooses its batches itself."""
        names = ", ".join(self.describe_limits())
        return TypeError(
            f"{names} of DataParallelTrainer needs workers derived from TorchWorker that train "
            f"with training_step(batch, batch_idx): {worker} chooses its batches itself, in "
            "train_epoch or train_steps"
        )

    def describe_limits(self) -> dict[str, int]:
        """Return the limits that are set, for ``run.json``."""
        limits = {name: getattr(self, name) for name in _LIMITS}
        return {name: value for name, value in limits.items() if value is not None}


#: Returns what a trainer needs to count steps, for errors; None if it counts them. The arguments
#: are the worker class, if it is known, and the workers' group, once it has started.
FindStepProblem = Callable[[Any, Any], str | None]

_LIMITS = ("limit_train_batches", "limit_val_batches", "overfit_batches")


def check_optional_int(name: str, value: Any) -> int | None:
    """Return ``value`` if it is None or an integer > 0."""
    return None if value is None else check_int(name, value, 1, " or None")


class StepActions:
    """Acts after steps inside an epoch, in the driver.

    Args:
        options: The options of the trainer.
        find_problem: Returns why the trainer can't count steps.
        state: The position of the run.
        callbacks: The callbacks of the trainer, some of which may be a ``Checkpoint``.
        num_workers: Number of workers whose log windows are merged.
        evaluate: Evaluates, and returns the scores for a record.
        write: Writes a record of steps.
        emit: Calls a hook of the trainer and of its callbacks with arguments.
    """

    def __init__(
        self,
        options: StepOptions,
        find_problem: FindStepProblem,
        state: TrainState,
        callbacks: Sequence[Callback],
        num_workers: int,
        *,
        evaluate: Callable[[], Mapping[str, Any]],
        write: Callable[[dict[str, Any]], None],
        emit: Callable[..., None],
    ) -> None:
        self.options, self.logs = options, LogMerger(num_workers)
        self._find_problem, self.state, self._callbacks = find_problem, state, callbacks
        self._evaluate, self._write, self._emit = evaluate, write, emit

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The callbacks that save checkpoints."""
        return [callback for callback in self._callbacks if isinstance(callback, Checkpoint)]

    def list_requested(self, target: TrainTarget) -> list[str]:
        """Return the options in use that need to know the number of steps of an epoch.

        ``log_every`` with its default value can't be told from one that wasn't passed.
        """
        log_every = self.options.log_every
        requested = {
            "train(steps=...)": target.steps,
            "log_every": log_every if log_every != StepOptions.log_every else None,
            "eval_every_steps": self.options.eval_every_steps,
            "Checkpoint(every_steps=...)": any(c.every_steps for c in self.checkpoints) or None,
            "sync_every_steps": self.options.sync_every_steps,
        }
        return [name for name, value in requested.items() if value is not None]

    def check(self, target: TrainTarget, trainer: str, worker_class: Any, group: Any) -> None:
        """Raise ``TypeError`` for an option that needs to count steps, if workers count none."""
        requested = self.list_requested(target)
        problem = self._find_problem(worker_class, group) if requested else None
        if problem is not None:
            raise TypeError(f"{requested[0]} of {trainer} needs {problem}")

    def find_pause(
        self, target: TrainTarget, steps_per_epoch: int | None, every: Iterable[int | None] = ()
    ) -> int | None:
        """Return the next step at which the driver acts; None if that is the end of the epoch.

        Args:
            target: Where the run ends.
            steps_per_epoch: Steps of the current epoch, if known.
            every: Further intervals at which the driver acts.
        """
        step = self.state.step
        options = self.options
        intervals = [options.eval_every_steps, options.sync_every_steps]
        intervals += [callback.every_steps for callback in self.checkpoints]
        pauses = [step - step % n + n for n in (*intervals, *every) if n]
        if target.steps is not None:
            pauses.append(target.steps)
        if not pauses:
            return None
        pause = min(pauses)
        if steps_per_epoch is None:
            return pause
        return pause if pause < step - self.state.step_in_epoch + steps_per_epoch else None

    def is_sync_due(self) -> bool:
        """Return whether ``sync_every_steps`` asks for a sync at this step."""
        every = self.options.sync_every_steps
        return every is not None and self.state.step % every == 0

    def act(self, trainer: Any, result: Mapping[str, Any]) -> None:
        """Evaluate and write a checkpoint if they are due after a step inside an epoch.

        Args:
            trainer: The trainer, for callbacks.
            result: The metrics of the epoch up to this step.
        """
        self.state.part_metrics = {**result, **self.evaluate_if_due({})}
        for callback in self.checkpoints:
            callback.save_if_due(trainer)

    def evaluate_if_due(self, scores: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return and log the scores of ``eval_every_steps``; {} if none are due at this step.

        ``scores`` of an evaluation at the same step are used if there are any.
        """
        step, every = self.state.step, self.options.eval_every_steps
        if not every or step % every:
            return {}
        scores = dict(scores) or self._evaluate()
        self._write({"step": step, "epoch": self.state.epoch, **scores})
        self._emit("on_evaluate_end", step, scores)
        return scores

    def log(self, windows: Iterable[LogWindow] = (), *, at_once: bool = False) -> None:
        """Log what workers have reported, at most once per second unless ``at_once``."""
        self.logs.add(windows)
        for record in self.logs.take_records(at_once=at_once):
            self._write(record)
            self._emit("on_step_end", record["step"], record)

    def is_checkpoint_due(self) -> bool:
        """Return whether a checkpoint is due by the clock."""
        return any(callback.is_time_due() for callback in self.checkpoints)
