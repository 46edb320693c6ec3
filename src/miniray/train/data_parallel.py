"""``DataParallelTrainer``: every worker trains on its shard, a parameter server combines them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import miniray
from miniray.checks import check_bool, check_int, check_options, get_options
from miniray.core import session
from miniray.core.remote import adapting
from miniray.errors import MinirayError
from miniray.ps import Strategy, create_parameter_server
from miniray.ps.create import check_parameter_server
from miniray.ps.strategies.base import at_least, strategy_names, strategy_options
from miniray.train.pretrained import SavedFiles
from miniray.train.run.checkpointer import NO_WORKERS
from miniray.train.run.result import TrainResult
from miniray.train.trainer import BaseTrainer
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.async_sync import AsyncEpochs, check_mode
from miniray.train.workers.data import Dealer, Shardable, dealt_spec
from miniray.train.workers.group import REQUIRED_METHODS, end
from miniray.train.workers.sync import begin_with, sync


class DataParallelTrainer(BaseTrainer):
    """Trains copies of one model on shards of the data and combines their weights.

    Args:
        num_workers: how many.
        sync_interval: combine the weights every so many epochs.
        sync_strategy: how; see ``miniray.ps``. Further arguments of the strategy (``momentum=0.9``)
            are given by keyword here, and so are all options of ``BaseTrainer`` and
            ``num_servers``, ``on_nonfinite``, ``staleness_power`` and ``compression`` (of what
            workers push themselves, by a ``miniray.ps.Client``) of the parameter server.
        initial_sync: begin with worker 0's weights on every worker. Averaging networks that began
            differently is useless.
        mode: ``"async"``: no worker waits for the others at the end of an epoch; see
            ``miniray.train.workers.async_sync``.
        staleness: with ``mode="async"``, how many syncs a worker may be ahead of the slowest;
            without limit by default.
        data: a dataset or loader of ``miniray.data``. Every worker's ``load_data_shard`` gets its
            shard as ``data``; where the workers are in it is part of checkpoints, and a run taken
            up on another number of workers goes on with the rows that are left.

    What is reported as synced was synced: the trainer waits for it, and an error ends the run.
    """

    required_methods = REQUIRED_METHODS
    _preloaded: Sequence[str] = ("miniray.train.torch_worker",)

    def __init__(
        self,
        num_workers: int = 4,
        sync_interval: int = 1,
        sync_strategy: str | Strategy = "average",
        *,
        initial_sync: bool = True,
        mode: str = "sync",
        staleness: int | None = None,
        data: Shardable | None = None,
        num_servers: int = 1,
        on_nonfinite: str = "error",
        staleness_power: float = 0.0,
        compression: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.sync_interval = check_int("sync_interval", sync_interval, 1)
        check_mode(mode, staleness, data)
        check_trainer_options(type(self), sync_strategy, kwargs, self._option_hints)
        names = get_options(BaseTrainer)
        super().__init__(num_workers, **{k: v for k, v in kwargs.items() if k in names})
        rest = {k: v for k, v in kwargs.items() if k not in names}
        self._server_options: dict[str, Any] = {
            "num_servers": num_servers,
            "on_nonfinite": on_nonfinite,
            "staleness_power": staleness_power,
            "compression": compression,
            "strategy": sync_strategy,
            "mode": mode,
        }
        if mode == "async":
            self._server_options["num_workers"] = self.num_workers
        self._strategy_options = rest
        workers = {"num_workers": self.num_workers}
        made = check_parameter_server(**{**self._server_options, **workers}, **rest)
        self.sync_strategy = made.name or type(made).__name__
        self._takes_worker_weights = made.uses_worker_weights or mode == "async"
        self.mode = mode
        self.staleness = staleness
        self.param_server: Any = None
        self._server_ready = False  # whether it has weights
        self._initial_sync = check_bool("initial_sync", initial_sync)
        self._worker_weights: dict[int, float] = {}
        self._in_sync = False
        self._made_good = False
        self._syncs_seen = self._failures_seen = 0  # the latter: of those that were made good
        self._last_stats: dict[str, Any] = {}
        self._async: AsyncEpochs | None = None
        self._dealer = None if data is None else Dealer(data)

    # -- what users call --------------------------------------------------------------------------

    def set_worker_weight(self, worker_id: int, weight: float) -> None:
        """How much a worker counts, before or after ``train``; 1 if never said.

        ``ValueError`` with a strategy that counts all workers the same, as ``"average"`` does.
        """
        if not self._takes_worker_weights:
            raise ValueError(
                f"set_worker_weight() would do nothing with sync_strategy={self.sync_strategy!r}; "
                'it needs "weighted" or another one that is based on the weighted mean'
            )
        if worker_id not in range(self.num_workers):
            raise ValueError(
                f"there is no worker {worker_id!r}: there are {self.num_workers}, from 0"
            )
        self._worker_weights[worker_id] = at_least("a worker's weight", weight, 0)
        if self.param_server is not None:
            self._tell_worker_weights()

    def _tell_worker_weights(self) -> None:
        tell = self.param_server.set_worker_weight
        miniray.get([tell.remote(worker, w) for worker, w in self._worker_weights.items()])

    def get_sync_stats(self) -> dict[str, Any]:
        """Number of syncs, bytes, seconds, how far the workers were apart; see ``miniray.ps``."""
        if self.param_server is not None:
            self._last_stats = miniray.get(self.param_server.get_stats.remote())
        return dict(self._last_stats)

    def sync_parameters(self, epoch: int | None = None) -> dict[str, Any]:
        """Combine the workers' weights now and wait for it; returns the sync's figures.

        A worker that died or hangs is replaced within ``max_failures``, and all workers end with
        the same weights, those of the server; ``miniray.train.workers.sync`` says which.
        """
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        figures, made_good = sync(self._group, self.param_server, self._worker_timeout, epoch)
        if made_good:
            self._made_good = True
            self._failures_seen = self.get_sync_stats()["failed_syncs"]
        return figures

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on every worker, aggregate the results, sync when it is time to."""
        if self._async is not None:
            return aggregate(self._async.finish(epoch, self._end, kwargs))
        result = aggregate(self.call_workers("train_epoch", epoch, epoch=epoch, **kwargs))
        if (epoch + 1) % self.sync_interval == 0:
            self.sync_parameters(epoch)
        return result

    def call_workers(
        self, method: str, /, *args: Any, epoch: int | None = None, **kwargs: Any
    ) -> list[Any]:
        if self._dealer is None or method != "train_epoch" or self._group is None:
            return super().call_workers(method, *args, epoch=epoch, **kwargs)
        return self._dealer.train(self._group, args, kwargs, epoch)

    def _train_epoch(self, epoch: int) -> dict[str, Any]:
        self._in_sync = False  # a checkpoint from within has every worker's own weights
        return super()._train_epoch(epoch)

    def _after_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        # Also for an overridden train_epoch that started a sync and did not wait for it: the server
        # answers in order, so after this answer every sync is over, and its error is known.
        stats = self.get_sync_stats()
        self._in_sync = stats["num_syncs"] > self._syncs_seen or self._made_good
        self._syncs_seen, self._made_good = stats["num_syncs"], False
        if stats["last_error"] and stats["failed_syncs"] > self._failures_seen:
            text = f"sync in epoch {epoch} failed: {stats['last_error']}"
            raise MinirayError(text, epoch=epoch)
        in_turn = (epoch + 1) % self.sync_interval == 0
        result["synced"] = self._in_sync if self._async is None else in_turn
        if self._dealer is not None:
            assert self._group is not None
            self._dealer.note(self._group)
        super()._after_epoch(epoch, result)

    def _loop(self, epochs: int) -> None:
        super()._loop(epochs)
        if self._async is not None:
            self._async.settle()  # after an early stop some may be in an epoch ahead

    # -- workers ----------------------------------------------------------------------------------

    def _create(self, worker_id: int) -> Any:
        with contextlib.nullcontext() if self._dealer is None else adapting(dealt_spec):
            return super()._create(worker_id)

    def _set_up_all(self) -> None:
        group = self._group
        assert group is not None
        self.param_server = create_parameter_server(
            **self._server_options, **self._strategy_options
        )
        self._syncs_seen = self._failures_seen = 0
        self._tell_worker_weights()
        if self._dealer is not None:
            self._dealer.deal(group, self._kwargs)
        elif group.has("load_data_shard"):
            count = self.num_workers
            group.call("load_data_shard", lambda i: (i, count), self._kwargs)
        first = begin_with(group, self.param_server)
        self._server_ready = True
        if self._initial_sync:
            self._give("set_weights", dict.fromkeys(range(1, self.num_workers), first))
        self._in_sync = self._initial_sync
        if self.mode == "async":
            self._async = AsyncEpochs(
                group, self.param_server, self.sync_interval, self.staleness, self.epoch
            )

    def _set_up_worker(self, worker_id: int) -> None:
        """A replacement gets its predecessor's shard and the latest combined weights."""
        group = self._group
        assert group is not None
        if self._dealer is not None:
            self._dealer.deal_one(group, worker_id, self._kwargs)
        elif group.has("load_data_shard"):
            shard = (worker_id, self.num_workers)
            group.set_up_call(worker_id, "load_data_shard", *shard, **self._kwargs)
        if not self._server_ready:  # it is lost while workers are set up: none has trained
            return
        weights = self.param_server.get_weights.remote()
        session.engine().peek(weights)  # the server's error, if it is one, and not the worker's
        group.set_up_call(worker_id, "set_weights", weights)

    # -- the model, checkpoints -------------------------------------------------------------------

    def model_weights(self) -> Any:
        """The trained weights: worker 0's, or with ``mode="async"`` those of the server."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        if self._async is not None:
            return miniray.get(self.param_server.get_weights.remote())
        return miniray.get(self._group.ref_of(0, "get_weights"))

    def _write_pretrained(
        self, directory: str | None, send_files: bool, *weights: Any
    ) -> SavedFiles:
        if self._async is not None and directory is not None:
            weights = (self.param_server.get_weights.remote(),)
        return super()._write_pretrained(directory, send_files, *weights)

    def _with_final_weights(self) -> contextlib.AbstractContextManager[None]:
        if self._async is None:
            return super()._with_final_weights()
        return self._async.at_rest_with(self.param_server.get_weights.remote())

    def _take_up(self, state: dict[str, Any]) -> None:
        if self._async is not None:
            self._async.settle()  # what workers still hand in is of the time after the checkpoint
        super()._take_up(state)

    def _workers_in_sync(self) -> bool:
        return self._in_sync and self._async is None

    def _extra_state(self) -> dict[str, Any]:
        positions = self._async.settle() if self._async is not None else None
        return {
            "strategy": self.sync_strategy,
            "server": miniray.get(self.param_server.get_state.remote()),
            "worker_weights": {str(k): v for k, v in self._worker_weights.items()},
            "async": positions,
            "data": None if self._dealer is None else self._dealer.state(),
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        before = state.get("strategy")
        if before == self.sync_strategy:
            miniray.get(self.param_server.set_state.remote(state["server"]))
        else:
            was = f"was made with sync_strategy={before!r}" if before else "has no sync strategy"
            self._tell_of_change(
                "resumed_with_other_strategy",
                f"the checkpoint {was}; this run goes on with {self.sync_strategy!r}, which begins "
                "without what the one before remembered",
            )
            weights = self.workers[0].get_weights.remote()
            miniray.get(self.param_server.set_weights.remote(weights))
        if self._takes_worker_weights:
            for worker, weight in state.get("worker_weights", {}).items():
                if int(worker) < self.num_workers:  # what was said since then counts more
                    self._worker_weights.setdefault(int(worker), weight)
            self._tell_worker_weights()
        self._syncs_seen = self.get_sync_stats()["num_syncs"]
        if self._async is not None:
            self._async.restore(self.epoch, state.get("async"))
        if self._dealer is not None and state.get("data") is not None:
            assert self._group is not None
            self._dealer.load(self._group, state["data"])

    def _make_result(self, *args: Any, **more: Any) -> TrainResult:
        return super()._make_result(*args, sync=self.get_sync_stats(), **more)

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            "sync_interval": self.sync_interval,
            "sync_strategy": self.sync_strategy,
            "strategy_options": {k: repr(v) for k, v in self._strategy_options.items()},
            "mode": self.mode,
        }

    def shutdown(self) -> None:
        server, self.param_server = self.param_server, None
        self._server_ready = False
        self._async = None
        super().shutdown()
        if server is not None:
            end(server)


def check_trainer_options(
    trainer: type, strategy: str | Strategy, given: Mapping[str, Any], hints: Mapping[str, str]
) -> None:
    """Raise ``TypeError`` for an option that neither the trainer nor its strategy has."""
    options = strategy_options(strategy)
    if options is None:  # it accepts any option, or doesn't exist
        return
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
