"""``DataParallelTrainer``: workers train on shards of the data, and weights are averaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from miniray.checks import check_int, check_options, get_options
from miniray.ps import Strategy
from miniray.ps.strategies.base import strategy_names, strategy_options
from miniray.train.optimizer_steps import OptimizerOptions
from miniray.train.options import WORKER_HINTS, RunOptions
from miniray.train.parts import TrainerParts
from miniray.train.segments import SegmentLoop, StepSetup
from miniray.train.steps import StepOptions
from miniray.train.torch_worker import uses_training_step
from miniray.train.train_kwargs import KwargRules
from miniray.train.trainer import BaseTrainer
from miniray.train.worker_factory import ActorSettings
from miniray.train.workers.actor import WorkerActor
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.data.feed import DataFeed, ShardLoading
from miniray.train.workers.data.shards import TrainData
from miniray.train.workers.group import REQUIRED_METHODS
from miniray.train.workers.sync.asynchronous import AsyncSync, check_mode
from miniray.train.workers.sync.policy import SyncPolicy


class DataParallelTrainer(BaseTrainer):
    """Train copies of one model on shards of the data, and combine their weights.

    Args:
        num_workers: Number of workers.
        sync_interval: Number of epochs between two syncs of the weights.
        sync_strategy: How to combine the weights; see ``miniray.ps``. Options of the strategy, such
            as ``momentum=0.9``, are keyword arguments of the trainer.
        worker: See ``BaseTrainer``.
        initial_sync: Start with the weights of worker 0 on every worker. The average of networks
            with different initial weights is useless.
        mode: ``"async"``: no worker waits for the others at the end of an epoch; see
            ``miniray.train.workers.sync.asynchronous``.
        staleness: With ``mode="async"``, how many syncs a worker may be ahead of the slowest. None:
            no limit.
        data: The training data: a torch ``Dataset`` or ``DataLoader``, a dataset or loader of
            ``miniray.data``, or a Hugging Face dataset. Each worker gets the loader over its own
            rows as ``self.train_loader``, or the shard as ``data`` of its ``load_data_shard``. The
            position in data of ``miniray.data`` is part of checkpoints, and a run that is resumed
            on a different number of workers continues with the remaining rows.
        val_data: The same for ``evaluate``, as ``self.val_loader``.
        batch_size: Rows per batch of each worker, if ``data`` has no batch size.
            ``train(batch_size=)`` wins.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (with a gradient scaler). For workers
            derived from ``TorchWorker``.
        accumulate: Batches per optimizer step of these workers.
        clip_norm: Maximum norm of their gradients.
        on_nonfinite: If the weights of a worker contain NaN or infinity, raise (``"error"``) or
            leave out the worker (``"skip"``).
        staleness_power: With ``mode="async"``, how much less stale weights count.
        log_every: Number of steps between two log records, which come at most once per second.
        eval_every_steps: Also evaluate after every N steps of the run.
        sanity_batches: Batches of ``val_loader`` per worker on which the ``validation_step`` that a
            ``TorchWorker`` implements runs before the first step of a run, so that an error in it
            is raised at once. The scores are discarded, and the run has the same bits as without.
            0: none.
        limit_train_batches, limit_val_batches: Maximum number of batches per worker, in an epoch
            and in an evaluation of ``val_loader``. For workers derived from ``TorchWorker``.
        overfit_batches: Train on the same batches in every epoch, this many per worker, in order.
            For workers derived from ``TorchWorker``.
        sync_every_steps: Sync after every N steps of the run, in place of ``sync_interval``.
        **kwargs: The options of ``RunOptions``, and those of the strategy.

    An epoch is reported as synced only if it was: the trainer waits for each sync, and an error in
    it ends the run.

    Steps are counted for workers with ``train_steps(epoch, start, stop)``, which ``TorchWorker``
    has. ``train(steps=...)``, ``eval_every_steps``, ``sync_every_steps`` and
    ``Checkpoint(every_steps=...)`` need it. The step of the run is that of the worker with the most
    batches.
    """

    required_methods = REQUIRED_METHODS

    def __init__(
        self,
        num_workers: int = 4,
        sync_interval: int = 1,
        sync_strategy: str | Strategy = "average",
        *,
        worker: Any = None,
        initial_sync: bool = True,
        mode: Literal["sync", "async"] = "sync",
        staleness: int | None = None,
        data: Any = None,
        val_data: Any = None,
        batch_size: int | None = None,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        on_nonfinite: Literal["error", "skip"] = "error",
        staleness_power: float = 0.0,
        log_every: int = 10,
        eval_every_steps: int | None = None,
        sanity_batches: int = 2,
        limit_train_batches: int | None = None,
        limit_val_batches: int | None = None,
        overfit_batches: int | None = None,
        sync_every_steps: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_mode(mode, staleness, data)
        step_options = StepOptions(
            log_every=log_every,
            eval_every_steps=eval_every_steps,
            sync_every_steps=sync_every_steps,
            sanity_batches=sanity_batches,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            overfit_batches=overfit_batches,
        )
        check_trainer_options(type(self), sync_strategy, kwargs, WORKER_HINTS)
        self._optimizer_options = OptimizerOptions(
            precision=precision, accumulate=accumulate, clip_norm=clip_norm
        )
        options, self._strategy_options = RunOptions.split(kwargs)
        num_workers = check_int("num_workers", num_workers, 1)
        sync_options: dict[str, Any] = {
            "strategy": sync_strategy,
            "interval": sync_interval,
            "initial_sync": initial_sync,
            "server_options": {
                "on_nonfinite": on_nonfinite,
                "staleness_power": staleness_power,
                **self._strategy_options,
            },
        }
        self.sync: SyncPolicy
        if mode == "async":
            self.sync = AsyncSync(num_workers, staleness=staleness, **sync_options)
        else:
            self.sync = SyncPolicy(num_workers, **sync_options)
        given = TrainData.create(data, val_data, batch_size, num_workers)
        self._feed = DataFeed(given) if given else None
        self._segments = SegmentLoop(self.sync, self._feed)
        self._step_setup = StepSetup(
            step_options, lambda: (self.state, self._target), self._segments.is_supported
        )
        data_setup = self._feed or ShardLoading()
        parts = TrainerParts(
            kwargs=KwargRules(used=() if data is None else ("batch_size",)),
            actors=ActorSettings(
                wrapper=None if self._feed is None else WorkerActor,
                preloaded=("miniray.train.torch_worker",),
            ),
            setups=(self._optimizer_options, data_setup, self._step_setup, self.sync),
            sync=self.sync,
            step_options=step_options,
            find_step_problem=self._segments.find_problem,
            check_validation=self._step_setup.check_validation,
        )
        super().__init__(num_workers, worker=worker, _parts=parts, **options)
        cls = self._factory.user_class
        if cls is not None and step_options.describe_limits() and not uses_training_step(cls):
            raise step_options.create_limits_error(cls.__name__)
        self.checkpointer.register(
            "sync", self.sync, in_workers=True, on_missing=self.sync.load_missing_state
        )
        if self._feed is not None:
            self.checkpointer.register("data", self._feed, in_workers=True, on_missing=lambda: None)

    # -- parameter sync ---------------------------------------------------------------------------

    @property
    def param_server(self) -> Any:
        """The parameter server, an actor. None if there are no workers."""
        return self.sync.server

    @property
    def sync_interval(self) -> int:
        """Number of epochs between two syncs."""
        return self.sync.interval

    @sync_interval.setter
    def sync_interval(self, interval: int) -> None:
        self.sync.interval = check_int("sync_interval", interval, 1)

    @property
    def sync_strategy(self) -> str:
        """Name of the strategy."""
        return self.sync.strategy

    def set_worker_weight(self, worker_id: int, weight: float) -> None:
        """Set the weight of a worker in the average, before or after ``train`` starts. Default: 1.

        Raises:
            ValueError: The strategy doesn't use the weights, such as ``"average"``.
        """
        self.sync.set_worker_weight(worker_id, weight)

    def get_sync_stats(self) -> dict[str, Any]:
        """Return the number of syncs, bytes, seconds and distances; see ``miniray.ps``."""
        return self.sync.get_stats()

    def sync_parameters(self, epoch: int | None = None) -> dict[str, Any]:
        """Combine the workers' weights, wait until all workers have them, and return statistics.

        A worker that crashes or hangs is replaced within ``max_failures``, and all workers end with
        the weights of the server; ``miniray.train.workers.sync.repair`` says which ones.
        """
        return self.sync.sync(epoch)

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on every worker, aggregate the results, and sync when it is due."""
        if isinstance(self.sync, AsyncSync):
            assert self._target.epochs is not None
            return aggregate(self.sync.finish(epoch, self._target.epochs, kwargs))
        group = self._get_group()
        if self._segments.is_supported(group):
            self._step_setup.start_epoch(group)
            result = self._segments.train(
                group, epoch, kwargs, self._target, self._steps, act=self._act
            )
        else:
            result = aggregate(self.call_workers("train_epoch", epoch, epoch=epoch, **kwargs))
        if self._is_sync_due(epoch):
            self.sync_parameters(epoch)
        return result

    def _is_sync_due(self, epoch: int) -> bool:
        if self.state.step_in_epoch:  # the run stops inside the epoch
            return False
        if self._steps.options.sync_every_steps is not None:
            return self._steps.is_sync_due()
        return self.sync.is_due(epoch)

    def _act(self, result: Mapping[str, Any]) -> bool:
        """Run the step actions between two segments of an epoch. Return whether to stop."""
        if self.session.signals.number is None:  # else time is short
            self._steps.act(self, result)
        return self.should_stop

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        if self._feed is None or method != "train_epoch" or self._group is None:
            return super().call_workers(method, *args, epoch=epoch, **kwargs)
        return self._feed.train_epoch(args, kwargs, epoch)

    def _finish_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        result["synced"] = self.sync.settle(epoch)
        if self._feed is not None:
            self._feed.end_epoch()
        super()._finish_epoch(epoch, result)

    # -- the model ---------------------------------------------------------------------------------

    def model_weights(self) -> Any:
        """Return the trained weights: those of worker 0, or of the server with ``mode="async"``."""
        return self.sync.get_weights()

    def _describe(self) -> dict[str, Any]:
        strategy_options = {k: repr(v) for k, v in self._strategy_options.items()}
        return {
            **super()._describe(),
            **self._optimizer_options.given,
            **self._steps.options.describe_limits(),
            "strategy_options": strategy_options,
        }

    def shutdown(self) -> None:
        super().shutdown()
        self.sync.stop()
        if self._feed is not None:
            self._feed.close()


