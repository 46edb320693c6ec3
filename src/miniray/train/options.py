"""Options of trainers, and checks that report an invalid argument before anything is started."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import miniray
from miniray.checks import check_bool, check_int, check_number, check_path
from miniray.core import session
from miniray.core.remote import ActorClass
from miniray.doctor.sites import is_users
from miniray.train.run.directory import check_name

if TYPE_CHECKING:
    from miniray.train.callbacks import Callback
    from miniray.train.run.loggers.base import Logger

#: Hints for what a worker sets itself.
IN_WORKER_HINTS: Mapping[str, str] = {
    "max_tokens": "Use miniray.data.DataLoader(batch_by='tokens', batch_size=...) in the worker.",
    "model": "Set self.model in the worker.",
    "optimizer": "Set self.optimizer in the worker.",
    "lr_scheduler": "Set self.scheduler in the worker.",
    "train_loader": "Set self.train_loader in the worker.",
    "val_loader": "Set self.val_loader in the worker.",
}
#: Hints for names that aren't options of a trainer that runs worker classes.
WORKER_HINTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("batch_size", "lr", "learning_rate", "dataset"),
        "Pass it to train(), which passes it to workers and hooks.",
    ),
    **IN_WORKER_HINTS,
}


#: The same for trainers with ``data=`` and ``batch_size=``.
DATA_HINTS: Mapping[str, str] = {k: v for k, v in WORKER_HINTS.items() if k != "batch_size"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options that all trainers share.

    Args:
        name: Name of the run, whose directory is ``runs/<name>``.
        run_dir: The directory of the run, in place of ``runs/<name>``.
        seed: Worker i starts with ``random``, NumPy and torch seeded with ``seed + i``. Datasets
            that workers create without a seed use it too.
        resume: The default of ``train(resume=...)`` for the first call.
        max_failures: How many workers that crash or hang are replaced during the run.
        worker_timeout: Limit in seconds for one call to a worker. None: no limit.
        progress: Show a progress bar, or plain lines if the output isn't a terminal.
        callbacks: One callback or several; see ``miniray.train.callbacks``.
        loggers: One logger or several: ``"csv"``, ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, or
            ``Logger`` objects. ``metrics.jsonl`` is always written.
        resources_per_worker: Options of the worker actors, such as ``num_cpus`` and ``num_gpus``.
        use_gpu: With ``worker=``: True reserves one GPU per worker, False trains on the CPU. None:
            workers that train with torch reserve one GPU each if there are GPUs. If there are fewer
            GPUs than workers, ``train`` raises ``ActorUnschedulableError``.
        backend: The engine to start if none is running: ``"local"``, ``"ray"`` or ``"inline"``.
        eval_interval: Evaluate after every ``eval_interval`` epochs (0: never). The scores are
            added to the result of the epoch as ``val_...``.
        keep_last: How many of the newest checkpoints to keep. None keeps all.
        keep_best: ``(metric, "min" or "max")``: also keep the best checkpoint by this metric.
        checkpoint_dir: A local path or an fsspec URL (``s3://bucket/run``) to which each checkpoint
            is copied. ``resume=True`` and ``resume="auto"`` search it and the run directory.
        grace_seconds: Limit in seconds for the end of a run after the first SIGTERM, SIGUSR1 or
            Ctrl-C. The run finishes its step, or its epoch if workers train it alone, saves a
            checkpoint and stops the workers.
    """

    name: str | None = None
    run_dir: str | Path | None = None
    seed: int | None = None
    resume: bool | str | Path = False
    max_failures: int = 0
    worker_timeout: float | None = None
    progress: bool = True
    callbacks: Callback | Sequence[Callback] = ()
    loggers: str | Logger | Sequence[str | Logger] = ()
    resources_per_worker: Mapping[str, Any] | None = None
    use_gpu: bool | None = None
    backend: str | None = None
    eval_interval: int = 0
    keep_last: int | None = 3
    keep_best: tuple[str, str] | None = None
    checkpoint_dir: str | Path | None = None
    grace_seconds: float = 25.0

    def __post_init__(self) -> None:
        for name in ("max_failures", "eval_interval"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), 0))
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0))
        grace = check_number("grace_seconds", self.grace_seconds, 0, open_low=True)
        object.__setattr__(self, "grace_seconds", grace)
        if self.checkpoint_dir is not None:
            check_path("checkpoint_dir", self.checkpoint_dir)
        check_resume(self.resume)
        check_bool("progress", self.progress)
        check_seconds("worker_timeout", self.worker_timeout)
        check_name(self.name)
        if self.run_dir is not None:
            object.__setattr__(self, "run_dir", Path(self.run_dir).expanduser())
        if self.backend is not None:
            object.__setattr__(self, "backend", session.choose_backend(self.backend))

    @classmethod
    def split(cls, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the keyword arguments that are fields of this class, and the others."""
        names = {field.name for field in dataclasses.fields(cls)}
        return (
            {name: value for name, value in kwargs.items() if name in names},
            {name: value for name, value in kwargs.items() if name not in names},
        )


class RunKwargs(TypedDict, total=False):
    """The fields of ``RunOptions`` as keyword arguments of trainers, for editors and checkers."""

    name: str | None
    run_dir: str | Path | None
    seed: int | None
    resume: bool | str | Path
    max_failures: int
    worker_timeout: float | None
    progress: bool
    callbacks: Callback | Sequence[Callback]
    loggers: str | Logger | Sequence[str | Logger]
    resources_per_worker: Mapping[str, Any] | None
    use_gpu: bool | None
    backend: Literal["local", "ray", "inline"] | None
    eval_interval: int
    keep_last: int | None
    keep_best: tuple[str, Literal["min", "max"]] | None
    checkpoint_dir: str | Path | None
    grace_seconds: float


class LockstepKwargs(RunKwargs, total=False):
    """Keyword arguments of all trainers whose workers step together; see ``DDPTrainer``."""

    clip_norm: float | None
    on_nonfinite: Literal["error", "ignore"]
    group_backend: Literal["auto", "gloo", "nccl"]
    hang_timeout: float | None
    timeout: float
    log_every: int
    eval_every_steps: int | None
    sanity_batches: int
    snapshot_every: int | Literal["auto"] | None
    limit_train_batches: int | None
    limit_val_batches: int | None
    overfit_batches: int | None
    on_divergence: Literal["error", "warn"]


class ParallelKwargs(LockstepKwargs, total=False):
    """Keyword arguments of the trainers of split models; see ``PipelineParallelTrainer``."""

    model: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    data: Any
    val_data: Any
    batch_size: int | None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None
    scheduler: Callable[[Any], Any] | None
    layers_per_stage: Sequence[int] | None
    memory_limit: float | None


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the innermost line of the user's code as the location."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def check_resume(value: Any) -> Any:
    """Return the option ``resume``. Raise ``ValueError`` if it is neither a bool nor a path."""
    return value if isinstance(value, bool) else check_path("resume", value)


def check_seconds(name: str, value: Any) -> Any:
    """Return ``value`` if it is a time limit in seconds, or None for no limit."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if value is not None and not (number and value > 0):
        raise ValueError(f"{name} must be a number of seconds > 0 or None, not {value!r}")
    return value


def get_worker_class(worker: Any, resources: Mapping[str, Any] | None) -> ActorClass[Any] | None:
    """Return the actor class of ``worker``. None if ``create_worker`` creates the workers."""
    if inspect.isclass(worker):
        worker = miniray.remote(worker)
    if worker is not None and not isinstance(worker, ActorClass):
        raise TypeError(f"worker must be a class, not {worker!r}")
    if resources and worker is None:
        raise ValueError(
            "resources_per_worker goes with worker=; in create_worker() use "
            "MyWorker.options(num_cpus=..., num_gpus=...).remote(...)"
        )
    return None if worker is None else worker.options(**(resources or {}))
