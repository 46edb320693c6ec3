"""``BaseTrainer``: the epoch loop and the hooks.

A trainer has parts: ``session`` (engine and run directory), ``state`` (position of the run),
``checkpointer``, ``callbacks``, a group of workers, and the ``setups`` that prepare each worker.
Subclasses add parts, such as parameter sync.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import miniray
from miniray.checks import check_int, suggest_options
from miniray.core import session, startup
from miniray.core.remote import ActorClass
from miniray.tracebacks import hide_frames, hides_frames
from miniray.train import gpus, pretrained
from miniray.train.callbacks import CallbackSetup, CallbackStates, Checkpoint, check_callbacks
from miniray.train.options import (
    IN_WORKER_HINTS,
    WORKER_HINTS,
    RunOptions,
    check_names,
    check_train_kwargs,
    get_worker_class,
    warn,
)
from miniray.train.run.checkpoint_store import CheckpointStore
from miniray.train.run.checkpointer import Checkpointer
from miniray.train.run.directory import RunDirectory
from miniray.train.run.loggers.logger_list import LoggerList
from miniray.train.run.loggers.registry import create_loggers
from miniray.train.run.modelfile import save_model
from miniray.train.run.progress import Progress
from miniray.train.run.result import TrainResult
from miniray.train.run.session import RunSession
from miniray.train.run.state import TrainState, TrainTarget
from miniray.train.run.storage import FsspecStorage
from miniray.train.torch_worker import TorchWorker
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.budget import FailureBudget
from miniray.train.workers.checkpoint_parts import (
    WorkerStates,
    WorkerWeights,
    describe_other_size,
)
from miniray.train.workers.evaluate import evaluate_on
from miniray.train.workers.group import (
    NO_WORKERS,
    WorkerGroup,
    WorkerSetup,
    create_worker_actor,
    filter_kwargs,
    get_method_spec,
)
from miniray.train.workers.process import environment

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from miniray.train.options import RunKwargs


@suggest_options(WORKER_HINTS, extends=RunOptions)
class BaseTrainer:
    """Run ``train_epoch`` on several workers, epoch after epoch.

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
    #: Modules that workers import. The local engine imports them once for all workers.
    _preloaded: Sequence[str] = ()
    #: Worker methods that receive the keyword arguments of ``train()``.
    _kwargs_methods: Sequence[str] = (
        *("__init__", "setup", "load_data_shard", "train_epoch", "evaluate"),
    )
    #: Keyword arguments of ``train()`` that the trainer uses itself.
    _own_kwargs: Sequence[str] = ()
    #: Hints for names that aren't options of the trainer, or parameters of ``train()``.
    _option_hints: Mapping[str, str] = WORKER_HINTS
    _train_hints: Mapping[str, str] = IN_WORKER_HINTS
    #: Called in a worker's process before the worker is created; see ``startup.SET_UP``.
    _process_set_up = "miniray.doctor.actors:set_up"
    #: Whether its own workers train with torch, of whatever class they are.
    _uses_torch = False
    #: Class that wraps the workers; see ``ActorClass.wrap_with``.
    _wrapper: type | None = None
    #: Unit of the progress bar.
    _unit = "epoch"
    #: Whether ``train(steps=...)`` works: ``state.step`` is known inside an epoch.
    _counts_steps = False
    #: Trainers of one kind can load each other's checkpoints.
    _kind = "workers"

    def __init__(
        self, num_workers: int = 4, *, worker: Any = None, **options: Unpack[RunKwargs]
    ) -> None:
        self.num_workers = check_int("num_workers", num_workers, 1)
        self.options = RunOptions(**options)
        self._worker_class = get_worker_class(worker, self.options.resources_per_worker)
        gpus.check_use_gpu(self.options.use_gpu, self._creates_workers)
        self._num_gpus: float | None = None  # of each worker; known after the engine has started
        self.callbacks, deprecated = check_callbacks(self.options.callbacks)
        self.loggers = LoggerList([*create_loggers(self.options.loggers), *deprecated])
        self.session = RunSession(
            self._title,
            name=self.options.name,
            run_dir=None if self.options.run_dir is None else Path(self.options.run_dir),
            backend=self.options.backend,
            grace_seconds=self.options.grace_seconds,
            verbose=self.options.progress,
        )
        self.state = TrainState()
        where = self.options.checkpoint_dir
        self.checkpointer = Checkpointer(
            self._kind,
            keep_last=self.options.keep_last,
            keep_best=self.options.keep_best,
            on_event=self.session.append_event,
            storage=None if where is None else FsspecStorage(where),
        )
        self.checkpointer.register("callbacks", CallbackStates(self.callbacks))
        weights = WorkerWeights(self._get_group, self._get_shared_weights)
        self.checkpointer.register("weights", weights, in_workers=True)
        self.checkpointer.register("workers", WorkerStates(self._get_group), in_workers=True)
        self.should_stop, self.stop_reason = False, ""
        self.result: TrainResult | None = None
        #: Prepare each worker, in this order.
        self._setups: list[WorkerSetup] = []
        self._group: WorkerGroup | None = None
        self._resume = self.options.resume
        self._loaded: dict[str, Any] | None = None  # a checkpoint to restore when workers exist
        self._kwargs: dict[str, Any] = {}
        self._target = TrainTarget(epochs=0)  # of this train()

    @property
    def _title(self) -> str:
        """Start of the name of run directories, by which ``resume=True`` finds the newest run."""
        cls = None if self._worker_class is None else self._worker_class._spec.cls
        if cls is None or cls.__module__.partition(".")[0] == "miniray":
            return type(self).__name__
        # The next run of this trainer class may train a different model.
        return f"{type(self).__name__}-{cls.__name__}"

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
        return self._group.handles if self._group is not None else []

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
        if self._worker_class is None:
            raise NotImplementedError(
                f"{type(self).__name__} must implement create_worker(self, worker_id, **kwargs), "
                "returning MyWorker.remote(worker_id); or pass worker=MyWorker"
            )
        return create_worker_actor(self._get_actor_class(), worker_id, kwargs)

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

        Only trainers that count steps call it, such as ``DDPTrainer``. ``step`` is the number of
        completed steps of the run. Don't call workers here. Set ``should_stop`` to end the run at
        one of the next steps.
        """

    def on_evaluate_end(self, step: int, scores: dict[str, Any], **kwargs: Any) -> None:
        """Called after an evaluation inside of an epoch (``eval_every_steps``)."""

    # -- the run ----------------------------------------------------------------------------------

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
        epochs, steps = self._check_length(epochs, steps)
        self._check_step_options()
        check_names(kwargs)
        resume = self._resume if resume is None else resume
        self._resume = False
        is_total, is_auto = bool(resume), resume == "auto"
        if is_auto:
            resume = self._has_checkpoint()
        if self.state.step and self._group is None and self._loaded is None and not resume:
            raise RuntimeError(
                f"the weights of these {self.epoch} {self._unit}s are gone: shutdown() or an error "
                "stopped the workers. Call train(..., resume=True) to continue from the newest "
                "checkpoint, or create a new trainer"
            )
        self.should_stop, self.stop_reason = False, ""
        self.state.in_epoch = False
        self._kwargs = kwargs
        self._check_kwargs()
        start = time.monotonic()
        try:
            with self.session.record_attempt(
                self._abort, self.checkpointer.find_newest, self._stop_for_signal, self._get_step
            ) as attempt:
                self._start(resume, partial(TrainTarget.create, epochs, steps, is_total), is_auto)
                self._check_target()
                if is_total and self._target.is_reached(self.state):
                    self._print_complete()
                    self.result = self._make_result(0.0)
                    return self.result
                self._emit("on_train_start")
                with self.session.signals.finish_in_order():
                    self._loop()
                    result = self.result = self._make_result(time.monotonic() - start)
                    if self.session.signals.number is None:
                        self._emit("on_train_end", result)
                    if self.session.signals.number is not None:
                        self._save_for_resume()
                result.checkpoint = self.checkpointer.find_newest()  # hooks may have written one
                attempt.fields = {"stop_reason": self.stop_reason or None}
                attempt.fields["sync"] = result.sync or None
        except BaseException as error:
            hide_frames(error)  # run.json has the full traceback
            raise
        finally:
            self.loggers.close()
            self.session.end_process_if_preempted()
        return result

    def _stop_for_signal(self, name: str) -> None:
        self.should_stop, self.stop_reason = True, name

    def _get_step(self) -> int:
        return self.state.step

    def _save_for_resume(self) -> None:
        """Write a checkpoint of the current position, unless it exists."""
        if self.state.step and not self.checkpointer.is_saved(self.state):
            with self.session.printing_errors("its last step is not in a checkpoint of"):
                self.save_checkpoint()

    def _check_length(self, epochs: int | None, steps: int | None) -> tuple[int | None, int | None]:
        """Return the length of a run. Raise ``TypeError`` unless exactly one number is set."""
        if (epochs is None) == (steps is None):
            given = "neither" if epochs is None else "both"
            raise TypeError(f"train() needs epochs= or steps=, and got {given}")
        if steps is not None and not self._counts_steps:
            raise TypeError(
                f"train(steps=...) of {type(self).__name__} needs workers that train step by step: "
                f"with train_epoch, the steps are the workers' own. Pass epochs=, or use DDPTrainer"
            )
        return (
            None if epochs is None else check_int(f"{self._unit}s", epochs, 0),
            None if steps is None else check_int("steps", steps, 0),
        )

    def _check_step_options(self) -> None:
        """Raise ``TypeError`` for options that need to know the steps of workers."""
        has_steps = self._counts_steps or self._unit == "step"
        if not has_steps and self._find_checkpoint_steps() is not None:
            raise TypeError(
                f"Checkpoint(every_steps=...) with {type(self).__name__} needs workers that train "
                "step by step: with train_epoch, the steps are the workers' own. Use every= "
                "(epochs), or DDPTrainer and workers with training_step"
            )

    def _find_checkpoint_steps(self) -> int | None:
        """Return ``every_steps`` of the first ``Checkpoint`` that has it, or None."""
        found = (c.every_steps for c in self.callbacks if isinstance(c, Checkpoint))
        return next(filter(None, found), None)

    def _check_target(self) -> None:
        """Raise ``TypeError`` if the workers can't stop where the run should end or pause."""

    def _has_checkpoint(self) -> bool:
        """Return whether ``resume="auto"`` finds a checkpoint."""
        if self.checkpointer.has_copies():
            return True
        path = self.session.requested_path
        if path is None and self.options.checkpoint_dir is not None:
            return False
        if path is None:
            raise ValueError('resume="auto" needs name= or run_dir=, to find the run again')
        return any((path / "checkpoints").glob("epoch-*"))

    def _print_complete(self) -> None:
        target, done = self._target, self.session.directory.path
        steps, epochs = f"{target.steps} steps", f"{target.epochs} {self._unit}s"
        length = steps if target.epochs is None else epochs
        print(f"{done} has trained its {length}: nothing is left to train", file=sys.stderr)

    def _loop(self) -> None:
        target, state = self._target, self.state
        with Progress.create(state, target, self._unit, self.options.progress) as progress:
            while not target.is_reached(state):
                epoch, start = self.epoch, time.monotonic()  # a hook may load a checkpoint
                step = state.step
                if not state.step_in_epoch:
                    self._emit("on_epoch_start", epoch)
                result = self._train_epoch(epoch)
                is_complete = not state.step_in_epoch
                if is_complete:
                    self._finish_epoch(epoch, result)
                progress.update(epoch, result, 1 if target.steps is None else state.step - step)
                record = {"epoch": epoch, "seconds": time.monotonic() - start, **result}
                if is_complete:
                    self._end_epoch(epoch, record)
                else:
                    state.stop_inside_epoch(record)
                    self._write_record()
                if self.should_stop:
                    self.session.append_event(
                        {"event": "stopped", "epoch": epoch, "reason": self.stop_reason}
                    )
                    why = f": {self.stop_reason}" if self.stop_reason else ""
                    where = f"{self._unit} {epoch}" if is_complete else f"step {state.step}"
                    progress.note(f"stopped after {where}{why}")
                    break

    def _end_epoch(self, epoch: int, record: dict[str, Any]) -> None:
        """Add the record to the history, let hooks change it, and write it to the metrics.

        It is written even if a hook raises, because the epoch was trained.
        """
        self.state.end_epoch(epoch, record)
        try:
            self._emit("on_epoch_end", epoch, record)
        except BaseException:
            with self.session.printing_errors("its last epoch is not in"):
                self._write_record()
            raise
        self._write_record()

    def _write_record(self) -> None:
        """Write the record that hooks could change, unless it was written."""
        record = self.state.close_record()
        if record is None:
            return
        if self.state.replaces_part:  # which was written
            self.session.directory.truncate_metrics(record["epoch"] - 1)
        self.loggers.log(record)

    def _write_step(self, record: dict[str, Any]) -> None:
        """Write a record of steps to ``steps.jsonl`` and to the loggers."""
        self.loggers.log_step(record)

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self.state.in_epoch = True
        result: Any = self.train_epoch(epoch, **self._taken(self.train_epoch))
        self.state.in_epoch = False
        if not isinstance(result, dict):
            raise TypeError(
                f"{type(self).__name__}.train_epoch() must return a dict of results, not {result!r}"
            )
        return result

    def _finish_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        """Do what follows the training of an epoch, and add to ``result``."""
        interval = self.options.eval_interval
        if interval and (epoch + 1) % interval == 0:
            result.update(self._evaluate_for_record())

    def _evaluate_for_record(self) -> dict[str, Any]:
        """Evaluate, and return the scores with names for a record."""
        # Without data=, which train() received to train on.
        scores = self.evaluate(**{k: v for k, v in self._kwargs.items() if k != "data"})
        # In Lightning, names start with val_ already.
        return {f"val_{k.removeprefix('val_')}": v for k, v in scores.items()}

    def _emit(self, hook: str, *arguments: Any) -> None:
        """Call the trainer's hook and then those of the callbacks."""
        own = getattr(self, hook)
        own(*arguments, **self._taken(own))
        for callback in self.callbacks:
            theirs = getattr(callback, hook)
            theirs(self, *arguments, **self._taken(theirs))

    def _taken(self, function: Any) -> dict[str, Any]:
        """Return the keyword arguments of ``train()`` that ``function`` accepts."""
        return filter_kwargs(inspect.signature(function), self._kwargs)

    def _make_result(
        self, wall_time: float, kind: type[TrainResult] = TrainResult, **more: Any
    ) -> TrainResult:
        return kind(
            history=self.history,
            epochs=self.epoch,
            unit=self._unit,
            wall_time=wall_time,
            run_dir=self.session.directory.path,
            checkpoint=self.checkpointer.find_newest(),
            **more,
        )

    # -- workers ----------------------------------------------------------------------------------

    def _check_kwargs(self) -> None:
        """Raise ``TypeError`` for keyword arguments of ``train()`` that would have no effect.

        Without a worker class, the methods of the workers are known once these are created.
        """
        methods: list[Any]
        names = self._kwargs_methods
        if not names:
            methods = []
        elif self._worker_class is not None:
            cls = self._worker_class._spec.cls
            methods = [getattr(cls, name) for name in names if hasattr(cls, name)]
        elif self._group is not None:
            worker = self._group.handles[0]
            specs = [get_method_spec(worker, n) for n in names if n not in worker._info.unlisted]
            methods = [spec.signature for spec in specs if spec is not None]
        else:
            return
        options = ("epochs", "steps", "resume", *self._own_kwargs)
        names = [name for name in self._kwargs if name not in self._own_kwargs]
        check_train_kwargs(self, names, methods, options, self._train_hints)

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all workers at the same time, and return the results by worker id.

        Each worker gets the ``kwargs`` that its method accepts. A worker that crashes or hangs is
        replaced within ``max_failures``. Exceptions are raised with worker id and epoch.
        """
        results: list[Any] = self._get_group().call(method, lambda _: args, kwargs, epoch)
        return results

    def _start(
        self,
        resume: bool | str | Path,
        create_target: Callable[[TrainState], TrainTarget],
        restart: bool = False,
    ) -> None:
        """Start the engine, the run directory and the workers, unless they are running.

        Args:
            resume: See ``train``.
            create_target: Returns where the run ends, seen from its start.
            restart: Continue in the directory of a run that left no checkpoint.
        """
        self._start_engine()
        if resume:
            self.load_checkpoint("latest" if resume is True else resume)
        else:
            self.checkpointer.check_unused()
        self._target = create_target(self.state)
        run = self.session.open(restart=restart)
        self.checkpointer.open(run.checkpoints)
        self.session.write_description(self._describe())
        self.loggers.open(run, self._kwargs)
        if resume and self.options.progress:
            print(f"resuming {run.path} after {self._unit} {self.epoch}", file=sys.stderr)
        if self._group is None:
            self._num_gpus = self._choose_num_gpus()
            required = list(self.required_methods)
            if type(self).train_epoch is BaseTrainer.train_epoch:
                required.append("train_epoch")
            if self.options.eval_interval and type(self).evaluate is BaseTrainer.evaluate:
                required.append("evaluate")
            self._group = self._make_group(
                count=self.num_workers,
                create=self._create,
                setups=[*self._setups, CallbackSetup(self, self.callbacks)],
                required=required,
                budget=FailureBudget(self.options.max_failures),
                timeout=self.options.worker_timeout,
                on_event=self.session.append_event,
                unit=self._unit,
                get_kwargs=lambda: self._kwargs,
            )
            self._group.start()
            self._check_kwargs()
            self._set_up_all()
        if self._loaded is not None:
            self._restore(self._loaded)
            self._loaded = None

    def _start_engine(self) -> None:
        self.session.start_engine()

    def _make_group(self, **options: Any) -> WorkerGroup:
        return WorkerGroup(**options)

    @property
    def _creates_workers(self) -> bool:
        """Whether ``create_worker`` is miniray's own and has a worker class."""
        is_ours = str(type(self).create_worker.__module__).partition(".")[0] == "miniray"
        return is_ours and self._worker_class is not None

    def _choose_num_gpus(self) -> float | None:
        """Return the number of GPUs that each worker reserves."""
        cls = self._worker_class
        if cls is None or not self._creates_workers:
            return None
        is_torch = self._uses_torch or issubclass(cls._spec.cls, TorchWorker)
        return gpus.choose_num_gpus(
            type(self).__name__,
            self.num_workers,
            self.options.use_gpu,
            cls._options.num_gpus,
            is_torch,
        )

    def _get_actor_class(self) -> ActorClass[Any]:
        """Return the class of ``worker=`` with the GPUs that each worker reserves."""
        assert self._worker_class is not None
        return self._worker_class.options(**gpus.get_options(self._num_gpus))

    def _create(self, worker_id: int) -> Any:
        seed = self.options.seed
        env = self._get_worker_env()
        if seed is not None:
            env[startup.RUN_SEED] = str(seed)
        if session.engine().capabilities.processes:  # else all workers are in this process
            path, modules = self.session.directory.path, self._preloaded
            env |= environment(path, worker_id, self.num_workers, modules, self._process_set_up)
            env |= gpus.get_environment(self._num_gpus, self.options.use_gpu)
        own_seed = None if seed is None else seed + worker_id
        with startup.actors_with(own_seed, env, self._wrapper):
            return self.create_worker(worker_id, **self._taken(self.create_worker))

    def _get_worker_env(self) -> dict[str, str]:
        """Return environment variables for a new worker."""
        return {}

    def _set_up_all(self) -> None:
        """Prepare new workers for training."""
        assert self._group is not None
        self._group.set_up_all()

    def _describe(self) -> dict[str, Any]:
        """Return the configuration of the run for ``run.json``."""
        return {
            "trainer": type(self).__name__,
            "backend": session.engine().name,
            "num_workers": self.num_workers,
            "seed": self.options.seed,
            "kwargs": {key: repr(value) for key, value in self._kwargs.items()},
        }

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
        self._get_group()  # raises if there are no workers
        return pretrained.save_pretrained(path, self._write_pretrained)

    def _write_pretrained(
        self, directory: str | None, send_files: bool, *weights: Any
    ) -> pretrained.SavedFiles:
        """Let worker 0 write the model; see ``pretrained.save_pretrained``."""
        group, method = self._get_group(), "_write_pretrained"
        if not group.has(method):
            raise TypeError(
                f"save_pretrained() needs a TorchWorker, not {self.workers[0]._info.class_name}. "
                "Use save_final_model()."
            )
        arguments = (directory, send_files, *weights)
        saved = group.call_some([0], lambda i: group.submit(i, method, *arguments), method)
        return saved[0]  # type: ignore[no-any-return]

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once."""
        group = self._get_group()
        with self._with_final_weights():
            return evaluate_on(group, data, kwargs)

    def _with_final_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the workers have the weights of ``model_weights``."""
        return contextlib.nullcontext()

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, epoch: int | None = None) -> Path:
        """Write a checkpoint of the last completed epoch or step, and return its path.

        Inside ``train_epoch``, ``epoch`` says that the running epoch counts as completed.
        """
        if self.checkpointer.store is None or self._group is None:
            raise RuntimeError(NO_WORKERS)
        is_inside = self.state.in_epoch and not self.state.step_in_epoch
        done = self.epoch + (is_inside and epoch is not None)
        if not done and not self.state.step_in_epoch:
            raise RuntimeError(
                "no epoch was trained yet, so there is nothing to resume from: call train() first, "
                "or save_final_model() for the current weights"
            )
        self.state.number_record()
        return self.checkpointer.save(dataclasses.replace(self.state, epoch=done))

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Restore a checkpoint, now or when ``train`` starts the workers, and return its epoch.

        The run continues in the directory of the checkpoint's run. If ``name`` or ``run_dir`` names
        a different one, or the checkpoint isn't in a run directory, a new run starts from it.
        """
        where, loaded = self.checkpointer.load(
            path, self.session.requested_path, self.session.title
        )
        self._write_record()  # of the epoch that a hook goes back from
        self.state.load_state_dict(loaded["state"])
        run = self.session.open_for(where)
        self.checkpointer.open(run.checkpoints)
        epoch = self.epoch - 1
        run.truncate_metrics(epoch)
        run.truncate_steps(self.state.step)
        written = {record.get("epoch") for record in run.read_metrics()}
        for record in self.history:  # all if it is a new run; the last if a hook was killed
            if record["epoch"] not in written:
                run.append_metrics(record)
        self._loaded = loaded
        if self._group is not None:
            self._restore(loaded)
            self._loaded = None
        return epoch

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Restore workers and all other parts, and warn if the number of workers has changed."""
        if loaded["workers"]["count"] != self.num_workers:
            text = describe_other_size(loaded, self.num_workers)
            self._warn_of_change("resumed_on_other_size", text)
        self.checkpointer.restore(loaded, lambda: list(self.workers))

    def _warn_of_change(self, event: str, text: str) -> None:
        """Warn that the run continues with a different configuration, and record the event."""
        warn(text)
        self.session.append_event({"event": event, "message": text})

    def _get_shared_weights(self) -> list[Any] | None:
        """Return the weights that all workers have, in a list. None if they differ."""
        return None

    def _get_group(self) -> Any:
        """Return the ``WorkerGroup`` or ``LockstepGroup``. Raise ``RuntimeError`` without one."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return self._group

    # -- the end ----------------------------------------------------------------------------------

    def _abort(self, error: BaseException) -> None:
        """Stop everything after an error in ``train``."""
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
