"""``ParameterServer``: an actor that holds weights and combines those of workers into them.

What fails leaves everything as it was: the weights, their version, and what the strategy remembers.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import miniray
from miniray.core.remote import ActorHandle
from miniray.ps.collect import Collector, Round, failure
from miniray.ps.combine import Tally
from miniray.ps.model import Combined, Given, Model
from miniray.ps.reading import UnreadableError
from miniray.ps.state import load_state, save_state
from miniray.ps.strategies.base import Strategy, at_least

#: After one worker did not take the weights, how long to wait to learn about the others.
_GRACE = 5.0
PHASES = ("collect", "combine", "distribute")


@dataclasses.dataclass
class Stats:
    """What a server counts: totals since it started, and the last sync."""

    num_syncs: int = 0
    failed_syncs: int = 0
    num_pushes: int = 0
    num_workers: int = 0
    bytes: int = 0
    last_bytes: int = 0
    seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )
    last_seconds: dict[str, float] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(PHASES, 0.0)
    )
    last_change_norm: float | None = None
    divergence: dict[str, float] | None = None
    transport: dict[int, str] = dataclasses.field(default_factory=dict)
    skipped: Counter[Any] = dataclasses.field(default_factory=Counter)
    last_error: str | None = None

    def measured(self, tally: Tally, first: bool) -> None:
        """The last change is unknown after the first sync: there was nothing to change."""
        self.last_change_norm = None if first else math.sqrt(tally.change)
        apart = [math.sqrt(max(square, 0.0)) for square in tally.distances]
        self.divergence = {"max": max(apart), "mean": sum(apart) / len(apart)}

    def synced(self, workers: int, bytes: int, seconds: dict[str, float]) -> None:
        self.num_syncs += 1
        self.num_workers = workers
        self.bytes += bytes
        self.last_bytes = bytes
        self.last_seconds = seconds
        for phase, value in seconds.items():
            self.seconds[phase] += value
        self.last_error = None

    def failed(self, error: BaseException) -> None:
        self.failed_syncs += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def as_dict(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        found["skipped"] = dict(self.skipped)
        return found


class Server:
    """The server itself, an ordinary class. See ``ParameterServer`` for how to start one."""

    mode = "sync"

    def __init__(
        self,
        strategy: Strategy,
        *,
        on_nonfinite: str,
        num_workers: int | None,
        threads: int | None,
        transport: str,
    ) -> None:
        self._strategy = strategy
        self._num_workers = num_workers
        self._model = self._make_model(on_nonfinite, threads)
        self._collector = Collector(self._model, transport)
        self._version = 0
        self._stats = Stats()
        self._worker_weights: dict[Hashable, float] = {}
        self._pushed: dict[Hashable, Any] = {}

    def _make_model(self, on_nonfinite: str, threads: int | None) -> Model:
        return Model(self._strategy, on_nonfinite, threads)

    # -- workers that are called -------------------------------------------------------------------

    def sync_from_workers(self, workers: Sequence[ActorHandle[Any]]) -> dict[str, Any]:
        """Get the weights of all workers, combine them, give all of them the result.

        Returns what this sync did: ``synced`` (True), ``version``, ``num_workers``, ``bytes``,
        ``seconds``, ``change_norm``, ``divergence`` and ``skipped``.

        A worker that raises is a ``SyncError`` naming it, one that died a ``WorkerLostError`` (also
        an ``ActorDiedError``); weights that do not fit are a
        ``WeightsMismatchError``, NaN a ``NonFiniteWeightsError``. Each leaves the server's weights
        as they were and is in ``get_stats()["last_error"]``. Until all workers have been given the
        new weights none is changed; if one then fails to take them, the others may have them.
        """
        try:
            _check_workers(workers)
            times = [time.perf_counter()]
            with self._collector.round(workers) as round:
                given = round.collect()
                times.append(time.perf_counter())
                new = self._combined(round, given)
                round.confirm()
            del given  # the workers' memory is theirs to use again
            times.append(time.perf_counter())
            self._distribute(workers, new)
            times.append(time.perf_counter())
        except BaseException as error:
            self._stats.failed(error)
            raise
        seconds = dict(zip(PHASES, (b - a for a, b in itertools.pairwise(times)), strict=True))
        self._stats.transport = round.transport
        self._adopt(new, len(workers), seconds, moved=2 * len(workers))
        return {
            "synced": True,
            "version": self._version,
            "num_workers": len(new.used),
            "bytes": self._stats.last_bytes,
            "seconds": seconds,
            "change_norm": self._stats.last_change_norm,
            "divergence": self._stats.divergence,
            "skipped": new.skipped,
        }

    def _combined(self, round: Round, given: list[Given]) -> Combined:
        shares = [self._weight(i) for i in range(len(given))]
        try:
            return self._model.combined(given, shares)
        except UnreadableError as error:
            reason = str(error)
        # Not inside the handler: the error holds the memory that was meant for the result.
        return self._model.combined(round.copies(reason), shares)

    def _distribute(self, workers: Sequence[ActorHandle[Any]], new: Combined) -> None:
        refs = [worker.set_weights.remote(new.ref) for worker in workers]
        errors: dict[int, Exception] = {}
        pending, limit = list(refs), None
        while pending:
            ready, pending = miniray.wait(pending, timeout=limit)
            for ref in ready:
                try:
                    miniray.get(ref)
                except Exception as error:  # whatever the worker's code raises
                    errors[refs.index(ref)] = error
                    limit = _GRACE
            if not ready:
                break
        if errors:
            ordered = dict(sorted(errors.items()))
            raise failure(ordered, "set_weights", "distribute") from next(iter(ordered.values()))

    # -- workers that call -------------------------------------------------------------------------

    def push_weights(self, worker_id: Hashable, weights: Any) -> int:
        """Hand in a worker's weights; a second push before they are used replaces the first.

        They are combined with those of the others by the next ``pull_weights``; if the server knows
        ``num_workers``, by the push that completes the round. Returns the version.
        """
        self._pushed[worker_id] = weights
        self._stats.num_pushes += 1
        if self._num_workers is not None and len(self._pushed) >= self._num_workers:
            self._combine_pushed()
        return self._version

    def pull_weights(self) -> Any:
        """The weights, with what was pushed since the last time.

        With ``num_workers`` a round that is not complete is not combined. Raises ``ValueError``
        when there are no weights yet, and what ``sync_from_workers`` raises about weights; what was
        pushed is dropped then.
        """
        if self._pushed and self._num_workers is None:
            self._combine_pushed()
        return self.get_weights()

    def _combine_pushed(self) -> None:
        pushed, self._pushed = self._pushed, {}
        start = time.perf_counter()
        try:
            given = [Given(worker, weights) for worker, weights in pushed.items()]
            new = self._model.combined(given, [self._weight(g.worker) for g in given])
        except BaseException as error:
            self._stats.failed(error)
            raise
        seconds = {"collect": 0.0, "combine": time.perf_counter() - start, "distribute": 0.0}
        self._adopt(new, len(given), seconds, moved=len(given))

    # -- the weights themselves --------------------------------------------------------------------

    def get_weights(self) -> Any:
        """The weights as they are. Raises ``ValueError`` when there are none yet."""
        if not self._model.has_weights:
            raise ValueError(
                "the server has no weights yet: call set_weights, push_weights or "
                "sync_from_workers first"
            )
        return self._model.weights

    def set_weights(self, weights: Any) -> int:
        """Start from these weights. Returns the version.

        The strategy keeps what it remembers if they have the structure of the old ones.
        """
        self._model.set(weights)
        self._version += 1
        return self._version

    def set_worker_weight(self, worker_id: Hashable, weight: float) -> None:
        """How much a worker counts from now on, 1 if never said; 0 leaves it out.

        ``worker_id`` is the position in the list given to ``sync_from_workers``, or the name used
        for ``push_weights``. Raises ``ValueError`` with a strategy that has no use for it.
        """
        if not self._takes_worker_weights():
            raise ValueError(
                f"strategy {self._strategy.name!r} counts all workers the same; "
                'set_worker_weight needs "weighted" or another one that is based on the mean'
            )
        self._worker_weights[worker_id] = at_least(f"the weight of worker {worker_id!r}", weight, 0)

    def _takes_worker_weights(self) -> bool:
        return self._strategy.uses_worker_weights

    def _weight(self, worker_id: Hashable) -> float:
        return self._worker_weights.get(worker_id, 1.0)

    # -- about itself ------------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """Counters and times; see the user guide for each of them."""
        return {
            "version": self._version,
            "strategy": self._strategy.name,
            "options": self._strategy.options(),
            "mode": self.mode,
            "model_bytes": self._model.nbytes,
            "worker_weights": dict(self._worker_weights),
            **self._stats.as_dict(),
        }

    def get_state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: dicts and lists of arrays, numbers and strings."""
        return save_state(self._model, self._version, self._worker_weights)

    def set_state(self, saved: dict[str, Any]) -> None:
        """Continue from ``get_state``.

        Raise ``ValueError`` if it isn't a valid state of this strategy; nothing changes then.
        """
        self._version, self._worker_weights = load_state(self._model, saved)

    def _adopt(self, new: Combined, workers: int, seconds: dict[str, float], moved: int) -> None:
        first = not self._model.has_weights
        self._model.adopt(new)
        self._version += 1
        self._stats.measured(new.tally, first)
        self._stats.skipped.update(new.skipped)
        self._stats.synced(workers, moved * self._model.nbytes, seconds)


def _check_workers(workers: Any) -> None:
    if not isinstance(workers, (list, tuple)):
        raise TypeError(f"workers must be a list of actor handles, not {type(workers).__name__}")
    if not workers:
        raise ValueError("there are no workers to sync")
    for i, worker in enumerate(workers):
        if not isinstance(worker, ActorHandle):
            raise TypeError(f"worker {i} is not an actor handle but {type(worker).__name__}")
        for method in ("get_weights", "set_weights"):
            if not hasattr(worker, method):
                raise TypeError(f"worker {i} ({worker!r}) has no method {method}")
