"""Several servers for large models: each combines a part of the weights.

The coordinator has the methods of a ``ParameterServer``. It collects refs, not weights: every shard
reads its own parts out of the workers' weights, keeps the strategy's buffers for them and returns
the new parts. Entries are dealt out by bytes and large ones are cut, so the shards are equally
large whatever the model. On a cluster that spreads memory and computing over machines; on one
machine a single server has all cores already.

A shard that dies ends the server: what the strategy remembers is lost with it. Calls then raise
``ActorDiedError``; a new server goes on from the last ``get_state``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import miniray
from miniray.core import session
from miniray.ps.blocks import Crew, Range, split
from miniray.ps.combine import Combiner, NotFiniteError, Tally
from miniray.ps.leaves import Array, Source, flatten_leaf
from miniray.ps.model import Given, Model
from miniray.ps.server import Server
from miniray.ps.strategies.base import Strategy
from miniray.ps.weights import Layout


class Shard:
    """Combines some ranges of the weights. Told by the coordinator which, and when to commit.

    Refs come in lists: a ref that is an argument of its own would be replaced by its value.
    """

    def __init__(self, strategy: Strategy, threads: int | None) -> None:
        self._strategy = strategy
        self._crew = Crew(threads)
        self._layout: Layout
        self._combiner: Combiner
        self._targets: list[Source]

    def prepare(self, layout: Layout, ranges: list[Range]) -> None:
        self._layout = layout
        self._combiner = Combiner(self._strategy, layout.leaves, ranges, self._crew)
        # Of a whole entry only the part is ever touched, and only that takes memory.
        whole = [flatten_leaf(layout.empty(layout.leaves[r.leaf])) for r in ranges]
        self._targets = [w[r.start : r.stop] for w, r in zip(whole, ranges, strict=True)]

    def distances(self, refs: list[Any]) -> Array:
        return self._combiner.distances([self._sources(ref) for ref in refs])

    def broken(self, refs: list[Any]) -> str | None:
        return self._combiner.broken(self._sources(refs[0]))

    def combine(
        self, current: list[Any], refs: list[Any], shares: list[float]
    ) -> tuple[list[Any], Tally] | str:
        """(new parts, sums), or the entry that is not finite. ``current`` has one ref or none."""
        try:
            tally = self._combiner.combine(
                self._sources(current[0]) if current else None,
                [self._sources(ref) for ref in refs],
                shares,
                self._targets,
            )
        except NotFiniteError as error:
            return error.place
        return self._targets, tally

    def commit(self) -> None:
        self._combiner.commit()

    def buffers(self) -> dict[str, list[Array]]:
        return self._combiner.buffers.state()

    def load_buffers(self, state: dict[str, list[Array]]) -> None:
        self._combiner.buffers.load(state)

    def _sources(self, ref: Any) -> list[Source]:
        return self._layout.extract(session.engine().peek(ref), "a worker", "another worker")


class ShardedModel(Model):
    """A model whose large entries are combined by shards."""

    def __init__(
        self, strategy: Strategy, on_nonfinite: str, threads: int | None, num_servers: int
    ) -> None:
        super().__init__(strategy, on_nonfinite, threads)
        actor = miniray.remote(Shard)
        self._shards = [actor.remote(strategy, threads) for _ in range(num_servers)]
        self._parts: list[list[Range]] = []

    def knows(self, stored: Any) -> bool:
        return False  # each shard looks at the weights itself

    def _make_large(self, layout: Layout, ranges: list[Range]) -> Any:
        self._parts = split(ranges, layout.leaves, len(self._shards))
        self._all("prepare", [(layout, part) for part in self._parts])
        return _Everything(ranges, self)

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        pairs = zip(self._shards, arguments, strict=True)
        return miniray.get([getattr(shard, method).remote(*a) for shard, a in pairs])

    def every(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all shards to the same call."""
        return self._all(method, [arguments] * len(self._shards))

    def _combine_large(
        self,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        shares: Sequence[float],
        places: list[Source],
    ) -> Tally:
        current: list[Any] = []
        if self.has_weights:
            if self.ref is None:
                self.ref = miniray.put(self.weights)
            current = [self.ref]
        answers = self.every("combine", current, [_ref(g) for g in given], list(shares))
        for answer in answers:
            if isinstance(answer, str):
                raise NotFiniteError(answer)
        numbers = {r.leaf: i for i, r in enumerate(self._large.ranges)}
        total = Tally(0.0, np.zeros(len(workers)))
        for part, (arrays, tally) in zip(self._parts, answers, strict=True):
            total += tally
            for (leaf, start, stop), array in zip(part, arrays, strict=True):
                place = places[numbers[leaf]]
                if isinstance(place, np.ndarray):
                    place[start:stop] = array
                else:
                    place[start:stop].copy_(array)
        return total

    def _distances(self, given: Sequence[Given], workers: Sequence[Sequence[Source]]) -> Array:
        parts = self.every("distances", [_ref(g) for g in given])
        return self._small.distances(workers) + np.sum(parts, axis=0)  # type: ignore[no-any-return]

    def _broken(self, given: Given, sources: Sequence[Source]) -> str | None:
        found = [self._small.broken(sources), *self.every("broken", [_ref(given)])]
        return next((place for place in found if place), None)

    def _large_buffers(self) -> dict[str, list[Array]]:
        pieces: dict[str, dict[int, list[Array]]] = {n: {} for n in self.strategy.buffers}
        for part, state in zip(self._parts, self.every("buffers"), strict=True):
            for name, arrays in state.items():
                for r, array in zip(part, arrays, strict=True):
                    pieces[name].setdefault(r.leaf, []).append(array)
        order = [r.leaf for r in self._large.ranges]
        return {n: [np.concatenate(found[i]) for i in order] for n, found in pieces.items()}

    def _load_large(self, state: dict[str, list[Array]]) -> None:
        numbers = {r.leaf: i for i, r in enumerate(self._large.ranges)}
        parts = [
            ({n: [a[numbers[r.leaf]][r.start : r.stop] for r in part] for n, a in state.items()},)
            for part in self._parts
        ]
        self._all("load_buffers", parts)


class _Everything:
    """Stands for the combiner of all large entries; the shards do the work."""

    def __init__(self, ranges: list[Range], model: ShardedModel) -> None:
        self.ranges = ranges
        self._model = model

    def commit(self) -> None:
        self._model.every("commit")


class Coordinator(Server):
    """A server over several shards."""

    def __init__(self, strategy: Strategy, *, num_servers: int, **options: Any) -> None:
        self._num_servers = num_servers
        super().__init__(strategy, **options)

    def _make_model(self, on_nonfinite: str, threads: int | None) -> Model:
        return ShardedModel(self._strategy, on_nonfinite, threads, self._num_servers)

    def get_stats(self) -> dict[str, Any]:
        """As for a single server, with ``num_servers``."""
        return {**super().get_stats(), "num_servers": self._num_servers}


def _ref(given: Given) -> Any:
    """Where the shards get this worker's weights."""
    if given.ref is None:
        given.ref = miniray.put(given.weights)
    return given.ref
