"""Strategies by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from miniray.ps.strategies.base import Strategy

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


def check_strategy(strategy: str | Strategy, options: dict[str, Any]) -> None:
    """Raise what ``create_parameter_server`` would raise about a strategy and its options."""
    make_strategy(strategy, options)


def make_strategy(strategy: str | Strategy, options: dict[str, Any]) -> Strategy:
    """The strategy of that name with ``options``; a ``Strategy`` object is taken as it is.

    Raises ``ValueError`` for an unknown name and for a bad value, ``TypeError`` for an unknown
    option, each with the valid ones.
    """
    if isinstance(strategy, Strategy):
        if options:
            raise TypeError(f"{strategy!r} has its options already; {sorted(options)} are too many")
        return strategy
    cls = _strategies.get(strategy) if isinstance(strategy, str) else None
    if cls is None:
        raise ValueError(f"unknown strategy {strategy!r}; there are {', '.join(strategy_names())}")
    # A class without __init__ of its own has no options, whatever object's signature says.
    has_options = cls.__init__ is not object.__init__
    parameters = inspect.signature(cls).parameters.values() if has_options else ()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        known = [p.name for p in parameters]
        unknown = sorted(set(options) - set(known))
        if unknown:
            valid = f"it takes {', '.join(known)}" if known else "it takes none"
            raise TypeError(
                f"strategy {strategy!r} has no option {', '.join(map(repr, unknown))}; {valid}"
            )
    return cls(**options)
