"""The weights a server has: for users, to compute with, where they lie, and for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from miniray.core import session
from miniray.ps.blocks import Crew, Range, whole
from miniray.ps.combine import Combiner
from miniray.ps.leaves import COUNT, REAL, Array, Source
from miniray.ps.places import Places, Stowed
from miniray.ps.strategies.base import Strategy
from miniray.ps.weights import Layout


class Current:
    """The current weights, and what the strategy remembers of them."""

    # From ``_prepare`` on, which comes before the first weights.
    _small: Combiner
    _large: Any
    _places: Places
    _holes: list[Any]
    _counts: list[int]

    def __init__(self, strategy: Strategy, on_nonfinite: str, threads: int | None) -> None:
        self.strategy = strategy
        self.layout: Layout | None = None
        self.ref: Any = None
        self._weights: Any = None
        self._sources: Sequence[Source] | None = None
        self._stored: Any = None
        self._on_nonfinite = on_nonfinite
        self._crew = Crew(threads)
        self._joined: Combiner | None = None

    # -- the current weights -----------------------------------------------------------------------

    @property
    def weights(self) -> Any:
        """The current weights as users see them; None if there are none yet."""
        if self._weights is None and self.ref is not None:
            self._weights = session.engine().peek(self.ref)
        return self._weights

    @property
    def nbytes(self) -> int:
        return 0 if self.layout is None else self.layout.nbytes

    @property
    def threads(self) -> int:
        return self._crew.threads

    @property
    def places(self) -> Places | None:
        """Where the entries of the current weights lie, if others that lie so can be read."""
        return self._places if isinstance(self._sources, Stowed) else None

    @property
    def has_weights(self) -> bool:
        return self._sources is not None

    def set(self, weights: Any) -> None:
        """Make ``weights`` the current ones. Raises ``TypeError`` for what cannot be combined.

        The strategy starts anew if they are of another structure.
        """
        self._prepare(Layout(weights))
        self._take(weights)

    def _take(self, weights: Any, stored: Any = None) -> None:
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
        self._counts = [
            i for i, leaf in enumerate(layout.leaves) if leaf.role == COUNT and leaf.size
        ]
        self._places, self._joined = Places(layout), None

    def _make_large(self, layout: Layout, ranges: list[Range]) -> Any:
        return Combiner(self.strategy, layout.leaves, ranges, self._crew)

    def knows(self, stored: Any) -> bool:
        """Whether a value in shared memory is weights that fit, and where they are in it."""
        return self.has_weights and self._places.knows(stored)

    def _extracted(self, weights: Any, stored: Any, who: str, reference: str) -> Sequence[Source]:
        """The checked leaves of ``weights``; those of ``stored`` are known from now on."""
        assert self.layout is not None
        sources = _readonly(self.layout.extract(weights, who, reference))
        self._places.learn(stored, sources)
        return sources

    # -- what the strategy remembers ---------------------------------------------------------------

    def buffers(self) -> dict[str, list[Array]]:
        """The strategy's buffers by name, an array for each float entry in order."""
        if self.layout is None:
            return {}
        small, large = self._small.buffers.state(), self._large_buffers()
        places = [r.leaf for r in self._small.ranges] + [r.leaf for r in self._large.ranges]
        order = sorted(range(len(places)), key=places.__getitem__)
        return {n: [(small[n] + large[n])[i] for i in order] for n in small}

    def load_buffers(self, state: dict[str, list[Array]]) -> None:
        small = [r.leaf for r in self._small.ranges]
        order = sorted(small + [r.leaf for r in self._large.ranges])
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
