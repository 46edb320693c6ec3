"""Weights that are moved in place, by one worker at a time: those of the asynchronous server."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from miniray.errors import NonFiniteWeightsError
from miniray.ps.combine import NotFiniteError, Tally
from miniray.ps.leaves import COUNT, combine_counts
from miniray.ps.model import Combined, Given, Model
from miniray.ps.weights import Layout


class MovingModel(Model):
    """A model that can also be moved towards one worker's weights."""

    #: The current weights are memory of our own and not part of an object in the store.
    _owned = False

    def set(self, weights: Any) -> None:
        super().set(weights)
        self._owned = False

    def adopt(self, new: Combined) -> None:
        super().adopt(new)
        self._owned = False

    def moved(self, worker: Hashable, weights: Any, rate: float) -> Tally | None:
        """Move the current weights towards one worker's, in place. The first become the current.

        Returns None when they are not finite and are to be skipped. What raises changes nothing,
        unless numbers become too large on the way: then the current weights are of no more use.
        """
        given = Given(worker, weights)
        layout, workers = self._checked([given])
        assert self._small is not None
        # Looked at first: once the current weights are partly overwritten it would be too late.
        where = self._broken(given, workers[0])
        if where is not None:
            if self._on_nonfinite == "skip":
                return None
            raise NonFiniteWeightsError(
                f"{given.who}: entry {where} has NaN or Inf", (given.worker,)
            )
        if not self.has_weights:
            self._own(layout, weights)
            return Tally(0.0, np.zeros(1))
        if not self._owned:
            self._own(layout, self.weights)
        assert self._sources is not None
        tally = Tally(0.0, np.zeros(1))
        for combiner in (self._small, self._large):
            targets = [self._sources[r.leaf] for r in combiner.ranges]
            try:
                tally += combiner.combine(self._sources, workers, [1.0], targets, rate)
            except NotFiniteError as error:
                raise NonFiniteWeightsError(
                    f"the server's weights are not finite any more, in entry {error.place}: "
                    "numbers became too large; go on from the last get_state() or set_weights()"
                ) from None
            combiner.commit()
        for i, leaf in enumerate(layout.leaves):
            if leaf.role == COUNT and leaf.size:
                both = [self._sources[i], workers[0][i]]
                self._sources[i][:] = combine_counts(both, [1 - rate, rate])
        self._show()
        return tally

    def _own(self, layout: Layout, weights: Any) -> None:
        """Make ``weights`` the current ones, as memory of our own that may be written to."""
        self._sources = [
            s.copy() if isinstance(s, np.ndarray) else s.clone()
            for s in layout.extract(weights, "the server", "the server")
        ]
        self._owned = True
        self._show()

    def _show(self) -> None:
        assert self.layout is not None
        assert self._sources is not None
        pairs = zip(self.layout.leaves, self._sources, strict=True)
        self._weights = self.layout.build([self.layout.shown(leaf, s) for leaf, s in pairs])
        self.ref = self._stored = None