def check_trainer_options(
    trainer: type, strategy: str | Strategy, given: Mapping[str, Any], hints: Mapping[str, str]
) -> None:
    """Raise ``TypeError`` for an option that neither the trainer nor its strategy has.

    Also raise ``TypeError`` if the strategy and the trainer have an option of the same name.
    """
    options = strategy_options(strategy)
    if options is None:  # it accepts any option, or doesn't exist
        return
    ours = next(cls for cls in trainer.__mro__ if cls.__module__.startswith("miniray."))
    if clash := sorted(options & get_options(ours)):
        raise TypeError(
            f"strategy {strategy!r} has the option {clash[0]!r}, and so does {ours.__name__}: "
            "rename the parameter in __init__ of the strategy"
        )
    known = (get_options(DataParallelTrainer) | get_options(trainer)) - set(hints) | options
    unknown = [name for name in given if name not in known]
    check_options(trainer.__name__, unknown, known, {**find_strategies(unknown), **hints})


def find_strategies(options: Iterable[str]) -> dict[str, str]:
    """Return for each option that a strategy has, how to select this strategy."""
    having = {
        option: [name for name in strategy_names() if option in (strategy_options(name) or ())]
        for option in options
    }
    return {
        option: f"Use sync_strategy={' or '.join(map(repr, names))}."
        for option, names in having.items()
        if names
    }
