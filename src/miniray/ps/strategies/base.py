"""What a strategy is: a rule that makes one set of weights of several.

To write your own, subclass ``Strategy``, implement ``combine`` and register it::

    @miniray.ps.register_strategy("midrange")
    class Midrange(Strategy):
        def combine(self, global_weights, worker_weights, weights):
            return (np.minimum.reduce(worker_weights) + np.maximum.reduce(worker_weights)) / 2

``combine`` gets flat float arrays: one piece of the weights at a time, the same piece of every
worker. It is called from several threads, once for each piece, so it must work element by element
and keep what it remembers between syncs in ``buffer``. A piece may span several entries, and have
numbers between them that are nobody's. A sync that fails leaves no trace: buffers written during it
are dropped.
"""

from __future__ import annotations

import abc
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from miniray.ps.blocks import Piece, Range, Scratch
from miniray.ps.leaves import Array, Leaf

if TYPE_CHECKING:
    from miniray.ps.places import Run


class Strategy(abc.ABC):
    """A rule to combine weights. Arguments of ``__init__`` are the strategy's options."""

    #: Under which it is registered.
    name: ClassVar[str] = ""
    #: ``set_worker_weight`` means something: ``combine`` looks at ``weights``.
    uses_worker_weights: ClassVar[bool] = False
    #: Starts from the global weights. The first sync, when there are none, takes the mean.
    needs_global: ClassVar[bool] = False
    #: Compares workers with each other, so it cannot take one at a time (``mode="async"``).
    compares_workers: ClassVar[bool] = False
    #: NaN or infinity in any worker shows in the result. Otherwise each worker is looked at.
    shows_nonfinite: ClassVar[bool] = True
    #: ``weigh`` wants the workers' distances.
    uses_distances: ClassVar[bool] = False
    #: What is remembered between syncs, for each number one, and what it starts as.
    buffers: Mapping[str, float] = {}

    @abc.abstractmethod
    def combine(
        self,
        global_weights: Array | None,
        worker_weights: Sequence[Array],
        weights: Sequence[float],
    ) -> Array:
        """The new weights of one piece.

        Args:
            global_weights: the server's weights; None when it has none yet.
            worker_weights: the workers' weights, not to be changed.
            weights: how much each worker counts; above 0, with a sum of 1.

        May return ``self.out`` after writing to it: it is as long as the piece, and saves memory.
        """

    def weigh(self, weights: Sequence[float], distances: Array | None) -> Sequence[float]:
        """How much each worker counts, decided once a sync; 0 leaves one out.

        ``distances`` are the squared distances of each two workers, with ``uses_distances``.
        Raises ``ValueError`` when there are too few workers.
        """
        return weights

    # -- for combine -------------------------------------------------------------------------------

    @property
    def out(self) -> Array:
        """An array to write the result of this piece to."""
        return self._now.out

    def scratch(self, name: Any) -> Array:
        """An array as long as the piece, with anything in it; another one for each name."""
        out = self._now.out
        return self._now.scratch.get(("strategy", name), len(out), out.dtype)

    def buffer(self, name: str) -> Array:
        """What was remembered of this piece after the last sync."""
        return self._now.old[name]

    def new_buffer(self, name: str) -> Array:
        """Where to write what to remember of this piece after this sync."""
        return self._now.new[name]

    def mean(self, worker_weights: Sequence[Array], weights: Sequence[float], out: Array) -> Array:
        """The weighted mean, written to ``out``."""
        count = len(worker_weights)
        first = worker_weights[0]
        if count == 1:
            np.copyto(out, first)
            return out
        if all(w == weights[0] for w in weights[1:]):
            np.add(first, worker_weights[1], out=out)
            for other in worker_weights[2:]:
                np.add(out, other, out=out)
            # Dividing is slower and more exact; for 2, 4, 8, ... multiplying is exact as well.
            if count & (count - 1):
                return np.divide(out, float(count), out=out)
            return np.multiply(out, 1 / count, out=out)
        np.multiply(first, float(weights[0]), out=out)
        part = self.scratch("mean")
        for other, weight in zip(worker_weights[1:], weights[1:], strict=True):
            np.add(out, np.multiply(other, float(weight), out=part), out=out)
        return out

    # -- kept by the server ------------------------------------------------------------------------

    def options(self) -> dict[str, Any]:
        """The arguments it was made with: attributes of the same names."""
        names = [n for n in inspect.signature(type(self)).parameters if hasattr(self, n)]
        return {n: getattr(self, n) for n in names}

    def state_dict(self) -> dict[str, Any]:
        """What is remembered beside buffers: numbers, strings, lists and dicts of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave. Raises ``ValueError`` for what it does not know."""
        if state:
            raise ValueError(f"strategy {self.name!r} has no state, but was given {sorted(state)}")

    @property
    def _now(self) -> Context:
        context: Context = self.__dict__["_local"].context
        return context

    def enter(self, context: Context) -> None:
        """Called by the server: the piece that this thread is about to combine."""
        local = self.__dict__.get("_local")
        if local is None:
            local = self.__dict__.setdefault("_local", threading.local())
        local.context = context

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_local"}


