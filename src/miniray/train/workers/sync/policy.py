"""``SyncPolicy``: combine the weights of the workers on a parameter server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import miniray
from miniray.checks import check_bool, check_int
from miniray.core import session
from miniray.counting import format_epoch
from miniray.errors import MinirayError
from miniray.ps import Strategy, create_parameter_server
from miniray.ps.create import check_parameter_server
from miniray.ps.strategies.base import at_least
from miniray.train.options import warn
from miniray.train.workers.checkpoint_parts import WeightSync
from miniray.train.workers.group import NO_WORKERS, WorkerGroup, end
from miniray.train.workers.sync.repair import sync


class SyncPolicy(WeightSync):
    """Average the parameters of all workers every ``interval`` epochs.

    It is a ``WorkerSetup``: new workers start with the weights of worker 0, replacements with those
    of the server. It is the part ``sync`` of checkpoints.

    Args:
        num_workers: Number of workers.
        strategy: Name of a strategy of ``miniray.ps``, or a ``Strategy``.
        interval: Number of epochs between two syncs.
        initial_sync: Copy the weights of worker 0 to all workers at the start.
        server_options: Further options of ``create_parameter_server``, with those of the strategy.

    Attributes:
        server: The parameter server, an actor. None if no workers exist.
        strategy: Name of the strategy.
    """

    #: Whether workers train without waiting for each other.
    mode = "sync"

    def __init__(
        self,
        num_workers: int,
        *,
        strategy: str | Strategy = "average",
        interval: int = 1,
        initial_sync: bool = True,
        server_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.interval = check_int("sync_interval", interval, 1)
        self.num_workers = num_workers
        self.server: Any = None
        self._server_options = {**(server_options or {}), "strategy": strategy, "mode": self.mode}
        made = check_parameter_server(**{**self._server_options, "num_workers": num_workers})
        self.strategy: str = made.name or type(made).__name__
        self._uses_worker_weights = made.uses_worker_weights or self.mode == "async"
        self._initial_sync = check_bool("initial_sync", initial_sync)
        self._group: WorkerGroup | None = None
        self._worker_weights: dict[int, float] = {}
        self._has_weights = False  # whether the server has weights
        self._is_in_sync = False
        self._was_repaired = False  # since the last settle()
        self._num_syncs = self._num_repaired = 0  # as of the last settle(), and repair
        self._last_stats: dict[str, Any] = {}

    # -- workers ----------------------------------------------------------------------------------

    def start(self, group: WorkerGroup) -> None:
        """Start the server with the weights of worker 0, and copy them to all workers.

        Raises:
            TypeError: The weights aren't arrays that can be combined.
            ValueError: The same, for their values.
        """
        self._group = group
        self.server = create_parameter_server(**self._server_options)
        self._num_syncs = self._num_repaired = 0
        self._send_worker_weights()
        first = group.ref_of(0, "get_weights")
        try:
            miniray.get(self.server.set_weights.remote(first))
        except (TypeError, ValueError) as error:  # the server doesn't know the worker
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"worker 0, get_weights(): {getattr(error, 'cause', error)}") from None
        self._has_weights = True
        if self._initial_sync:
            group.map("set_weights", dict.fromkeys(range(1, self.num_workers), first))
        self._is_in_sync = self._initial_sync

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Set the weights of the server on a replacement, once the server has weights."""
        if not self._has_weights:  # no worker has trained
            return
        weights = self.server.get_weights.remote()
        session.engine().peek(weights)  # an error of the server isn't one of the worker
        group.set_up_call(worker_id, "set_weights", weights)

    def stop(self) -> None:
        """Stop the server, after the workers."""
        server, self.server = self.server, None
        self._group = None
        self._has_weights = False
        if server is not None:
            end(server)

    # -- epochs -----------------------------------------------------------------------------------

    def is_due(self, epoch: int) -> bool:
        """Return whether a sync follows this epoch."""
        return (epoch + 1) % self.interval == 0

    def start_epoch(self) -> None:
        """Note that workers are about to change their weights."""
        self._is_in_sync = False

    def sync(self, epoch: int | None = None) -> dict[str, Any]:
        """Combine the weights of all workers, wait until all have them, and return statistics.

        A worker that crashes or hangs is replaced within ``max_failures``. Afterwards, all workers
        have the weights of the server; ``repair`` says which ones.
        """
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        stats, was_repaired = sync(self._group, self.server, self._group.timeout, epoch)
        if was_repaired:
            self._was_repaired = True
            self._num_repaired = self.get_stats()["failed_syncs"]
        return stats

    def settle(self, epoch: int) -> bool:
        """Wait for all syncs of the epoch, and return whether the workers are in sync.

        A ``train_epoch`` of the user may have started a sync without waiting for it. The server
        answers in order, so its answer follows the last sync.

        Raises:
            MinirayError: A sync failed.
        """
        stats = self.get_stats()
        self._is_in_sync = stats["num_syncs"] > self._num_syncs or self._was_repaired
        self._num_syncs, self._was_repaired = stats["num_syncs"], False
        if stats["last_error"] and stats["failed_syncs"] > self._num_repaired:
            text = f"sync in {format_epoch(epoch)} failed: {stats['last_error']}"
            raise MinirayError(text, epoch=epoch)
        return self._is_in_sync

    @property
    def is_in_sync(self) -> bool:
        """Whether all workers have the same weights."""
        return self._is_in_sync

    def get_weights(self) -> Any:
        """Return the weights of worker 0, which is replaced if it is lost."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return miniray.get(self._group.ref_of(0, "get_weights"))

    # -- settings and statistics ------------------------------------------------------------------

    def set_worker_weight(self, worker_id: int, weight: float) -> None:
        """Set the weight of a worker in the average, now or when the server starts. Default: 1.

        Raises:
            ValueError: The strategy doesn't use the weights, or the worker doesn't exist.
        """
        if not self._uses_worker_weights:
            raise ValueError(
                f"set_worker_weight() has no effect with sync_strategy={self.strategy!r}. Use "
                '"weighted" or a different strategy that is based on the weighted mean'
            )
        if worker_id not in range(self.num_workers):
            raise ValueError(
                f"worker {worker_id!r} doesn't exist. There are {self.num_workers} workers, from 0"
            )
        self._worker_weights[worker_id] = at_least("a worker's weight", weight, 0)
        if self.server is not None:
            self._send_worker_weights()

    def _send_worker_weights(self) -> None:
        send = self.server.set_worker_weight
        miniray.get([send.remote(worker, w) for worker, w in self._worker_weights.items()])

    def get_stats(self) -> dict[str, Any]:
        """Return the number of syncs, bytes, seconds and distances; see ``miniray.ps``."""
        if self.server is not None:
            self._last_stats = miniray.get(self.server.get_stats.remote())
        return dict(self._last_stats)

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the server and the weights of the workers."""
        return {
            "strategy": self.strategy,
            "server": miniray.get(self.server.get_state.remote()),
            "worker_weights": {str(k): v for k, v in self._worker_weights.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the server. With a different strategy, it starts with the workers' weights."""
        before = state["strategy"]
        if before == self.strategy:
            miniray.get(self.server.set_state.remote(state["server"]))
        else:
            self._restart_strategy(f"was made with sync_strategy={before!r}")
        if self._uses_worker_weights:
            for worker, weight in state["worker_weights"].items():
                if int(worker) < self.num_workers:  # weights set since then take precedence
                    self._worker_weights.setdefault(int(worker), weight)
            self._send_worker_weights()
        self._num_syncs = self.get_stats()["num_syncs"]

    def load_missing_state(self) -> None:
        """Continue from a checkpoint of a trainer that didn't sync."""
        self._restart_strategy("has no sync strategy")
        self._num_syncs = self.get_stats()["num_syncs"]

    def _restart_strategy(self, reason: str) -> None:
        assert self._group is not None
        text = (
            f"the checkpoint {reason}; this run continues with {self.strategy!r}, which starts "
            "without the state of the previous strategy"
        )
        warn(text)
        self._group.on_event({"event": "resumed_with_other_strategy", "message": text})
        weights = self._group.handles[0].get_weights.remote()
        miniray.get(self.server.set_weights.remote(weights))

    def describe(self) -> dict[str, Any]:
        """Return the configuration for ``run.json``."""
        return {"sync_interval": self.interval, "sync_strategy": self.strategy, "mode": self.mode}
