"""``WorkerFactory``: creates the workers of a trainer, with their GPUs, seeds and environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miniray.core import session, startup
from miniray.core.remote import ActorClass
from miniray.train import gpus
from miniray.train.options import RunOptions, get_worker_class
from miniray.train.torch_worker import TorchWorker
from miniray.train.train_kwargs import is_ours
from miniray.train.workers import process


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """How a class of trainers sets up the processes of its workers.

    Attributes:
        wrapper: Class that wraps the workers; see ``ActorClass.wrap_with``.
        uses_torch: Whether workers train with torch, whatever their class.
        preloaded: Modules that workers import. The local engine imports them once for all workers.
        set_up: Called in a worker's process before the worker is created; see ``startup.SET_UP``.
    """

    wrapper: type | None = None
    uses_torch: bool = False
    preloaded: Sequence[str] = ()
    set_up: str = "miniray.train.workers.process:set_up_worker"


class WorkerFactory:
    """Creates the workers of a trainer, in processes that are set up for training.

    Args:
        trainer: The class of the trainer.
        worker: The worker class, see ``BaseTrainer``. None if ``create_worker`` is overridden.
        options: The options of the trainer.
        settings: The settings of the trainer's class.

    Attributes:
        cls: The actor class of ``worker``, or None.
        is_overridden: Whether ``create_worker`` of the user creates the workers.
        num_gpus: GPUs that each worker reserves. None if the options don't set it.
    """

    def __init__(
        self, trainer: type, worker: Any, options: RunOptions, settings: ActorSettings
    ) -> None:
        self._trainer, self._options, self._settings = trainer.__name__, options, settings
        self.cls = get_worker_class(worker, options.resources_per_worker)
        create_worker = trainer.create_worker  # type: ignore[attr-defined]
        self.is_overridden = self.cls is None or not is_ours(create_worker)
        gpus.check_use_gpu(options.use_gpu, not self.is_overridden)
        self.num_gpus: float | None = None

    @property
    def user_class(self) -> type | None:
        """The worker class, or None."""
        return None if self.cls is None else self.cls._spec.cls

    @property
    def title(self) -> str:
        """Start of the name of run directories, by which ``resume=True`` finds the newest run."""
        cls = self.user_class
        if cls is None or cls.__module__.partition(".")[0] == "miniray":
            return self._trainer
        # The next run of this trainer class may train a different model.
        return f"{self._trainer}-{cls.__name__}"

    def choose_gpus(self, num_workers: int) -> None:
        """Set ``num_gpus``, after the engine has started; see ``gpus.choose_num_gpus``."""
        if self.cls is None or self.is_overridden:
            return
        self.num_gpus = gpus.choose_num_gpus(
            self._trainer,
            num_workers,
            self._options.use_gpu,
            self.cls._options.num_gpus,
            self._settings.uses_torch or issubclass(self.cls._spec.cls, TorchWorker),
        )

    def get_class(self) -> ActorClass[Any]:
        """Return the actor class, with the GPUs that each worker reserves."""
        assert self.cls is not None
        return self.cls.options(**gpus.get_options(self.num_gpus))

    def count_room(self) -> int | None:
        """Return how many more workers the engine could place now; None for any number."""
        options = self.get_class()._options
        return session.engine().count_room(options.num_cpus or 0, options.num_gpus or 0)

    def get_methods(self, names: Sequence[str], workers: Sequence[Any]) -> list[Any] | None:
        """Return the worker methods with these names, or their signatures.

        None if there are neither a worker class nor ``workers`` yet.
        """
        if not names:
            return []
        if self.user_class is not None:
            cls = self.user_class
            return [getattr(cls, name) for name in names if hasattr(cls, name)]
        if not workers:
            return None
        info = workers[0]._info
        specs = [info.methods.get(name) for name in names if name not in info.unlisted]
        return [spec.signature for spec in specs if spec is not None]

    def create(
        self,
        create: Callable[[], Any],
        worker_id: int,
        num_workers: int,
        run_dir: Path,
        environment: Mapping[str, str],
    ) -> Any:
        """Return the actor that ``create()`` creates.

        Args:
            create: Creates one actor.
            worker_id: Index of the worker.
            num_workers: Number of workers.
            run_dir: The run directory.
            environment: Environment variables.
        """
        seed, env = self._options.seed, dict(environment)
        if seed is not None:
            env[startup.RUN_SEED] = str(seed)
        if session.engine().capabilities.processes:  # else all workers are in this process
            modules, set_up = self._settings.preloaded, self._settings.set_up
            env |= process.environment(run_dir, worker_id, num_workers, modules, set_up)
            env |= gpus.get_environment(self.num_gpus, self._options.use_gpu)
        own_seed = None if seed is None else seed + worker_id
        with startup.actors_with(own_seed, env, self._settings.wrapper):
            return create()
