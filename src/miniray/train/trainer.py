"""``BaseTrainer``: the epoch loop and the hooks.

Classes of trainers differ in the parts that they pass to it (``TrainerParts``), and in three
methods that they may override: ``_describe``, ``_create_group`` and ``_finish_epoch``.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import miniray
from miniray.checks import check_int, suggest_options
from miniray.core import session
from miniray.doctor.runfile import mask_secrets
from miniray.tracebacks import hides_frames
from miniray.train import pretrained
from miniray.train.callbacks import CallbackStates, check_callbacks
from miniray.train.options import WORKER_HINTS, RunOptions, check_resume
from miniray.train.parts import TrainerParts
from miniray.train.run.checkpointer import Checkpointer
from miniray.train.run.checkpoints.store import CheckpointStore
from miniray.train.run.directory import RunDirectory
from miniray.train.run.loggers.logger_list import LoggerList
from miniray.train.run.loggers.registry import create_loggers
from miniray.train.run.progress import Progress
from miniray.train.run.result import TrainResult
from miniray.train.run.session import RunSession
from miniray.train.run.state import TrainState, TrainTarget, check_length
from miniray.train.run.tensors.modelfile import save_model
from miniray.train.steps import StepActions
from miniray.train.train_kwargs import Hooks, check_names
from miniray.train.worker_factory import WorkerFactory
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.budget import FailureBudget
from miniray.train.workers.checkpoint_parts import WorkerCheckpoints
from miniray.train.workers.context import create_environment
from miniray.train.workers.evaluate import evaluate_on
from miniray.train.workers.group import NO_WORKERS, create_worker_actor

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from miniray.train.options import RunKwargs


@suggest_options(WORKER_HINTS, extends=RunOptions)
class BaseTrainer:
    """Run ``train_epoch`` on several workers for a number of epochs.

    Creating a trainer starts nothing. ``train`` starts the engine, if none is running, and the
    workers, and can be called again to train for longer. ``shutdown``, or the ``with`` statement,
    stops the workers.

    Args:
        num_workers: Number of workers.
        worker: A worker class, decorated with ``@miniray.remote`` or not. Without it, a subclass
            implements ``create_worker``.
        **options: The options of ``RunOptions``: ``name``, ``run_dir``, ``seed``, ``resume``,
            ``max_failures``, ``worker_timeout``, ``progress``, ``callbacks``, ``loggers``,
            ``resources_per_worker``, ``use_gpu``, ``backend``, ``eval_interval``, ``keep_last``,
            ``keep_best``, ``checkpoint_dir``, ``grace_seconds``.

    Attributes:
        workers: Handles of the workers, by worker id.
        epoch: Number of completed epochs.
        history: One record per epoch.
        callbacks: The callbacks, in the order in which they are called.
        loggers: Writes records to ``metrics.jsonl`` and to the loggers.
        checkpointer: Writes checkpoints. ``checkpointer.register(name, part)`` adds a part to them.
        run: The run directory; None before ``train``.
        should_stop: Set it in a hook to end the run after the current epoch.
        stop_reason: Why the run was stopped.
        result: The result of the last ``train``.
    """

    #: Methods that every worker must have, besides those that the trainer calls.
    required_methods: Sequence[str] = ()

    def __init__(
        self,
        num_workers: int = 4,
        *,
        worker: Any = None,
        _parts: TrainerParts | None = None,
        **options: Unpack[RunKwargs],
    ) -> None:
        self.num_workers = check_int("num_workers", num_workers, 1)
        self.options = RunOptions(**options)
        self._parts = parts = TrainerParts() if _parts is None else _parts
        self._factory = WorkerFactory(type(self), worker, self.options, parts.actors)
        self.callbacks, deprecated = check_callbacks(self.options.callbacks)
        self.loggers = LoggerList([*create_loggers(self.options.loggers), *deprecated])
        self.session = RunSession(self._factory.title, self.options)
        self.state = TrainState()
        self.checkpointer = Checkpointer(parts.kind, self.options, self.session.append_event)
        self.checkpointer.register("callbacks", CallbackStates(self.callbacks))
        self._checkpoints = parts.checkpoints or WorkerCheckpoints(self._get_group, parts.sync)
        self._checkpoints.register(self.checkpointer, self.session, self.state)
        self._hooks = Hooks(self, self.callbacks, parts.kwargs)
        self._steps = StepActions(
            parts.step_options,
            parts.find_step_problem,
            self.state,
            self.callbacks,
            self.num_workers,
            evaluate=self._evaluate_for_record,
            write=self.loggers.log_step,
            emit=self._hooks.emit,
        )
        self.should_stop, self.stop_reason = False, ""
        self.result: TrainResult | None = None
        self._group: Any = None  # a WorkerGroup or LockstepGroup
        self._resume = self.options.resume
        self._target = TrainTarget(epochs=0)  # of this train()

    @property
    def run(self) -> RunDirectory | None:
        """The run directory. None before ``train``."""
        return self.session.run

    @property
    def checkpoints(self) -> CheckpointStore | None:
        """The checkpoints of the run on disk. None before ``train``."""
        return self.checkpointer.store

    @property
    def workers(self) -> list[Any]:
        """The workers' handles, by worker id. They change when a worker is replaced."""
        return [] if self._group is None else self._group.handles

    @property
    def counts_only_steps(self) -> bool:
        """Whether each epoch is one step, as with ``PPOTrainer`` and ``GRPOTrainer``."""
        return self._parts.unit == "step"

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.state.epoch

    @property
    def history(self) -> list[dict[str, Any]]:
        """One record per epoch."""
        return self.state.history

    # -- methods that users override --------------------------------------------------------------

    def create_worker(self, worker_id: int, **kwargs: Any) -> Any:
        """Create one worker: ``return MyWorker.remote(worker_id)``. Subclasses must implement it.

        With ``worker=``, create an instance of that class with the ``kwargs`` that its ``__init__``
        accepts. The id is passed to the parameter named ``worker_id``, ``rank`` or ``id``, or else
        to the first parameter if that has no default.
        """
        if self._factory.cls is None:
            raise NotImplementedError(
                f"{type(self).__name__} must implement create_worker(self, worker_id, **kwargs), "
                "returning MyWorker.remote(worker_id); or pass worker=MyWorker"
            )
        return create_worker_actor(self._factory.get_class(), worker_id, kwargs)

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all workers, and return the aggregated results. May be overridden."""
        return aggregate(self.call_workers("train_epoch", epoch, epoch=epoch, **kwargs))

    def on_train_start(self, **kwargs: Any) -> None:
        """Called when the workers are ready, before the first epoch."""

    def on_train_end(self, history: TrainResult, **kwargs: Any) -> TrainResult:
        """Called after the last epoch with the result of the run, which ``train`` returns."""
        return history

    def on_epoch_start(self, epoch: int, **kwargs: Any) -> None:
        """Called before each epoch."""

    def on_epoch_end(self, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        """Called after each epoch with its result.

        Values that are added to it appear in the history, ``metrics.jsonl`` and checkpoints.
        """

    def on_step_end(self, step: int, metrics: dict[str, Any], **kwargs: Any) -> None:
        """Called at the logging interval with means over the last steps, while workers train.

        Only trainers that count steps call it, such as ``DDPTrainer``. ``PPOTrainer`` and
        ``GRPOTrainer`` call it after each step. ``step`` is the number of completed steps of the
        run. Don't call workers here. Set ``should_stop`` to end the run at
        one of the next steps.
        """

    def on_evaluate_end(self, step: int, scores: dict[str, Any], **kwargs: Any) -> None:
        """Called after an evaluation inside an epoch (``eval_every_steps``)."""

    # -- the run ----------------------------------------------------------------------------------

    @hides_frames  # run.json has the full traceback
    def train(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        resume: bool | str | Path | None = None,
        **kwargs: Any,
    ) -> TrainResult:
        """Train for ``epochs`` or ``steps`` and return the result of the run.

        Without ``resume``, the length is in addition to what was trained before. With ``resume``,
        it is the total of the run: a script that is run again after an interruption ends at the
        same epoch and step as one that was never interrupted. If the total is reached already,
        nothing is trained.

        Args:
            epochs: Number of epochs.
            steps: Number of optimizer steps, in place of ``epochs``. The trainer must know the
                steps of its workers; see ``DDPTrainer``.
            resume: ``True`` restores the newest intact checkpoint of this run, or of the most
                recent run of this trainer and worker class. ``"auto"`` does if the run has a
                checkpoint, and starts otherwise; it needs ``name=`` or ``run_dir=``. A path
                restores that checkpoint.
            **kwargs: Passed to ``create_worker``, to the workers' ``__init__``, ``setup``,
                ``load_data_shard``, ``train_epoch`` and ``evaluate``, and to the hooks of the
                trainer and of callbacks. Each gets the names that its signature accepts.

        Raises:
            TypeError: Not exactly one of ``epochs`` and ``steps`` is set, or nothing accepts a name
                in ``kwargs``. A ``**kwargs`` of ``create_worker`` or of a worker method accepts
                every name. A ``**kwargs`` of a hook does if it is used for more than calling
                ``super()``.
            CheckpointError: There is no intact checkpoint to resume from.
            RuntimeError: The workers were stopped by ``shutdown`` or an error, so their weights are
                gone, and ``resume`` isn't set.
        """
        if not hasattr(self, "state"):
            raise RuntimeError(
                f"{type(self).__name__}.__init__() must call super().__init__(num_workers, ...)"
            )
        unit = self._parts.unit
        epochs, steps = check_length(epochs, steps, unit)
        self._check_steps(TrainTarget(steps=steps))
        resume = self._resume if resume is None else check_resume(resume)
        self._resume = False
        is_total, is_auto = bool(resume), resume == "auto"
        if is_auto:
            resume = self.checkpointer.has_checkpoint(self.session.requested_path)
        is_gone = self._group is None and self._checkpoints.loaded is None
        if self.state.step and is_gone and not resume:
            raise RuntimeError(
                f"the weights of these {self.epoch} {unit}s are gone: shutdown() or an error "
                "stopped the workers. Call train(..., resume=True) to continue from the newest "
                "checkpoint, or create a new trainer"
            )
        self.should_stop, self.stop_reason = False, ""
        self.state.in_epoch = False
        self._hooks.kwargs = check_names(kwargs)
        self._check_kwargs()
        start, signals = time.monotonic(), self.session.signals
        with (
            self.session.pass_on_preemption(),
            contextlib.closing(self.loggers),
            self.session.record_attempt(
                self._stop, self.checkpointer.find_newest, self._request_stop, self.state
            ) as attempt,
        ):
            self.session.start_engine()
            if resume:
                self.load_checkpoint("latest" if resume is True else resume)
            else:
                self.checkpointer.check_unused()
            self._target = TrainTarget.create(epochs, steps, is_total, self.state)
            self._open_run(is_resumed=bool(resume), restart=is_auto)
            self._start_workers()
            if is_total and self._target.is_reached(self.state):
                path, length = self.session.directory.path, self._target.describe(unit)
                print(f"{path} has trained its {length}: nothing is left to train", file=sys.stderr)
                self.result = self._create_result(0.0)
                return self.result
            self._hooks.emit("on_train_start")
            with signals.finish_in_order():
                self._train_epochs()
                result = self.result = self._create_result(time.monotonic() - start)
                if signals.number is None:
                    self._hooks.emit("on_train_end", result)
                if signals.number is not None:  # it may have come in a hook
                    self._save_for_resume()
            result.checkpoint = self.checkpointer.find_newest()  # hooks may have written one
            attempt.fields = {"stop_reason": self.stop_reason or None, "sync": result.sync or None}
        return result

    def _train_epochs(self) -> None:
        """Train epochs until the target is reached or the run is stopped."""
        state, target = self.state, self._target
        unit = self._parts.unit
        with Progress.create(state, target, unit, self.options.progress) as progress:
            while not target.is_reached(state):
                epoch = self.epoch  # a hook may load a checkpoint
                self._run_epoch(epoch, progress)
                if self.should_stop:
                    event = {"event": "stopped", "epoch": epoch, "reason": self.stop_reason}
                    self.session.append_event(event)
                    why = f": {self.stop_reason}" if self.stop_reason else ""
                    progress.note(f"stopped after {self._describe_position()}{why}")
                    break

    def _describe_position(self) -> str:
        return self.state.describe_position(self._parts.unit, self._target.epochs)

    def _run_epoch(self, epoch: int, progress: Progress) -> None:
        """Train an epoch, or the part of it up to the target, and record the result."""
        state, start, step = self.state, time.monotonic(), self.state.step
        if not state.step_in_epoch:
            self._hooks.emit("on_epoch_start", epoch)
        state.in_epoch = True
        result: Any = self.train_epoch(epoch, **self._hooks.filter_kwargs(self.train_epoch))
        state.in_epoch = False
        if not isinstance(result, dict):
            raise TypeError(
                f"{type(self).__name__}.train_epoch() must return a dict of results, not {result!r}"
            )
        is_complete = not state.step_in_epoch
        if is_complete:
            self._finish_epoch(epoch, result)
        progress.update(epoch, result, 1 if self._target.steps is None else state.step - step)
        record = {"epoch": epoch, "seconds": time.monotonic() - start, **result}
        if not is_complete:
            state.stop_inside_epoch(record)
            self.loggers.log_epoch(state)
            return
        state.end_epoch(epoch, record)
        try:
            if self.counts_only_steps:
                self._hooks.emit("on_step_end", state.step, record)
            self._hooks.emit("on_epoch_end", epoch, record)
        except BaseException:
            with self.session.printing_errors("its last epoch is not in"):
                self.loggers.log_epoch(state)  # it was trained
            raise
        self.loggers.log_epoch(state)

    def _finish_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        """Do what follows the training of an epoch, and add to ``result``."""
        interval = self.options.eval_interval
        is_due = interval and (epoch + 1) % interval == 0
        scores = self._evaluate_for_record() if is_due else {}
        result.update({**scores, **self._steps.evaluate_if_due(scores)})

    def _evaluate_for_record(self) -> dict[str, Any]:
        """Evaluate, and return the scores with names for a record."""
        # Without data=, which train() received to train on.
        scores = self.evaluate(**{k: v for k, v in self._hooks.kwargs.items() if k != "data"})
        # In Lightning, names start with val_ already.
        return {f"val_{k.removeprefix('val_')}": v for k, v in scores.items()}

    def _create_result(self, wall_time: float) -> TrainResult:
        path, newest = self.session.directory.path, self.checkpointer.find_newest()
        return self._parts.create_result(self.state, wall_time, path, newest)

    def _request_stop(self, reason: str) -> None:
        """End the run after the current step or epoch."""
        self.should_stop, self.stop_reason = True, reason
        if self._group is not None:
            self._group.request_stop()

    def _save_for_resume(self) -> None:
        """Write a checkpoint of the current position, unless it exists."""
        self.checkpointer.wait()
        if self.state.step and not self.checkpointer.is_saved(self.state):
            with self.session.printing_errors("its last step is not in a checkpoint of"):
                self.save_checkpoint()

    # -- the start --------------------------------------------------------------------------------

    def _check_steps(self, target: TrainTarget) -> None:
        """Raise ``TypeError`` for an option that needs to count steps, if workers count none."""
        self._steps.check(target, type(self).__name__, self._factory.user_class, self._group)

    def _check_kwargs(self) -> None:
        """Raise ``TypeError`` for keyword arguments of ``train()`` that would have no effect."""
        self._hooks.check_kwargs(lambda names: self._factory.get_methods(names, self.workers))

    def _open_run(self, *, is_resumed: bool, restart: bool) -> None:
        """Open the run directory and the loggers."""
        run = self.session.open(restart=restart)
        self.checkpointer.open(run.checkpoints)
        self.session.write_description(self._describe())
        self.loggers.open(run, self._hooks.kwargs)
        if is_resumed and self.options.progress:
            print(f"resuming {run.path} after {self._describe_position()}", file=sys.stderr)

    def _describe(self) -> dict[str, Any]:
        """Return the configuration of the run for ``run.json``."""
        kwargs = mask_secrets(self._hooks.kwargs)  # before names inside values become text
        return {
            "trainer": type(self).__name__,
            "backend": session.engine().name,
            "num_workers": self.num_workers,
            "seed": self.options.seed,
            **self._target.to_dict(),
            **self._parts.sync.describe(),
            "kwargs": {key: repr(value) for key, value in kwargs.items()},
        }

    def _start_workers(self) -> None:
        """Start the workers, unless they are running, and restore what was loaded."""
        if self._group is None:
            self._factory.choose_gpus(self.num_workers)
            self._group = self._create_group()
            self._group.start()
            self._check_kwargs()
            self._group.set_up_all()
        self._checkpoints.restore_loaded()
        self._check_steps(self._target)
        if not self.state.step and not self._target.is_reached(self.state):
            self._parts.check_validation(self._group)

    def _create_group(self) -> Any:
        """Return the group that creates the workers, calls them and replaces lost ones."""
        return self._parts.group_class(
            count=self.num_workers,
            create=self._create,
            setups=[*self._parts.setups, self._hooks],
            required=self._find_required(),
            budget=FailureBudget(self.options.max_failures),
            timeout=self.options.worker_timeout,
            on_event=self.session.append_event,
            unit=self._parts.unit,
            get_epochs=lambda: self._target.epochs,
            get_kwargs=lambda: self._hooks.kwargs,
        )

    def _find_required(self) -> list[str]:
        """Return the methods that workers must have."""
        required = list(self.required_methods)
        if type(self).train_epoch is BaseTrainer.train_epoch:
            required.append("train_epoch")
        if self.options.eval_interval and type(self).evaluate is BaseTrainer.evaluate:
            required.append("evaluate")
        return required

    def _create(self, worker_id: int) -> Any:
        count = self._get_group().count
        return self._factory.create(
            lambda: self.create_worker(worker_id, **self._hooks.filter_kwargs(self.create_worker)),
            worker_id,
            count,
            self.session.directory.path,
            create_environment(worker_id, count, self.state.step, self._target),
        )

    # -- workers ----------------------------------------------------------------------------------

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all workers at the same time, and return the results by worker id.

        Each worker gets the ``kwargs`` that its method accepts. A worker that crashes or hangs is
        replaced within ``max_failures``. Exceptions are raised with worker id and epoch.
        """
        results: list[Any] = self._get_group().call(method, lambda _: args, kwargs, epoch)
        return results

    def _get_group(self) -> Any:
        """Return the ``WorkerGroup`` or ``LockstepGroup``. Raise ``RuntimeError`` without one."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return self._group

    # -- the model and its evaluation -------------------------------------------------------------

    def model_weights(self) -> Any:
        """Return the trained weights: those of worker 0."""
        if not self.workers:
            raise RuntimeError(NO_WORKERS)
        # A replacement wouldn't have trained, so a lost worker isn't replaced.
        return miniray.get(self.workers[0].get_weights.remote())

    def save_final_model(self, path: str | Path | None = None) -> Path:
        """Write the weights as one safetensors file (default: ``final_model.safetensors``)."""
        if self.run is None or not self.workers:
            raise RuntimeError(NO_WORKERS)
        target = Path(path) if path is not None else self.run.path / "final_model.safetensors"
        return save_model(target, self.model_weights())

    def save_pretrained(self, path: str | Path) -> Path:
        """Save the trained Hugging Face model to the directory ``path``, and return the path.

        Saves the configuration, the full weights as safetensors, and the worker's ``tokenizer`` and
        ``processor`` if it has them. A PEFT model saves its adapter. Load the model with
        ``AutoModelForCausalLM.from_pretrained(path)`` or a different ``Auto`` class.

        Raises:
            TypeError: The model isn't a ``PreTrainedModel`` or a PEFT model. Use
                ``save_final_model``.
            FileExistsError: ``path`` exists and isn't a saved model.
            CheckpointError: The files can't be written. ``path`` is unchanged.
        """
        group = self._get_group()
        with self._parts.sync.final_weights():
            return pretrained.save_pretrained(path, partial(pretrained.write_in_worker, group))

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once."""
        group = self._get_group()
        with self._parts.sync.final_weights():
            return evaluate_on(group, data, kwargs)

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, epoch: int | None = None, *, background: bool = False) -> Path | None:
        """Write a checkpoint of the last completed epoch or step, and return its path.

        The path is None if none is written: with ``on_divergence="warn"``, if ranks have different
        weights.

        Args:
            epoch: Inside ``train_epoch``, says that the running epoch counts as completed.
            background: Write it while training continues. An earlier one that is being written is
                waited for. If writing fails, warn instead of raising an error.

        Raises:
            WeightsDivergedError: Ranks that should have the same weights have different ones.
        """
        return self._checkpoints.save(is_complete=epoch is not None, background=background)

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Restore a checkpoint, now or when ``train`` starts the workers, and return its epoch.

        The run continues in the directory of the checkpoint's run. If ``name`` or ``run_dir`` names
        a different one, or the checkpoint isn't in a run directory, a new run starts from it.
        """
        self._checkpoints.load(path, self.loggers)
        if self._group is not None:
            self._checkpoints.restore_loaded()
        return self.epoch - 1

    # -- the end ----------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop the workers after an error or a signal."""
        if self._group is not None and self.session.signals.is_overdue:
            with self.session.printing_errors("the newest snapshot is not in a checkpoint of"):
                self._checkpoints.save_newest()
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the workers, and the engine if a trainer started it. Safe to call twice."""
        group, self._group = self._group, None
        self.checkpointer.close()
        if not self.session.close() and group is not None:
            group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()
