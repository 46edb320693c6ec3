"""The server's weights: what they are now, and what they become.

``Model.combined`` makes new weights of the workers' and changes nothing; ``adopt`` makes them the
current ones. In between the workers are given them, and if that fails the old ones are still here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from miniray.core import session
from miniray.errors import NonFiniteWeightsError
from miniray.ps.blocks import Crew, Range, whole
from miniray.ps.combine import Combiner, NotFiniteError, Tally, typed
from miniray.ps.leaves import COUNT, REAL, Array, Source, Who, combine_counts, flatten_leaf
from miniray.ps.places import Places, Stowed
from miniray.ps.strategies.base import Strategy
from miniray.ps.weights import Layout


@dataclasses.dataclass
class Given:
    """The weights of one worker, as they came. ``ref`` is where others can get them, if known.

    Of weights that lie in shared memory as the model knows them, ``stored`` is enough.
    """

    worker: Hashable
    weights: Any
    ref: Any = None
    stored: Any = None

    @property
    def who(self) -> str:
        return f"worker {self.worker}"


@dataclasses.dataclass
class Combined:
    """New weights, in the object store, not adopted yet."""

    ref: Any
    layout: Layout
    tally: Tally
    used: list[Hashable]
    skipped: list[Hashable]


class Model:
    """The current weights, and how to combine others into new ones."""

    def __init__(self, strategy: Strategy, on_nonfinite: str, threads: int | None) -> None:
        self.strategy = strategy
        self.layout: Layout | None = None
        self.ref: Any = None
        self._weights: Any = None
        self._sources: Sequence[Source] | None = None
        self._stored: Any = None
        self._places: Places | None = None
        self._on_nonfinite = on_nonfinite
        self._crew = Crew(threads)
        self._small: Combiner | None = None
        self._large: Any = None
        self._joined: Combiner | None = None
        self._holes: list[Any] = []

    # -- the current weights -----------------------------------------------------------------------

    @property
    def weights(self) -> Any:
        """The current weights as users see them; None if there are none yet."""
        if self._weights is None and self.ref is not None:
            self._weights = session.engine().peek(self.ref)
        return self._weights

    @property
    def has_weights(self) -> bool:
        return self._sources is not None

    def set(self, weights: Any) -> None:
        """Make ``weights`` the current ones. Raises ``TypeError`` for what cannot be combined.

        The strategy starts anew if they are of another structure.
        """
        layout = Layout(weights)
        self._prepare(layout)
        self._take(layout, weights)

    def adopt(self, new: Combined) -> None:
        """Make ``new`` the current weights, and what the strategy remembered during it final."""
        assert self._small is not None
        self._small.commit()
        self._large.commit()
        engine = session.engine()
        stored = engine.stored(new.ref)
        if self.knows(stored):
            assert self._places is not None
            self._weights, self._sources = None, self._places.view(stored)
        else:
            self._take(new.layout, engine.peek(new.ref), stored)
        self.ref, self._stored = new.ref, stored

    def _take(self, layout: Layout, weights: Any, stored: Any = None) -> None:
        assert self.layout is not None
        self.ref, self._stored, self._weights = None, None, weights
        self._sources = self._extracted(weights, stored, "the server", "the server")

    def _prepare(self, layout: Layout) -> None:
        """Get ready for weights of this layout."""
        if self.layout is not None and self.layout.same_as(layout):
            return
        self.layout = layout
        real = [i for i, leaf in enumerate(layout.leaves) if leaf.role == REAL and leaf.size]
        large = [i for i in real if layout.leaves[i].is_array]
        small = [i for i in real if not layout.leaves[i].is_array]
        self._small = Combiner(
            self.strategy, layout.leaves, whole(small, layout.leaves), self._crew
        )
        self._large = self._make_large(layout, whole(large, layout.leaves))
        self._holes = [layout.empty(layout.leaves[i]) for i in large]
        self._places, self._joined = Places(layout), None

    def _make_large(self, layout: Layout, ranges: list[Range]) -> Any:
        return Combiner(self.strategy, layout.leaves, ranges, self._crew)

    def knows(self, stored: Any) -> bool:
        """Whether a value in shared memory is weights that fit, and where they are in it."""
        return self.has_weights and self._places is not None and self._places.knows(stored)

    def _extracted(self, weights: Any, stored: Any, who: Who, reference: Who) -> Sequence[Source]:
        """The checked leaves of ``weights``; those of ``stored`` are known from now on."""
        assert self.layout is not None
        assert self._places is not None
        sources = _readonly(self.layout.extract(weights, who, reference))
        self._places.learn(stored, sources)
        return sources

    # -- combining ---------------------------------------------------------------------------------

    def combined(self, given: Sequence[Given], weights: Sequence[float]) -> Combined:
        """New weights of those given. Nothing changes but memory that is used again.

        Raises ``WeightsMismatchError``, ``NonFiniteWeightsError`` and what the strategy raises.
        """
        layout, workers = self._checked(given)
        chosen, skipped = list(range(len(given))), list[int]()
        while True:
            try:
                ref, tally = self._combine(
                    layout,
                    [given[i] for i in chosen],
                    [workers[i] for i in chosen],
                    [weights[i] for i in chosen],
                )
                break
            except NotFiniteError as error:
                broken = self._find_broken(given, workers, chosen, error.place)
                skipped += broken
                chosen = [i for i in chosen if i not in broken]
        return Combined(
            ref,
            layout,
            tally,
            [given[i].worker for i in chosen],
            [given[i].worker for i in skipped],
        )

    def _checked(self, given: Sequence[Given]) -> tuple[Layout, list[Sequence[Source]]]:
        first = given[0]
        if self.layout is None or not self.has_weights:
            self._prepare(Layout(first.weights, first.who))
        assert self.layout is not None
        reference = "the server" if self.has_weights else first.who
        return self.layout, [
            self._leaves_of(g, reference if g is first else first.who) for g in given
        ]

    def _leaves_of(self, given: Given, reference: Who) -> Sequence[Source]:
        if self.knows(given.stored):
            assert self._places is not None
            return self._places.view(given.stored)
        return self._extracted(given.weights, given.stored, given.who, reference)

    def _combine(
        self,
        layout: Layout,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        weights: Sequence[float],
    ) -> tuple[Any, Tally]:
        used, shares, apart = self._weighed(given, workers, weights)
        workers = [workers[i] for i in used]
        given = [given[i] for i in used]
        if self._stored is not None and _runs([self._sources, *workers]) is not None:
            ref, tally = self._combine_stored(layout, workers, shares)
        else:
            ref, tally = self._combine_entries(layout, given, workers, shares)
        return ref, tally if apart is None else Tally(tally.change, apart)

    def _combine_stored(
        self, layout: Layout, workers: Sequence[Sequence[Source]], shares: Sequence[float]
    ) -> tuple[Any, Tally]:
        """All weights are in shared memory and known: the new ones are to lie as the current."""
        assert self._places is not None
        places, tally = self._places, Tally(0.0, np.zeros(len(workers)))

        def fill(memory: Array) -> None:
            nonlocal tally
            new = places.view(self._stored, memory)
            combiner, (current, *runs) = self._over([self._sources, *workers])
            tally = combiner.combine(current, runs, shares, new.runs)
            # Counters may lie between the entries of a run, so they come last.
            for i, leaf in enumerate(layout.leaves):
                if leaf.role == COUNT and leaf.size:
                    new[i][:] = combine_counts([w[i] for w in workers], shares)

        return self._stored.another(fill), tally

    def _combine_entries(
        self,
        layout: Layout,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        shares: Sequence[float],
    ) -> tuple[Any, Tally]:
        assert self._small is not None
        values: list[Any] = [None] * len(layout.leaves)
        for i, leaf in enumerate(layout.leaves):
            if leaf.is_array and not leaf.size:
                values[i] = layout.empty(leaf)
            elif leaf.role == COUNT:
                values[i] = layout.finished(leaf, combine_counts([w[i] for w in workers], shares))
        small = {r.leaf: _room(layout, r.leaf) for r in self._small.ranges}
        tally = self._small.combine(
            self._sources, workers, shares, [flatten_leaf(room) for room in small.values()]
        )
        for i, room in small.items():
            values[i] = layout.finished(layout.leaves[i], room)
        large = [r.leaf for r in self._large.ranges]
        for i, hole in zip(large, self._holes, strict=True):
            values[i] = hole

        def fill(memory: list[Array]) -> None:
            nonlocal tally
            places = [typed(m, layout.leaves[i]) for m, i in zip(memory, large, strict=True)]
            tally += self._combine_large(given, workers, shares, places)

        return session.engine().put_filled(layout.build(values), self._holes, fill), tally

    def _over(self, sets: Sequence[Sequence[Source] | None]) -> tuple[Any, list[Any]]:
        """What combines the large entries of these weights, and the arrays it is to be given.

        Runs of entries where all of them are known to lie so; otherwise entries.
        """
        runs = _runs(sets)
        if runs is None:
            return self._large, list(sets)
        if self._joined is None:
            assert self._places is not None
            tracks = self._places.runs
            ranges = [Range(i, 0, run.size) for i, run in enumerate(tracks)]
            buffers = self._large.buffers.joined(ranges, tracks)
            self._joined = Combiner(self.strategy, tracks, ranges, self._crew, buffers)
        return self._joined, runs

    def _combine_large(
        self,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        shares: Sequence[float],
        places: list[Source],
    ) -> Tally:
        tally: Tally = self._large.combine(self._sources, workers, shares, places)
        return tally

    def _weighed(
        self, given: Sequence[Given], workers: Sequence[Sequence[Source]], weights: Sequence[float]
    ) -> tuple[list[int], list[float], Array | None]:
        """Which of the workers count, and how much; the sum is 1.

        Where distances between workers are known, so are those of all workers to their mean.
        """
        distances = apart = None
        if self.strategy.uses_distances:
            distances = self._distances(given, workers)
            if not np.isfinite(distances).all():
                raise NotFiniteError("")
            apart = distances.mean(axis=1) - distances.mean() / 2
        final = self.strategy.weigh(_shares(weights), distances)
        used = [i for i, weight in enumerate(final) if weight]
        return used, _shares([final[i] for i in used]), apart

    def _distances(self, given: Sequence[Given], workers: Sequence[Sequence[Source]]) -> Array:
        assert self._small is not None
        combiner, large = self._over(workers)
        total: Array = self._small.distances(workers) + combiner.distances(large)
        return total

    def _find_broken(
        self,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        chosen: Sequence[int],
        place: str,
    ) -> list[int]:
        """Which workers are not finite. Raises unless they may and can be left out."""
        broken = {i: where for i in chosen if (where := self._broken(given[i], workers[i]))}
        if not broken:
            raise NonFiniteWeightsError(
                f"the combined weights are not finite in entry {place}, although those of every "
                "worker are: numbers became too large"
            )
        text = "; ".join(f"{given[i].who}: entry {p} has NaN or Inf" for i, p in broken.items())
        names = tuple(given[i].worker for i in broken)
        if self._on_nonfinite == "error":
            raise NonFiniteWeightsError(
                f'{text} (on_nonfinite="skip" leaves such workers out)', names
            )
        if len(broken) == len(chosen):
            raise NonFiniteWeightsError(f"no worker has finite weights: {text}", names)
        return list(broken)

    def _broken(self, given: Given, sources: Sequence[Source]) -> str | None:
        assert self._small is not None
        combiner, large = self._over([sources])
        found: str | None = self._small.broken(sources) or combiner.broken(large[0])
        return found

    # -- for checkpoints ---------------------------------------------------------------------------

    def buffers(self) -> dict[str, list[Array]]:
        """The strategy's buffers by name, an array for each float entry in order."""
        if self._small is None:
            return {}
        small, large = self._small.buffers.state(), self._large_buffers()
        places = [r.leaf for r in self._small.ranges] + [r.leaf for r in self._large.ranges]
        order = sorted(range(len(places)), key=places.__getitem__)
        return {n: [(small[n] + large[n])[i] for i in order] for n in small}

    def load_buffers(self, state: dict[str, list[Array]]) -> None:
        assert self._small is not None
        small = [r.leaf for r in self._small.ranges]
        order = sorted(small + [r.leaf for r in self._large.ranges])
        for name, arrays in state.items():
            if len(arrays) != len(order):
                raise ValueError(f"buffer {name!r} of the state does not fit the weights")
        first = {n: [a[order.index(i)] for i in small] for n, a in state.items()}
        rest = {n: [a[order.index(r.leaf)] for r in self._large.ranges] for n, a in state.items()}
        self._small.buffers.load(first)
        self._load_large(rest)

    def _large_buffers(self) -> dict[str, list[Array]]:
        state: dict[str, list[Array]] = self._large.buffers.state()
        return state

    def _load_large(self, state: dict[str, list[Array]]) -> None:
        self._large.buffers.load(state)


def _readonly(sources: list[Source]) -> list[Source]:
    """The same, so that a strategy that writes to them gets an error.

    They are memory that others see too, and part of it must not be written to at all.
    """
    for source in sources:
        if isinstance(source, np.ndarray):
            source.flags.writeable = False
    return sources


def _runs(sets: Sequence[Sequence[Source] | None]) -> list[Any] | None:
    """The runs of weights all of which are known by their place in shared memory."""
    found = [s.runs for s in sets if isinstance(s, Stowed)]
    return found if len(found) == len(sets) else None


def _room(layout: Layout, which: int) -> Array:
    return np.empty(1, layout.leaves[which].dtype)


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    if not total:
        raise ValueError("the weights of all workers are 0: there is nothing to combine")
    return [float(w / total) for w in weights]
