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

import miniray
from miniray.core import session, startup
from miniray.core.remote import ActorClass
from miniray.doctor import actors
from miniray.train import resume as resuming
from miniray.train.callbacks import Callback
from miniray.train.evaluate import evaluate_on
from miniray.train.lifecycle import Lifecycle
from miniray.train.modelfile import save_model
from miniray.train.progress import Progress
from miniray.train.results import TrainResult, aggregate
from miniray.train.rundir import RunDirectory
from miniray.train.workers import WorkerGroup, accepted

#: What the first optimizer of every worker would load: a second, and memory of its own. If the
#: driver has the one, the local engine loads the other once for all workers.
_LOADED_LATE = {"torch": "torch._dynamo"}


class BaseTrainer(Lifecycle):
    """Runs ``train_epoch`` on several workers, epoch after epoch. Subclasses say how to make one.

    Constructing a trainer starts nothing; ``train`` does. It may be called again and goes on from
    where it was. ``shutdown`` (or ``with``) ends the workers.

    Args:
        num_workers: how many.
        worker: a worker class, instead of a subclass with ``create_worker``; decorated with
            ``@miniray.remote`` or not.
        name, run_dir: the run's name and where its directory is (default ``runs/<name>``).
        seed: worker i begins with ``random``, numpy and torch seeded by ``seed + i``.
        max_failures: how many workers that died or hung are replaced in the run.
        worker_timeout: seconds one call to a worker may take; no limit by default.
        progress: show a bar over epochs (plain lines when output is not a terminal).
        callbacks: see ``miniray.train.callbacks``.
        resources_per_worker: options such as ``num_cpus`` and ``num_gpus`` for ``worker``.
        backend: the engine to start if none is running.
        eval_interval: evaluate every so many epochs (0: never); results appear as ``val_...``.
        resume: like ``train(resume=...)``, for its first call.
        keep_last, keep_best: which checkpoints to keep; see ``CheckpointStore``.
    """

    #: Methods every worker must have; without an overridden ``train_epoch``, that too.
    required_methods: Sequence[str] = ()

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
        callbacks: Sequence[Callback] = (),
        resources_per_worker: Mapping[str, Any] | None = None,
        backend: str | None = None,
        eval_interval: int = 0,
        keep_last: int = 3,
        keep_best: tuple[str, str] | None = None,
    ) -> None:
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ValueError(f"num_workers must be an int >= 1, not {num_workers!r}")
        if inspect.isclass(worker):
            worker = miniray.remote(worker)
        if worker is not None and not isinstance(worker, ActorClass):
            raise TypeError(f"worker must be a class, not {worker!r}")
        if resources_per_worker and worker is None:
            raise ValueError(
                "resources_per_worker goes with worker=; in create_worker() use "
                "MyWorker.options(num_cpus=..., num_gpus=...).remote(...)"
            )
        super().__init__(name, run_dir, backend, keep_last, keep_best)
        self.num_workers = num_workers
        self.history: list[dict[str, Any]] = []
        self.epoch = 0  # epochs done so far
        self._end = 0  # the epoch this train() goes up to
        self.should_stop = False
        self.stop_reason = ""
        self.result: TrainResult | None = None
        self.callbacks = list(callbacks)
        self._worker_class = worker
        self._resources = dict(resources_per_worker or {})
        self._seed = seed
        self._resume = resume
        self._progress = progress
        self._eval_interval = eval_interval
        self._max_failures, self._worker_timeout = max_failures, worker_timeout
        self._kwargs: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # a checkpoint to apply when workers are there

    # -- what users override ----------------------------------------------------------------------

    def create_worker(self, worker_id: int, **kwargs: Any) -> Any:
        """Make one worker: ``return MyWorker.remote(worker_id)``. Subclasses must implement it.

        With ``worker=`` the class is used, with those of ``kwargs`` that its ``__init__`` takes.
        """
        if self._worker_class is None:
            raise NotImplementedError(
                f"{type(self).__name__} must implement create_worker(self, worker_id, **kwargs), "
                "returning MyWorker.remote(worker_id); or pass worker=MyWorker"
            )
        cls = self._worker_class.options(**self._resources)
        init = cls._spec.init
        own = (worker_id,) if init.max_positional else ()  # a class may do without its id
        return cls.remote(*own, **accepted(init.signature, kwargs))

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
        """Called after each epoch with its result."""

    # -- the run ----------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Any]:
        """The workers' handles, by worker id. A worker that is replaced has a new one here."""
        return self._group.handles if self._group is not None else []

    def train(
        self, epochs: int, *, resume: bool | str | Path | None = None, **kwargs: Any
    ) -> TrainResult:
        """Train for ``epochs`` more epochs.

        ``kwargs`` reach ``create_worker``, the workers' ``load_data_shard`` and the hooks.
        ``resume=True`` goes on from the newest intact checkpoint of this run (or of the newest run
        of this trainer), a path from that one.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
            raise ValueError(f"epochs must be an int >= 0, not {epochs!r}")
        self.should_stop, self.stop_reason = False, ""
        self._kwargs = kwargs
        began = time.monotonic()
        try:
            wanted = self._resume if resume is None else resume
            self._resume = False
            self._start(wanted)
            self._end = self.epoch + epochs
            self._emit("on_train_start")
            self._loop(epochs)
            result = self.result = self._make_result(time.monotonic() - began)
            self._emit("on_train_end", result)
        except BaseException as error:
            self._abort(error)
            raise
        assert self.run is not None
        self.run.finish("finished", stop_reason=self.stop_reason or None, sync=result.sync or None)
        self._write_report()
        return result

    def _loop(self, epochs: int) -> None:
        with Progress(self.epoch, epochs, enabled=self._progress) as progress:
            for epoch in range(self.epoch, self.epoch + epochs):
                started = time.monotonic()
                self._emit("on_epoch_start", epoch)
                result = self.train_epoch(epoch, **self._taken(self.train_epoch))
                if not isinstance(result, dict):
                    raise TypeError(
                        f"{type(self).__name__}.train_epoch() must return a dict of results, "
                        f"not {result!r}"
                    )
                self._after_epoch(epoch, result)
                record = {"epoch": epoch, "seconds": time.monotonic() - started, **result}
                self.history.append(record)
                self.epoch = epoch + 1
                assert self.run is not None
                self.run.append_metrics(record)
                progress.update(epoch, result)
                self._emit("on_epoch_end", epoch, result)
                if self.should_stop:
                    self.run.append_event(
                        {"event": "stopped", "epoch": epoch, "reason": self.stop_reason}
                    )
                    break

    def _after_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        """What comes with an epoch besides training; may add to ``result``."""
        if self._eval_interval and (epoch + 1) % self._eval_interval == 0:
            scores = self.evaluate(**self._kwargs)
            result.update({f"val_{key}": value for key, value in scores.items()})

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

    def _make_result(self, wall_time: float) -> TrainResult:
        assert self.run is not None
        newest = self.checkpoints.newest() if self.checkpoints is not None else None
        return TrainResult(
            history=list(self.history),
            epochs=self.epoch,
            wall_time=wall_time,
            sync=self._sync_stats(),
            run_dir=self.run.path,
            checkpoint=newest,
        )

    def _sync_stats(self) -> dict[str, Any]:
        return {}

    # -- workers ----------------------------------------------------------------------------------

    def call_workers(
        self, method: str, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on all workers at once; results by worker id.

        Of ``kwargs`` each worker gets what its method takes. A worker that dies or hangs is
        replaced within ``max_failures``; an exception is raised with worker id and epoch.
        """
        if self._group is None:
            raise RuntimeError("there are no workers before train()")
        return self._group.call(method, lambda _: args, kwargs, epoch)

    def _start(self, resume: bool | str | Path) -> None:
        """Engine, run directory, workers: whatever is not there yet."""
        self._start_engine()
        if resume:
            kind = type(self).__name__
            self.load_checkpoint(resuming.find(resume, self._run_dir, self._name, kind))
        self._open_run()
        if self._group is None:
            required = list(self.required_methods)
            if type(self).train_epoch is BaseTrainer.train_epoch and "train_epoch" not in required:
                required.append("train_epoch")
            self._group = WorkerGroup(
                self.num_workers,
                self._create,
                self._set_up_replacement,
                required,
                self._max_failures,
                self._worker_timeout,
                self._on_worker_event,
            )
            self._group.start()
            self._set_up_all()
        if self._loaded is not None:
            resuming.apply(self, self._loaded)
            self._loaded = None

    def _create(self, worker_id: int) -> Any:
        seed = None if self._seed is None else self._seed + worker_id
        env = {}
        if session.engine().capabilities.processes:  # else there is one process for all workers
            assert self.run is not None
            modules = [late for early, late in _LOADED_LATE.items() if early in sys.modules]
            env = actors.environment(self.run.path, worker_id, self.num_workers)
            env[startup.SET_UP] = f"{actors.__name__}:{actors.set_up.__name__}"
            env[startup.PRELOAD] = " ".join([*modules, *actors.MODULES])
        with startup.actors_with(seed, env):
            return self.create_worker(worker_id, **self._taken(self.create_worker))

    def _set_up_all(self) -> None:
        """Bring new workers to where training can start."""

    def _set_up_worker(self, worker_id: int) -> None:
        """Bring one worker, a replacement, to where its predecessor was."""

    def _set_up_replacement(self, worker_id: int) -> None:
        self._set_up_worker(worker_id)
        for callback in self.callbacks:
            callback.on_worker_replaced(self, worker_id)

    # -- checkpoints, the model -------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            "num_workers": self.num_workers,
            "seed": self._seed,
            "kwargs": {key: repr(value) for key, value in self._kwargs.items()},
        }

    def save_checkpoint(self, epoch: int | None = None) -> Path:
        """Write all there is to go on from here; returns where. Call it from ``on_epoch_end``."""
        if self.checkpoints is None:
            raise RuntimeError("there is nothing to save before train()")
        epoch = self.epoch - 1 if epoch is None else epoch
        return self.checkpoints.save(epoch, resuming.collect(self))

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Take up a checkpoint, now or when ``train`` starts the workers; returns its epoch."""
        store, where = resuming.locate(path, self.checkpoints, self._run_dir, self._name)
        epoch, state = store.load(where)
        if self.run is None:
            self.run = RunDirectory.reopen(store.directory.parent)
        self.checkpoints = self.checkpoints or self._store(store.directory)
        self.epoch = epoch + 1
        self.history = list(state["history"])
        self.run.truncate_metrics(epoch)
        self._loaded = state
        if self._group is not None:
            resuming.apply(self, state)
            self._loaded = None
        return epoch

    def _workers_in_sync(self) -> bool:
        """Whether all workers have the same weights, so that one copy is enough."""
        return False

    def _extra_state(self) -> dict[str, Any]:
        """What a subclass adds to a checkpoint."""
        return {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take up what ``_extra_state`` gave."""

    def model_weights(self) -> Any:
        """The trained weights: worker 0's."""
        return miniray.get(self.workers[0].get_weights.remote())

    def save_final_model(self, path: str | Path | None = None) -> Path:
        """Write the weights as one safetensors file (default: ``final_model.safetensors``)."""
        if self.run is None or not self.workers:
            raise RuntimeError("there is no model before train()")
        target = Path(path) if path is not None else self.run.path / "final_model.safetensors"
        return save_model(target, self.model_weights())

    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once; see ``miniray.train.evaluate``."""
        if self._group is None:
            raise RuntimeError("there are no workers before train()")
        return evaluate_on(self._group, data, kwargs)