class Context:
    """The piece a thread is at: its place for the result and its parts of the buffers."""

    __slots__ = ("new", "old", "out", "scratch")

    def __init__(
        self, out: Array, scratch: Scratch, old: dict[str, Array], new: dict[str, Array]
    ) -> None:
        self.out = out
        self.scratch = scratch
        self.old = old
        self.new = new


class Buffers:
    """A strategy's buffers for some ranges, twice: as they were, and as they will be.

    A sync writes the second set; ``commit`` makes it the first. So a sync that fails at its very
    end, when a worker does not take the new weights, changes nothing. The memory of the old set is
    used for the next new one.
    """

    def __init__(
        self, start: Mapping[str, float], ranges: list[Range], leaves: Sequence[Leaf | Run]
    ) -> None:
        self._start = start
        self._ranges = ranges
        self._leaves = leaves
        self._old: dict[str, list[Array]] = {n: self._make(value) for n, value in start.items()}
        self._new: dict[str, list[Array]] = {n: self._make(None) for n in start}
        self._joined: Buffers | None = None

    def joined(self, ranges: list[Range], runs: Sequence[Run]) -> Buffers:
        """The same memory by runs of entries: what is written to one is seen in the other."""
        joined = Buffers(self._start, ranges, runs)
        for name, arrays in self._old.items():
            places = _entries(joined._old[name], runs)
            for place, array in zip(places, arrays, strict=True):
                np.copyto(place, array)
            self._old[name] = places
            self._new[name] = _entries(joined._new[name], runs)
        self._joined = joined
        return joined

    def _make(self, value: float | None) -> list[Array]:
        arrays = []
        for leaf, low, high in self._ranges:
            compute = self._leaves[leaf].compute
            if value is None:
                arrays.append(np.empty(high - low, compute))
            else:
                # zeros() costs nothing until it is written to
                arrays.append(
                    np.full(high - low, value, compute) if value else np.zeros(high - low, compute)
                )
        return arrays

    def of(self, piece: Piece) -> tuple[dict[str, Array], dict[str, Array]]:
        part = slice(piece.start - piece.base, piece.stop - piece.base)
        old = {n: arrays[piece.range][part] for n, arrays in self._old.items()}
        new = {n: arrays[piece.range][part] for n, arrays in self._new.items()}
        return old, new

    def keep(self, piece: Piece) -> None:
        """Nothing changes for ``piece`` in this sync."""
        old, new = self.of(piece)
        for name, array in new.items():
            array[:] = old[name]

    def commit(self) -> None:
        self._old, self._new = self._new, self._old
        if self._joined is not None:
            self._joined.commit()

    def state(self) -> dict[str, list[Array]]:
        """A copy, by name and range."""
        return {n: [a.copy() for a in arrays] for n, arrays in self._old.items()}

    def load(self, state: Mapping[str, Sequence[Array]]) -> None:
        """Raises ``ValueError`` when ``state`` is not of these weights."""
        if set(state) != set(self._start):
            raise ValueError(f"state has buffers {sorted(state)}, wanted {sorted(self._start)}")
        for name, arrays in state.items():
            mine = self._old[name]
            if [len(a) for a in arrays] != [len(a) for a in mine]:
                raise ValueError(f"buffer {name!r} of the state does not fit the weights")
            for target, array in zip(mine, arrays, strict=True):
                np.copyto(target, array)


def _entries(arrays: list[Array], runs: Sequence[Run]) -> list[Array]:
    """Arrays of entries over those of runs."""
    return [
        array[start : start + size]
        for array, run in zip(arrays, runs, strict=True)
        for start, size in zip(run.starts, run.sizes, strict=True)
    ]
