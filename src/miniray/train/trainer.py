"""``BaseTrainer``: lifecycle, workers, epoch loop, hooks. The loop is written once, here.

What a run leaves behind is in its run directory (``rundir``), whatever ended it. If anything
raises, everything the trainer started is ended (``lifecycle``) and the error goes to the caller.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miniray.checks import check_int, suggest_options
from miniray.core import session, startup
from miniray.tracebacks import hide_frames
from miniray.train import gpus
from miniray.train.callbacks import Callback
from miniray.train.options import (
    WORKER_HINTS,
    check_names,
    check_seconds,
    check_train_kwargs,
    worker_class,
)
from miniray.train.run.checkpointer import NO_WORKERS, Saving
from miniray.train.run.progress import Progress
from miniray.train.run.result import TrainResult
from miniray.train.torch_worker import TorchWorker
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.group import (
    WorkerGroup,
    accepted,
    create_worker_actor,
    method_spec,
    setting_up,
)
from miniray.train.workers.process import environment


@suggest_options(WORKER_HINTS)
class BaseTrainer(Saving):
    """Runs ``train_epoch`` on several workers, epoch after epoch. Subclasses say how to make one.

    Constructing a trainer starts nothing; ``train`` does. It may be called again and goes on from
    where it was. ``shutdown`` (or ``with``) ends the workers.

    Args:
        num_workers: how many.
        worker: a worker class, instead of a subclass with ``create_worker``; decorated with
            ``@miniray.remote`` or not.
        name: of the run, which is in ``runs/<name>``.
        run_dir: the run's directory itself, whatever its name.
        seed: worker i begins with ``random``, numpy and torch seeded by ``seed + i``. Datasets made
            in workers without a seed of their own take it too.
        max_failures: how many workers that died or hung are replaced in the run.
        worker_timeout: seconds one call to a worker may take; no limit by default.
        progress: show a bar over epochs (plain lines when output is not a terminal).
        callbacks: see ``miniray.train.callbacks``.
        resources_per_worker: options such as ``num_cpus`` and ``num_gpus`` for ``worker``.
        use_gpu: With ``worker=``: True reserves one GPU per worker, False trains on the CPU. By
            default, workers that train with torch reserve one GPU each if there are GPUs. If there
            are fewer GPUs than workers, ``train`` raises ``ActorUnschedulableError``.
        backend: the engine to start if none is running.
        eval_interval: evaluate every so many epochs (0: never); results appear as ``val_...``.
        resume: like ``train(resume=...)``, for its first call.
        keep_last, keep_best: which checkpoints to keep; see ``CheckpointStore``.
    """

    #: Methods every worker must have, besides those that are called by the trainer's own.
    required_methods: Sequence[str] = ()
    #: What all workers import: loaded once, where the engine can.
    _preloaded: Sequence[str] = ()
    #: Worker methods that get the keyword arguments of ``train()``.
    _kwargs_methods: Sequence[str] = (
        *("__init__", "setup", "load_data_shard", "train_epoch", "evaluate"),
    )
    #: Hints for names that aren't options of the trainer, or parameters of ``train()``.
    _option_hints: Mapping[str, str] = WORKER_HINTS
    _train_hints: Mapping[str, str] = {}
    #: Called in a worker's process before the worker is created; see ``startup.SET_UP``.
    _process_set_up = "miniray.doctor.actors:set_up"
    #: Whether its own workers train with torch, of whatever class they are.
    _uses_torch = False
    #: Class that wraps the workers; see ``ActorClass.wrap_with``.
    _wrapper: type | None = None
    #: What its progress counts.
    _unit = "epoch"

    def __init__(
        self,
        num_workers: int = 4,
        *,
        worker: Any = None,
        name: str | None = None,
        run_dir: str | Path | None = None,
        seed: int | None = None,
        resume: bool | str | Path = False,
        max_failures: int = 0,
        worker_timeout: float | None = None,
        progress: bool = True,
        callbacks: Callback | Sequence[Callback] = (),
        resources_per_worker: Mapping[str, Any] | None = None,
        use_gpu: bool | None = None,
        backend: str | None = None,
        eval_interval: int = 0,
        keep_last: int = 3,
        keep_best: tuple[str, str] | None = None,
    ) -> None:
        self.num_workers = check_int("num_workers", num_workers, 1)
        self._seed = None if seed is None else check_int("seed", seed, 0)
        self._max_failures = check_int("max_failures", max_failures, 0)
        self._eval_interval = check_int("eval_interval", eval_interval, 0)
        self._worker_timeout = check_seconds("worker_timeout", worker_timeout)
        self._worker_class = worker_class(worker, resources_per_worker)
        self._use_gpu = gpus.check_use_gpu(use_gpu, self._creates_workers)
        self._num_gpus: float | None = None  # of each worker; known after the engine has started
        super().__init__(callbacks, name, run_dir, backend, keep_last, keep_best, progress)
        self._end = 0  # the epoch this train() goes up to
        self.should_stop, self.stop_reason = False, ""
        self.result: TrainResult | None = None
        self._resume = resume
        self._kwargs: dict[str, Any] = {}

    @property
    def _title(self) -> str:
        cls = None if self._worker_class is None else self._worker_class._spec.cls
        if cls is None or cls.__module__.partition(".")[0] == "miniray":
            return super()._title
        # One trainer class trains whatever it is given: the next run of it may be of another model.
        return f"{super()._title}-{cls.__name__}"

    # -- what users override ----------------------------------------------------------------------

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
        worker_class = self._worker_class.options(**gpus.get_options(self._num_gpus))
        return create_worker_actor(worker_class, worker_id, kwargs)

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """One epoch on all workers; returns their results aggregated. May be overridden."""
        return aggregate(self.call_workers("train_epoch", epoch, epoch=epoch, **kwargs))

    def on_train_start(self, **kwargs: Any) -> None:
        """Called once workers are there, before the first epoch."""

    def on_train_end(self, history: TrainResult, **kwargs: Any) -> TrainResult:
        """Called after the last epoch with the result of the run, which ``train`` returns."""
        return history

    def on_epoch_start(self, epoch: int, **kwargs: Any) -> None:
        """Called before each epoch."""

    def on_epoch_end(self, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        """Called after each epoch with its result, which is what the run remembers of it.

        What is added to it is in the history, in ``metrics.jsonl`` and in checkpoints.
        """

    # -- the run ----------------------------------------------------------------------------------

    def train(
        self, epochs: int, *, resume: bool | str | Path | None = None, **kwargs: Any
    ) -> TrainResult:
        """Train for ``epochs`` more epochs and return the result of the run.

        Args:
            epochs: Number of epochs to train, in addition to those already trained.
            resume: ``True`` restores the newest intact checkpoint of this run, or of the most
                recent run of this trainer and worker class. A path restores that checkpoint.
            **kwargs: Passed to ``create_worker``, to the workers' ``__init__``, ``setup``,
                ``load_data_shard``, ``train_epoch`` and ``evaluate``, and to the hooks of the
                trainer and of callbacks. Each gets the names that its signature accepts.

        Raises:
            TypeError: Nothing accepts a name in ``kwargs``. A ``**kwargs`` of ``create_worker`` or
                of a worker method accepts every name. A ``**kwargs`` of a hook does if it is used
                for more than calling ``super()``.
            RuntimeError: The workers were stopped by ``shutdown`` or an error, so their weights are
                gone, and ``resume`` isn't set.
        """
        epochs = check_int(f"{self._unit}s", epochs, 0)
        check_names(kwargs)
        if not hasattr(self, "_resume"):
            raise RuntimeError(
                f"{type(self).__name__}.__init__() must call super().__init__(num_workers, ...)"
            )
        wanted = self._resume if resume is None else resume
        self._resume = False
        if self.epoch and self._group is None and self._loaded is None and not wanted:
            raise RuntimeError(
                f"the weights of these {self.epoch} {self._unit}s ended with their workers, by "
                "shutdown() or an error; train(..., resume=True) goes on from the newest "
                "checkpoint, a new trainer begins anew"
            )
        self.should_stop, self.stop_reason = False, ""
        self._in_epoch = False
        self._kwargs = kwargs
        self._check_kwargs()
        began = time.monotonic()
        try:
            self._start(wanted)
            self._emit("on_train_start")
            self._loop(epochs)
            result = self.result = self._make_result(time.monotonic() - began)
            self._emit("on_train_end", result)
            assert self.run is not None
            assert self.checkpoints is not None
            result.checkpoint = self.checkpoints.newest()  # it may have come with the hooks
        except BaseException as error:
            self._abort(error)
            hide_frames(error)  # run.json has the full traceback
            raise
        with self._writing("its end is not in"):
            self.run.finish(stop_reason=self.stop_reason or None, sync=result.sync or None)
        self._write_report()
        return result

    def _loop(self, epochs: int) -> None:
        with Progress(self.epoch, epochs, unit=self._unit, enabled=self._progress) as progress:
            for left in range(epochs, 0, -1):
                epoch, started = self.epoch, time.monotonic()  # a hook may have gone back
                self._end = epoch + left
                self._emit("on_epoch_start", epoch)
                result = self._train_epoch(epoch)
                self._after_epoch(epoch, result)
                record = {"epoch": epoch, "seconds": time.monotonic() - started, **result}
                progress.update(epoch, result)
                self._remember(epoch, record)
                if self.should_stop:
                    assert self.run is not None
                    self.run.append_event(
                        {"event": "stopped", "epoch": epoch, "reason": self.stop_reason}
                    )
                    why = f": {self.stop_reason}" if self.stop_reason else ""
                    progress.note(f"stopped after {self._unit} {epoch}{why}")
                    break

    def _remember(self, epoch: int, record: dict[str, Any]) -> None:
        """Let the hooks add to what is known of an epoch; then it is written down.

        Whatever they raise, the epoch was trained. A checkpoint that is written meanwhile has it.
        """
        record["epoch"] = epoch  # workers may call something else so, or count from 1
        self.history.append(record)
        self.epoch = epoch + 1
        self._hooks_record = record
        try:
            self._emit("on_epoch_end", epoch, record)
        except BaseException:
            with self._writing("its last epoch is not in"):
                self._write_record()
            raise
        self._write_record()

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self._in_epoch = True
        result: Any = self.train_epoch(epoch, **self._taken(self.train_epoch))
        self._in_epoch = False
        if not isinstance(result, dict):
            raise TypeError(
                f"{type(self).__name__}.train_epoch() must return a dict of results, not {result!r}"
            )
        return result

    def _after_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        """What comes with an epoch besides training; may add to ``result``."""
        if self._eval_interval and (epoch + 1) % self._eval_interval == 0:
            # Not on data that was given to train with.
            scores = self.evaluate(**{k: v for k, v in self._kwargs.items() if k != "data"})
            # Who comes from Lightning calls it val_loss already.
            result.update({f"val_{k.removeprefix('val_')}": v for k, v in scores.items()})

    def _emit(self, hook: str, *arguments: Any) -> None:
        """Call the trainer's own hook and then the callbacks'."""
        own = getattr(self, hook)
        own(*arguments, **self._taken(own))
        for callback in self.callbacks:
            theirs = getattr(callback, hook)
            theirs(self, *arguments, **self._taken(theirs))

    def _taken(self, function: Any) -> dict[str, Any]:
        """Those of ``train``'s keyword arguments that ``function`` takes."""
        return accepted(inspect.signature(function), self._kwargs)

    def _make_result(
        self, wall_time: float, kind: type[TrainResult] = TrainResult, **more: Any
    ) -> TrainResult:
        assert self.run is not None
        assert self.checkpoints is not None
        return kind(
            history=self.history,
            epochs=self.epoch,
            unit=self._unit,
            wall_time=wall_time,
            run_dir=self.run.path,
            checkpoint=self.checkpoints.newest(),
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
            specs = [method_spec(worker, n) for n in names if n not in worker._info.unlisted]
            methods = [spec.signature for spec in specs if spec is not None]
        else:
            return
        options = (f"{self._unit}s", "resume")
        check_train_kwargs(self, self._kwargs, methods, options, self._train_hints)

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all workers at once; results by worker id.

        Of ``kwargs`` each worker gets what its method takes. A worker that dies or hangs is
        replaced within ``max_failures``; an exception is raised with worker id and epoch.
        """
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return self._group.call(method, lambda _: args, kwargs, epoch)

    def _start(self, resume: bool | str | Path) -> None:
        """Engine, run directory, workers: whatever is not there yet."""
        self._start_engine()
        if resume:
            self.load_checkpoint("latest" if resume is True else resume)
        self._open_run()
        if resume and self._progress:
            assert self.run is not None
            print(f"resuming {self.run.path} after {self._unit} {self.epoch}", file=sys.stderr)
        if self._group is None:
            self._num_gpus = self._choose_num_gpus()
            required = list(self.required_methods)
            if type(self).train_epoch is BaseTrainer.train_epoch:
                required.append("train_epoch")
            if self._eval_interval and type(self).evaluate is BaseTrainer.evaluate:
                required.append("evaluate")
            self._group = self._make_group(
                self.num_workers,
                self._create,
                self._set_up_replacement,
                required,
                self._max_failures,
                self._worker_timeout,
                self._on_worker_event,
                self._unit,
            )
            self._group.start()
            self._check_kwargs()
            self._set_up_all()
        if self._loaded is not None:
            self._take_up(self._loaded)
            self._loaded = None

    def _make_group(self, *options: Any) -> WorkerGroup:
        return WorkerGroup(*options)

    @property
    def _creates_workers(self) -> bool:
        """Whether ``create_worker`` is miniray's own and has a worker class."""
        is_ours = type(self).create_worker.__module__.partition(".")[0] == "miniray"
        return is_ours and self._worker_class is not None

    def _choose_num_gpus(self) -> float | None:
        """Return the number of GPUs that each worker reserves."""
        cls = self._worker_class
        if cls is None or not self._creates_workers:
            return None
        is_torch = self._uses_torch or issubclass(cls._spec.cls, TorchWorker)
        return gpus.choose_num_gpus(
            type(self).__name__, self.num_workers, self._use_gpu, cls._options.num_gpus, is_torch
        )

    def _create(self, worker_id: int) -> Any:
        seed = None if self._seed is None else self._seed + worker_id
        env = {} if self._seed is None else {startup.RUN_SEED: str(self._seed)}
        if session.engine().capabilities.processes:  # else there is one process for all workers
            assert self.run is not None
            path, modules = self.run.path, self._preloaded
            env |= environment(path, worker_id, self.num_workers, modules, self._process_set_up)
            env |= gpus.get_environment(self._num_gpus, self._use_gpu)
        with startup.actors_with(seed, env, self._wrapper):
            return self.create_worker(worker_id, **self._taken(self.create_worker))

    def _set_up_all(self) -> None:
        """Bring new workers to where training can start."""

    def _set_up_worker(self, worker_id: int) -> None:
        """Bring one worker, a replacement, to where its predecessor was."""

    def _set_up_replacement(self, worker_id: int) -> None:
        self._set_up_worker(worker_id)
        for callback in self.callbacks:
            with setting_up("on_worker_replaced"):
                callback.on_worker_replaced(self, worker_id)

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            "num_workers": self.num_workers,
            "seed": self._seed,
            "kwargs": {key: repr(value) for key, value in self._kwargs.items()},
        }
