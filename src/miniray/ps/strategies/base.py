"""What a strategy is: a rule that makes one set of weights of several, known by its name.

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
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, TypeVar

import numpy as np

from miniray.checks import get_options, unknown_option
from miniray.ps.blocks import Scratch
from miniray.ps.leaves import Array


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
        """Write the weighted mean to ``out`` and return it."""
        count = len(worker_weights)
        first = worker_weights[0]
        if count == 1:
            np.copyto(out, first)
            return out
        if all(w == weights[0] for w in weights[1:]):
            if worker_weights is self._now.blocks:
                np.copyto(out, self._now.center)
                return out
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
    """State of the piece that a thread combines: its result, its part of the buffers, its mean."""

    __slots__ = ("blocks", "center", "new", "old", "out", "scratch")

    def __init__(
        self, out: Array, scratch: Scratch, old: dict[str, Array], new: dict[str, Array]
    ) -> None:
        self.out = out
        self.scratch = scratch
        self.old = old
        self.new = new
        #: The workers' weights, and their plain mean once it was computed.
        self.blocks: Sequence[Array] | None = None
        self.center = out


# -- by name ---------------------------------------------------------------------------------------

S = TypeVar("S", bound=type[Strategy])

_strategies: dict[str, type[Strategy]] = {}


def register_strategy(name: str) -> Callable[[S], S]:
    """Make a strategy known under ``name``; a decorator for subclasses of ``Strategy``.

    Registering a name again replaces the class. The class travels to the server by itself: it
    needs to be registered only where servers are created.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a strategy's name must be a non-empty string, not {name!r}")

    def register(cls: S) -> S:
        if not (inspect.isclass(cls) and issubclass(cls, Strategy)):
            raise TypeError(f"strategy {name!r} must be a subclass of miniray.ps.Strategy: {cls!r}")
        cls.name = name
        _strategies[name] = cls
        return cls

    return register


def strategy_names() -> list[str]:
    """The names that may be given as ``strategy``."""
    return sorted(_strategies)


def strategy_options(strategy: str | Strategy) -> frozenset[str] | None:
    """Return the options of a strategy by its name.

    Return None if the strategy accepts any option or doesn't exist. A ``Strategy`` object has its
    options already, so it accepts no further ones.
    """
    if isinstance(strategy, Strategy):
        return frozenset()
    cls = _strategies.get(strategy) if isinstance(strategy, str) else None
    if cls is None:
        return None
    parameters = inspect.signature(cls).parameters.values()
    accepts_any = cls.__init__ is not object.__init__ and any(
        p.kind is p.VAR_KEYWORD for p in parameters
    )
    return None if accepts_any else get_options(cls)


def check_strategy(strategy: str | Strategy, options: dict[str, Any]) -> None:
    """Raise what ``create_parameter_server`` would raise about a strategy and its options."""
    make_strategy(strategy, options)


def make_strategy(
    strategy: str | Strategy, options: dict[str, Any], others: Iterable[str] = ()
) -> Strategy:
    """Create the strategy with this name and ``options``. Return a ``Strategy`` object unchanged.

    Raise ``ValueError`` for an unknown name or a bad value, and ``TypeError`` for an unknown
    option. The error may suggest the name of an option in ``others``, which the call also has.
    """
    if isinstance(strategy, Strategy):
        if options:
            name = type(strategy).__name__
            raise TypeError(
                f"strategy is a {name} object, which has its options: pass "
                f"{', '.join(sorted(options))} to {name}(...)"
            )
        return strategy
    cls = _strategies.get(strategy) if isinstance(strategy, str) else None
    if cls is None:
        raise ValueError(f"unknown strategy {strategy!r}; there are {', '.join(strategy_names())}")
    # A class without its own __init__ has no options, whatever the signature of object is.
    has_options = cls.__init__ is not object.__init__
    parameters = inspect.signature(cls).parameters.values() if has_options else ()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters]
        for name in options:
            if name not in known:
                raise unknown_option(f"strategy {strategy!r}", name, [*known, *others])
    return cls(**options)


# -- options: each gives the value, or raises ``ValueError`` naming it -----------------------------


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, not {value!r}")
    return float(value)


def at_least(name: str, value: Any, low: float, *, strictly: bool = False) -> float:
    number = _number(name, value)
    if number < low or (strictly and number == low):
        raise ValueError(
            f"{name} must be {'above' if strictly else 'at least'} {low:g}, not {value}"
        )
    return number


def share(name: str, value: Any) -> float:
    """In [0, 1)."""
    number = _number(name, value)
    if not 0 <= number < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, not {value}")
    return number


def within(name: str, value: Any, low: float, high: float) -> float:
    """Strictly between the two."""
    number = _number(name, value)
    if not low < number < high:
        raise ValueError(f"{name} must be above {low:g} and below {high:g}, not {value}")
    return number
