"""The server's weights, and what they become.

``Model.combined`` makes new weights of the workers' and changes nothing; ``adopt`` makes them the
current ones. In between the workers are given them, and if that fails the old ones are still here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from miniray.core import session
from miniray.errors import NonFiniteWeightsError, WeightsMismatchError
from miniray.ps.blocks import Range
from miniray.ps.combine import Combiner, NotFiniteError, Tally, typed
from miniray.ps.current import Current
from miniray.ps.leaves import COUNT, Array, Source, combine_counts, flatten_leaf
from miniray.ps.places import Stowed
from miniray.ps.reading import Far, UnreadableError
from miniray.ps.weights import Layout


@dataclasses.dataclass
class Given:
    """The weights of one worker, as they came. ``ref`` is where others can get them, if known.

    Of weights that lie in shared memory as the model knows them, ``stored`` is enough; of such that
    lie so in the worker's own, ``far``.
    """

    worker: Hashable
    weights: Any
    ref: Any = None
    stored: Any = None
    far: Far | None = None

    @property
    def who(self) -> str:
        return f"worker {self.worker}"


@dataclasses.dataclass
class Combined:
    """New weights, in the object store, not adopted yet."""

    ref: Any
    tally: Tally
    used: list[Hashable]
    skipped: list[Hashable]


class Model(Current):
    """The current weights, and how to combine others into new ones."""

    def adopt(self, new: Combined) -> None:
        """Make ``new`` the current weights, and what the strategy remembered during it final."""
        self._small.commit()
        self._large.commit()
        engine = session.engine()
        stored = engine.stored(new.ref)
        if self.knows(stored):
            self._weights, self._sources = None, self._places.view(stored)
        else:
            self._take(engine.peek(new.ref), stored)
        self.ref, self._stored = new.ref, stored

    # -- combining ---------------------------------------------------------------------------------

    def combined(self, given: Sequence[Given], weights: Sequence[float]) -> Combined:
        """New weights of those given. Nothing changes but memory that is used again.

        Raises ``WeightsMismatchError``, ``NonFiniteWeightsError`` and what the strategy raises.
        """
        workers = self._checked(given)
        chosen, skipped = list(range(len(given))), list[int]()
        while True:
            try:
                ref, tally = self._combine(
                    [given[i] for i in chosen],
                    [workers[i] for i in chosen],
                    [weights[i] for i in chosen],
                )
                break
            except NotFiniteError as error:
                place = error.place
            broken = self._find_broken(given, workers, chosen, place)
            skipped += broken
            chosen = [i for i in chosen if i not in broken]
        names = ([given[i].worker for i in some] for some in (chosen, skipped))
        return Combined(ref, tally, *names)

    def _checked(self, given: Sequence[Given]) -> list[Sequence[Source]]:
        first = given[0]
        if not self.has_weights:
            self._prepare(Layout(first.weights, first.who))
        reference = "the server" if self.has_weights else first.who
        return [self._leaves_of(g, reference if g is first else first.who) for g in given]

    def _leaves_of(self, given: Given, reference: str) -> Sequence[Source]:
        if given.far is not None:
            return given.far
        if self.knows(given.stored):
            return self._places.view(given.stored)
        try:
            return self._extracted(given.weights, given.stored, given.who, reference)
        except WeightsMismatchError as error:
            error.add_fields(worker=given.worker)
            raise

    def _combine(
        self,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        weights: Sequence[float],
    ) -> tuple[Any, Tally]:
        used, shares, apart = self._weighed(given, workers, weights)
        workers = [workers[i] for i in used]
        given = [given[i] for i in used]
        if self._stored is not None and _runs([self._sources, *workers]) is not None:
            ref, tally = self._combine_stored(workers, shares)
        elif any(g.far is not None for g in given):
            raise UnreadableError("those of another worker lie otherwise")
        else:
            ref, tally = self._combine_entries(given, workers, shares)
        return ref, tally if apart is None else Tally(tally.change, apart)

    def _combine_stored(
        self, workers: Sequence[Sequence[Source]], shares: Sequence[float]
    ) -> tuple[Any, Tally]:
        """All weights are in shared memory and known: the new ones are to lie as the current."""
        tally = Tally(0.0, np.zeros(len(workers)))

        def fill(memory: Array) -> None:
            nonlocal tally
            new = self._places.view(self._stored, memory)
            combiner, (current, *runs) = self._over([self._sources, *workers])
            tally = combiner.combine(current, runs, shares, new.runs)
            # Counters may lie between the entries of a run, so they come last.
            for i in self._counts:
                new[i][:] = combine_counts([w[i] for w in workers], shares)

        return self._stored.another(fill), tally

    def _combine_entries(
        self,
        given: Sequence[Given],
        workers: Sequence[Sequence[Source]],
        shares: Sequence[float],
    ) -> tuple[Any, Tally]:
        layout = self.layout
        assert layout is not None
        values: list[Any] = [None] * len(layout.leaves)
        for i, leaf in enumerate(layout.leaves):
            if leaf.is_array and not leaf.size:
                values[i] = layout.empty(leaf)
            elif leaf.role == COUNT:
                values[i] = layout.finished(leaf, combine_counts([w[i] for w in workers], shares))
        small = {r.leaf: np.empty(1, layout.leaves[r.leaf].dtype) for r in self._small.ranges}
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
        """Return the workers to skip because they aren't finite.

        Raise ``NonFiniteWeightsError`` if none may be skipped, or if the workers aren't the cause.
        """
        broken = {i: where for i in chosen if (where := self._broken(given[i], workers[i]))}
        if not broken and not place:
            raise NonFiniteWeightsError(
                f"Strategy {self.strategy.name!r} compares workers by their squared distances, "
                "which overflow float64, although the weights of every worker are finite. Some "
                "weights are above 1e150: lower the learning rate."
            )
        if not broken:
            raise NonFiniteWeightsError(
                f"the combined weights are not finite in entry {place}, although those of every "
                "worker are: numbers became too large",
                entry=place,
            )
        text = "; ".join(f"{given[i].who}: entry {p} has NaN or Inf" for i, p in broken.items())
        names = tuple(given[i].worker for i in broken)
        entry = next(iter(broken.values()))
        if self._on_nonfinite == "error":
            raise NonFiniteWeightsError(
                f'{text} (on_nonfinite="skip" leaves such workers out)', names, entry=entry
            )
        if len(broken) == len(chosen):
            raise NonFiniteWeightsError(f"no worker has finite weights: {text}", names, entry=entry)
        return list(broken)

    def _broken(self, given: Given, sources: Sequence[Source]) -> str | None:
        combiner, large = self._over([sources])
        found: str | None = self._small.broken(sources) or combiner.broken(large[0])
        return found


def _runs(sets: Sequence[Sequence[Source] | None]) -> list[Any] | None:
    """The runs of weights all of which are known by their place in memory."""
    found = [s.runs for s in sets if isinstance(s, (Stowed, Far))]
    return found if len(found) == len(sets) else None


def _shares(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    if not total:
        raise ValueError("the weights of all workers are 0: there is nothing to combine")
    return [float(w / total) for w in weights]
