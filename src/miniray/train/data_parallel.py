"""``DataParallelTrainer``: every worker trains on its shard, a parameter server combines them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import miniray
from miniray.errors import ActorDiedError, GetTimeoutError, SyncError
from miniray.ps import check_strategy, create_parameter_server
from miniray.train.base import BaseTrainer
from miniray.train.results import aggregate
from miniray.train.workers import REQUIRED_METHODS, accepted, method_spec

#: Options of the parameter server besides its strategy's.
_SERVER_OPTIONS = ("num_servers", "compression", "on_nonfinite")


class DataParallelTrainer(BaseTrainer):
    """Trains copies of one model on shards of the data and combines their weights.

    Args:
        num_workers: how many.
        sync_interval: combine the weights every so many epochs.
        sync_strategy: how; see ``miniray.ps``. Further arguments of the strategy (``momentum=0.9``)
            are given by keyword here, and so are all options of ``BaseTrainer`` and
            ``num_servers``, ``compression`` and ``on_nonfinite`` of the parameter server.
        initial_sync: begin with worker 0's weights on every worker. Averaging networks that began
            differently is useless.

    What is reported as synced was synced: the trainer waits for it, and an error ends the run.
    """

    required_methods = REQUIRED_METHODS

    def __init__(
        self,
        num_workers: int = 4,
        sync_interval: int = 1,
        sync_strategy: str = "average",
        *,
        initial_sync: bool = True,
        **kwargs: Any,
    ) -> None:
        if (
            isinstance(sync_interval, bool)
            or not isinstance(sync_interval, int)
            or sync_interval < 1
        ):
            raise ValueError(f"sync_interval must be an int >= 1, not {sync_interval!r}")
        names = inspect.signature(BaseTrainer.__init__).parameters
        super().__init__(num_workers, **{k: v for k, v in kwargs.items() if k in names})
        rest = {k: v for k, v in kwargs.items() if k not in names}
        self._server_options = {k: rest.pop(k) for k in _SERVER_OPTIONS if k in rest}
        self._strategy_options = rest
        check_strategy(sync_strategy, rest)
        self.sync_interval = sync_interval
        self.sync_strategy = sync_strategy
        self.param_server: Any = None
        self._initial_sync = initial_sync
        self._worker_weights: dict[int, float] = {}
        self._syncs_seen = 0
        self._in_sync = False
        self._last_stats: dict[str, Any] = {}

    # -- what users call --------------------------------------------------------------------------

    def set_worker_weight(self, worker_id: int, weight: float) -> None:
        """How much a worker counts with ``sync_strategy="weighted"``; before or after ``train``."""
        if self.sync_strategy != "weighted":
            raise ValueError(
                f'set_worker_weight() needs sync_strategy="weighted"; it is {self.sync_strategy!r}'
            )
        if not 0 <= worker_id < self.num_workers:
            raise ValueError(
                f"there is no worker {worker_id}: there are {self.num_workers}, from 0"
            )
        if not weight >= 0:
            raise ValueError(f"a weight must be a number >= 0, not {weight!r}")
        self._worker_weights[worker_id] = float(weight)
        if self.param_server is not None:
            miniray.get(self.param_server.set_worker_weight.remote(worker_id, float(weight)))

    def get_sync_stats(self) -> dict[str, Any]:
        """Number of syncs, bytes, seconds, how far the workers were apart; see ``miniray.ps``."""
        if self.param_server is not None:
            self._last_stats = miniray.get(self.param_server.get_stats.remote())
        return dict(self._last_stats)

    def sync_parameters(self, epoch: int | None = None) -> dict[str, Any]:
        """Combine the workers' weights now and wait for it; returns the sync's figures.

        A worker that died or hangs is replaced within ``max_failures`` and the sync repeated.
        """
        assert self._group is not None
        while True:
            ref = self.param_server.sync_from_workers.remote(self.workers)
            try:
                stats: dict[str, Any] = miniray.get(ref, timeout=self._worker_timeout)
            except (ActorDiedError, GetTimeoutError, SyncError):
                before = self._group.failures
                # Finds out who it is, replaces it or raises what the user should see.
                self._group.call("get_weights", lambda _: (), {}, epoch)
                if self._group.failures == before:
                    raise  # all workers are well: it is an error of their code, or the server's end
            else:
                return stats

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on every worker, aggregate the results, sync when it is time to."""
        result = aggregate(self.call_workers("train_epoch", epoch, epoch=epoch, **kwargs))
        if (epoch + 1) % self.sync_interval == 0:
            self.sync_parameters(epoch)
        return result

    def _after_epoch(self, epoch: int, result: dict[str, Any]) -> None:
        # Also for an overridden train_epoch that started a sync and did not wait for it: the server
        # answers in order, so after this answer every sync is over, and its error is known.
        stats = self.get_sync_stats()
        self._in_sync = stats["num_syncs"] > self._syncs_seen
        self._syncs_seen = stats["num_syncs"]
        if stats["last_error"]:
            raise miniray.errors.MinirayError(
                f"sync in epoch {epoch} failed: {stats['last_error']}"
            )
        result["synced"] = self._in_sync
        super()._after_epoch(epoch, result)

    # -- workers ----------------------------------------------------------------------------------

    def _set_up_all(self) -> None:
        self.param_server = create_parameter_server(
            self.sync_strategy, **self._server_options, **self._strategy_options
        )
        for worker_id, weight in self._worker_weights.items():
            miniray.get(self.param_server.set_worker_weight.remote(worker_id, weight))
        assert self._group is not None
        if self._group.has("load_data_shard"):
            count = self.num_workers
            self._group.call("load_data_shard", lambda i: (i, count), self._kwargs)
        first = self.workers[0].get_weights.remote()
        followers = self.workers[1:] if self._initial_sync else []
        miniray.get(
            [
                self.param_server.set_weights.remote(first),
                *(worker.set_weights.remote(first) for worker in followers),
            ]
        )
        self._in_sync = self._initial_sync

    def _set_up_worker(self, worker_id: int) -> None:
        """A replacement gets its predecessor's shard and the latest combined weights."""
        worker = self.workers[worker_id]
        spec = method_spec(worker, "load_data_shard")
        if spec is not None:
            taken = accepted(spec.signature, self._kwargs)
            miniray.get(worker.load_data_shard.remote(worker_id, self.num_workers, **taken))
        miniray.get(worker.set_weights.remote(self.param_server.get_weights.remote()))

    # -- checkpoints ------------------------------------------------------------------------------

    def _workers_in_sync(self) -> bool:
        return self._in_sync

    def _extra_state(self) -> dict[str, Any]:
        return {
            "strategy": self.sync_strategy,
            "server": miniray.get(self.param_server.get_state.remote()),
            "worker_weights": {str(k): v for k, v in self._worker_weights.items()},
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        if state.get("strategy") == self.sync_strategy:
            miniray.get(self.param_server.set_state.remote(state["server"]))
            self._syncs_seen = self.get_sync_stats()["num_syncs"]

    def _sync_stats(self) -> dict[str, Any]:
        return self.get_sync_stats()

    def _describe(self) -> dict[str, Any]:
        return {
            **super()._describe(),
            "sync_interval": self.sync_interval,
            "sync_strategy": self.sync_strategy,
            "strategy_options": {k: repr(v) for k, v in self._strategy_options.items()},
        }

    def shutdown(self) -> None:
        server, self.param_server = self.param_server, None
        if server is not None and self._owned_session is None and miniray.is_initialized():
            miniray.kill(server)
        super().shutdown()
