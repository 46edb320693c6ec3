"""Starting servers. What is wrong with the arguments is said here, before an actor is started."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from miniray.checks import check_choice, check_int
from miniray.core.options import Options
from miniray.core.remote import ActorClass, ActorHandle, ClassSpec
from miniray.ps.asynchronous import AsyncServer
from miniray.ps.collect import TRANSPORTS
from miniray.ps.server import Server
from miniray.ps.strategies import Strategy, make_strategy
from miniray.ps.strategies.base import at_least

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mode": ("sync", "async"),
    "on_nonfinite": ("error", "skip"),
    "transport": TRANSPORTS,
}
#: Why ``on_nonfinite="ignore"``, which trainers of ranks that step together have, is missing here.
_NO_IGNORE = 'A NaN of one worker would be in the weights of all. "skip" leaves out that worker.'
_LOWEST = {"num_workers": 1, "max_staleness": 0, "threads": 1}


def create_parameter_server(
    strategy: str | Strategy = "average",
    *,
    mode: str = "sync",
    on_nonfinite: str = "error",
    num_workers: int | None = None,
    max_staleness: int | None = None,
    staleness_power: float = 0.0,
    threads: int | None = None,
    transport: str = "auto",
    **strategy_kwargs: Any,
) -> ActorHandle[Any]:
    """Start a parameter server and return its handle.

    Args:
        strategy: a name (``strategy_names()`` lists them) or a ``Strategy``.
        mode: ``"sync"``, or ``"async"``: pushes take effect one by one.
        on_nonfinite: If the weights of a worker contain NaN or infinity, raise (``"error"``) or
            leave out the worker (``"skip"``).
        num_workers: how many workers push, if known: see ``push_weights``.
        max_staleness: with ``mode="async"``, how many pushes a worker may be ahead of the slowest.
        staleness_power: with ``mode="async"``, how much less a stale push counts.
        threads: for combining; all cores (at most 8) if not said.
        transport: how ``sync_from_workers`` gets weights on one machine: ``"copy"``, workers copy
            them into shared memory; ``"read"``, the server reads them where they lie, if it can;
            ``"auto"``, it does so where that is faster.
        **strategy_kwargs: options of the strategy.

    Raises:
        ValueError: an unknown strategy, or a bad value.
        TypeError: an option that the strategy does not have.
    """
    given = {k: v for k, v in locals().items() if k != "strategy_kwargs"}
    return ParameterServer.remote(**given, **strategy_kwargs)


def check_parameter_server(*args: Any, **kwargs: Any) -> Strategy:
    """Raise what ``create_parameter_server`` would; returns the strategy. Starts nothing."""
    made: Strategy = _checked(*args, **kwargs)[1]["strategy"]
    return made


class ServerClass(ActorClass[Server, ...]):
    """The actor class ``ParameterServer``.

    ``ParameterServer.remote(...)`` takes what ``create_parameter_server`` takes, and
    ``ParameterServer.options(name="ps").remote(...)`` works as for any actor class.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(ClassSpec(Server), options)
        self.__name__ = self.__qualname__ = "ParameterServer"
        self.__module__ = "miniray.ps"

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle[Server]:
        """Start a server; ``create_parameter_server`` describes the arguments."""
        cls, arguments = _checked(*args, **kwargs)
        plain: ActorClass[Server, ...] = ActorClass(ClassSpec(cls), self._options)
        return plain.remote(**arguments)

    def options(self, **changes: Any) -> ServerClass:
        return ServerClass(self._options.merged("class", changes))

    def __reduce__(self) -> Any:
        return ServerClass, (self._options,)


_SIGNATURE = inspect.signature(create_parameter_server)
_SERVER_OPTIONS = [n for n in _SIGNATURE.parameters if n not in ("strategy", "strategy_kwargs")]

ParameterServer = ServerClass(Options())


def _checked(*args: Any, **kwargs: Any) -> tuple[type[Server], dict[str, Any]]:
    """(class of the server, its arguments) of the arguments of ``create_parameter_server``."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    made = given["strategy"] = make_strategy(
        given["strategy"], given.pop("strategy_kwargs"), _SERVER_OPTIONS
    )
    for name, allowed in _CHOICES.items():
        hints = {"ignore": _NO_IGNORE} if name == "on_nonfinite" else None
        check_choice(name, given[name], allowed, hints)
    for name, low in _LOWEST.items():
        if given[name] is not None:
            check_int(name, given[name], low)
    if given["num_workers"] is not None:  # too few of them are not found out after an epoch
        count = given["num_workers"]
        made.weigh([1 / count] * count, np.zeros((count, count)) if made.uses_distances else None)
    mode = given.pop("mode")
    staleness = {name: given.pop(name) for name in ("max_staleness", "staleness_power")}
    if mode == "sync":
        if staleness["max_staleness"] is not None or staleness["staleness_power"]:
            raise ValueError('max_staleness and staleness_power need mode="async"')
        return Server, given
    if made.compares_workers:
        raise ValueError(
            f"strategy {made.name!r} compares workers and cannot take them one by one: "
            'mode="async" needs average, weighted or another one that is based on the mean'
        )
    at_least("staleness_power", staleness["staleness_power"], 0)
    return AsyncServer, given | staleness
