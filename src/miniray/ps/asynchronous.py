"""The asynchronous server: each push takes effect at once, and nobody waits for a slow worker.

A worker's push moves the weights towards its own:

    w ← w + rate·(pushed − w),    rate = share·(1 + τ)^(−staleness_power)

``share`` is the worker's weight over the sum of the weights of all known workers (1/n if none was
set); τ is the number of other pushes since this worker's last one. With a strategy such as
``momentum`` the step goes through it as the change of a sync would. The rule with
``staleness_power`` above 0 is that of Xie et al., "Asynchronous Federated Optimization" (FedAsync),
https://arxiv.org/abs/1903.03934.

Bounded staleness (Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel
Parameter Server", NIPS 2013): the push of a worker that is more than ``max_staleness`` pushes ahead
of the slowest takes effect at once too, but returns only when the slowest has caught up. A worker
that is gone would hold up the others for ever: ``set_worker_weight(worker_id, 0)`` takes it out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from miniray.core import session
from miniray.errors import CapabilityError, NonFiniteWeightsError
from miniray.ps.combine import NotFiniteError, Tally
from miniray.ps.leaves import Source, combine_counts
from miniray.ps.model import Given, Model
from miniray.ps.server import Server
from miniray.ps.strategies.base import Strategy


class AsyncServer(Server):
    """A server whose pushes take effect one by one. Calls overlap; each step is atomic."""

    mode = "async"

    def __init__(
        self,
        strategy: Strategy,
        *,
        num_workers: int | None,
        max_staleness: int | None,
        staleness_power: float,
        **options: Any,
    ) -> None:
        super().__init__(strategy, num_workers=None, **options)
        self._max_staleness = max_staleness
        self._staleness_power = staleness_power
        #: Pushes of each worker: its clock. Workers named by ``num_workers`` count from the start.
        self._clocks: dict[Hashable, int] = dict.fromkeys(range(num_workers or 0), 0)
        self._seen: dict[Hashable, int] = {}
        self._moved = asyncio.Condition()
        self._waiting = 0

    def _make_model(self, on_nonfinite: str, threads: int | None) -> MovingModel:
        return MovingModel(self._strategy, on_nonfinite, threads)

    async def push_weights(self, worker_id: Hashable, weights: Any) -> int:  # type: ignore[override]
        """Move the weights towards the worker's, at once; returns the version.

        Returns later when the worker is too far ahead of the slowest. Weights that do not fit or
        are not finite raise and change nothing; with ``on_nonfinite="skip"`` they are counted in
        ``skipped`` and the worker's clock goes on.
        """
        start = time.perf_counter()
        self._clocks.setdefault(worker_id, min(self._clocks.values(), default=0))
        try:
            if self._weight(worker_id) > 0:
                self._apply(worker_id, weights)
        except BaseException as error:
            self._stats.failed(error)
            raise
        self._stats.num_pushes += 1
        self._stats.seconds["combine"] += time.perf_counter() - start
        self._stats.last_seconds["combine"] = time.perf_counter() - start
        self._clocks[worker_id] += 1
        self._seen[worker_id] = version = self._version
        async with self._moved:
            self._moved.notify_all()
            await self._wait_for_others(worker_id)
        return version

    def _apply(self, worker_id: Hashable, weights: Any) -> None:
        rate = self._share(worker_id)
        staleness = self._version - self._seen.get(worker_id, self._version)
        if self._staleness_power:
            rate *= (1 + staleness) ** -self._staleness_power
        self._stats.num_workers = len(self._clocks)
        assert isinstance(self._model, MovingModel)
        tally = self._model.moved(worker_id, weights, rate)
        if tally is None:
            self._stats.skipped[worker_id] += 1
            return
        self._version += 1
        self._stats.last_change_norm = tally.change**0.5
        self._stats.last_bytes = self._model.nbytes
        self._stats.bytes += self._model.nbytes
        self._stats.last_error = None

    def _share(self, worker_id: Hashable) -> float:
        total = sum(self._weight(worker) for worker in self._clocks)
        return self._weight(worker_id) / total

    def _ahead(self, worker_id: Hashable) -> int:
        """How far a worker is ahead of the slowest one that counts."""
        clocks = [c for worker, c in self._clocks.items() if self._weight(worker) > 0]
        return self._clocks[worker_id] - min(clocks) if clocks else 0

    async def _wait_for_others(self, worker_id: Hashable) -> None:
        limit = self._max_staleness
        if limit is None or self._weight(worker_id) == 0:
            return
        if self._ahead(worker_id) > limit and not session.engine().capabilities.concurrent:
            raise CapabilityError(
                f"worker {worker_id} is more than max_staleness={limit} pushes ahead and would "
                "have to wait, which cannot work on the inline engine; local and ray can"
            )
        self._waiting += 1
        try:
            await self._moved.wait_for(
                lambda: self._ahead(worker_id) <= limit or self._weight(worker_id) == 0
            )
        finally:
            self._waiting -= 1

    async def set_worker_weight(self, worker_id: Hashable, weight: float) -> None:  # type: ignore[override]
        """As for a synchronous server, but with any strategy; 0 ends the waiting for a worker."""
        super().set_worker_weight(worker_id, weight)
        async with self._moved:
            self._moved.notify_all()

    def _takes_worker_weights(self) -> bool:
        return True

    def get_stats(self) -> dict[str, Any]:
        """As for a synchronous server, with ``clocks``, pushes by worker, and who waits."""
        return {
            **super().get_stats(),
            "max_staleness": self._max_staleness,
            "clocks": dict(self._clocks),
            "waiting": self._waiting,
        }

    def pull_weights(self) -> Any:
        """The weights as they are now. Raises ``ValueError`` when there are none yet."""
        return self.get_weights()


class MovingModel(Model):
    """A model that can also be moved towards one worker's weights."""

    #: The current weights if this object owns their memory, instead of the object store.
    _own_sources: Sequence[Source] | None = None
    #: Memory for the next weights, of the same size.
    _spare: Sequence[Source]

    def moved(self, worker: Hashable, weights: Any, rate: float) -> Tally | None:
        """Move the current weights towards one worker's. The first become the current.

        Return None if they aren't finite and ``on_nonfinite`` is ``"skip"``. An error leaves the
        current weights and the strategy's buffers unchanged.
        """
        given = Given(worker, weights)
        workers = self._checked([given])
        where = self._broken(given, workers[0])
        if where is not None:
            if self._on_nonfinite == "skip":
                return None
            raise NonFiniteWeightsError(
                f"{given.who}: entry {where} has NaN or Inf", (given.worker,), entry=where
            )
        if not self.has_weights:
            self._own(weights)
            return Tally(0.0, np.zeros(1))
        if self._sources is not self._own_sources:
            self._own(self.weights)
        assert self._sources is not None
        tally = Tally(0.0, np.zeros(1))
        for combiner in (self._small, self._large):
            targets = [self._spare[r.leaf] for r in combiner.ranges]
            try:
                tally += combiner.combine(self._sources, workers, [1.0], targets, rate)
            except NotFiniteError as error:
                raise NonFiniteWeightsError(
                    f"The push of {given.who} would make entry {error.place} of the server's "
                    "weights NaN or Inf: numbers became too large. The server's weights are "
                    "unchanged. Lower the learning rate of the strategy or of the worker.",
                    entry=error.place,
                ) from None
        for i in self._counts:
            both = [self._sources[i], workers[0][i]]
            self._spare[i][:] = combine_counts(both, [1 - rate, rate])
        self._small.commit()
        self._large.commit()
        self._spare, self._sources = self._sources, self._spare
        self._own_sources = self._sources
        self._show()
        return tally

    def _own(self, weights: Any) -> None:
        """Make a copy of ``weights`` the current ones, and reserve memory for the next."""
        assert self.layout is not None
        sources = self.layout.extract(weights, "the server", "the server")
        self._sources, self._spare = (
            [s.copy() if isinstance(s, np.ndarray) else s.clone() for s in sources]
            for _ in range(2)
        )
        self._own_sources = self._sources
        self._show()

    def _show(self) -> None:
        assert self.layout is not None
        assert self._sources is not None
        pairs = zip(self.layout.leaves, self._sources, strict=True)
        self._weights = self.layout.build([self.layout.shown(leaf, s) for leaf, s in pairs])
        self.ref = self._stored = None
