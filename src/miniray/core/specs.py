"""What is known of a user's function or class before it runs: how it may be called, its methods."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Callable
from typing import Any

from miniray.core.options import Options

#: Where ``@miniray.method(...)`` leaves its options on a function.
METHOD_OPTIONS = "__miniray_method_options__"
#: On functions of a class that are no methods of its actors.
NOT_A_METHOD = "__miniray_not_a_method__"


@dataclasses.dataclass(frozen=True)
class CallSpec:
    """How something may be called: enough to refuse wrong arguments before they are sent.

    ``signature`` has neither defaults nor annotations, so a spec is small and always picklable.
    """

    name: str
    signature: inspect.Signature | None
    min_positional: int
    max_positional: int
    is_generator: bool
    is_async: bool
    num_returns: int | str

    @classmethod
    def of(cls, function: Callable[..., Any], name: str, *, bound: bool) -> CallSpec:
        """Describe ``function``; with ``bound`` the first parameter (self) is left out."""
        generator = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        declared: dict[str, Any] = getattr(function, METHOD_OPTIONS, {})
        signature = _bare_signature(function, bound)
        return cls.made(name, signature, generator, is_async, declared.get("num_returns"))

    @classmethod
    def made(
        cls,
        name: str,
        signature: inspect.Signature | None,
        generator: bool,
        is_async: bool,
        num_returns: int | str | None,
    ) -> CallSpec:
        """``num_returns`` of None is what the kind of function says."""
        low, high = (0, -1) if signature is None else _positional_range(signature)
        if num_returns is None:
            num_returns = "streaming" if generator else 1
        return cls(name, signature, low, high, generator, is_async, num_returns)

    @property
    def takes_anything(self) -> bool:
        """Whether the parameters are ``*args`` and ``**kwargs``."""
        parameters = () if self.signature is None else self.signature.parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return tuple(p.kind for p in parameters) == variadic

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``TypeError``, as the call itself would, when the arguments do not fit."""
        if not kwargs and self.min_positional <= len(args) <= self.max_positional:
            return  # the common case, a hundred times cheaper than binding
        if self.signature is None:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            takes = str(self.signature).replace("=None", "=...")
            given = [*map(reprlib.repr, args), *(f"{k}={reprlib.repr(kwargs[k])}" for k in kwargs)]
            raise TypeError(
                f"{self.name}{takes} was called with ({', '.join(given)}): {error}"
            ) from None


def _bare_signature(function: Callable[..., Any], bound: bool) -> inspect.Signature | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins and C functions may have none
        return None
    if bound and parameters and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        parameters = parameters[1:]  # self, which a wrapper may take as one of *args
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            p.replace(annotation=empty, default=empty if p.default is empty else None)
            for p in parameters
        ]
    )


def _positional_range(signature: inspect.Signature) -> tuple[int, int]:
    """(fewest, most) arguments of a call with positional arguments only; most < 0: bind instead."""
    low = high = 0
    for p in signature.parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            high += 1
            low += p.default is p.empty
        elif p.kind is p.VAR_POSITIONAL:
            high = 1 << 30
        elif p.kind is p.KEYWORD_ONLY and p.default is p.empty:
            return 0, -1
    return low, high


# The specs look at the user's code when first used, not when made: code that refers to itself is
# unpickled as an empty shell first, and its spec is made while it is still empty.


class FunctionSpec:
    """A user's function and what engines cache about it (``cache`` is theirs, keyed by engine)."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name: str = getattr(function, "__qualname__", repr(function))
        self.cache: dict[Any, Any] = {}

    @functools.cached_property
    def call(self) -> CallSpec:
        return CallSpec.of(self.function, self.name, bound=False)

    def num_returns(self, options: Options) -> int | str:
        said = options.num_returns
        return self.call.num_returns if said is None else said


class ClassSpec:
    """A user's class, its methods, and what engines cache about it.

    With a ``wrapper``, actors hold ``wrapper(instance)`` and the instance (see ``startup``). Names
    in messages stay those of the user's class. Calls of a wrapper method that takes any arguments
    (``*args, **kwargs``) are checked against the user's method of that name.
    """

    def __init__(self, cls: type, wrapper: type | None = None) -> None:
        self.cls = cls
        self.wrapper = wrapper
        self.cache: dict[Any, Any] = {}
        self._wrapped: dict[type, ClassSpec] = {}

    def wrapped_with(self, wrapper: type) -> ClassSpec:
        """Return the spec of this class with ``wrapper``: always the same object."""
        return self._wrapped.setdefault(wrapper, ClassSpec(self.cls, wrapper))

    @functools.cached_property
    def name(self) -> str:
        return self.cls.__qualname__

    @functools.cached_property
    def init(self) -> CallSpec:
        return CallSpec.of(_constructor(self.cls), self.name, bound=True)

    @functools.cached_property
    def info(self) -> ActorInfo:
        name = self.cls.__name__
        methods = _method_specs(self.cls, name)
        if self.wrapper is None:
            return ActorInfo(name, methods)
        own = _method_specs(self.wrapper, name)
        unlisted = frozenset(own.keys() - methods.keys())
        called = {n: spec for n, spec in own.items() if n in unlisted or not spec.takes_anything}
        return ActorInfo(name, {**methods, **called}, unlisted)

    @functools.cached_property
    def is_async(self) -> bool:
        return any(m.is_async for m in self.info.methods.values())


def _constructor(cls: type) -> Callable[..., Any]:
    """What checks the arguments of ``cls(...)``."""
    init: Any = cls.__init__  # type: ignore[misc]
    new: Any = cls.__new__
    if init is object.__init__ and new is object.__new__:
        return lambda self: None  # object's own signature claims to take anything
    return init  # type: ignore[no-any-return]


def get_methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return the methods that callers of an actor of this class may call."""
    return {
        name: function
        for name, function in inspect.getmembers(cls, callable)
        if not (name.startswith("__") and name != "__call__")
        and not getattr(function, NOT_A_METHOD, False)
    }


def _method_specs(cls: type, class_name: str) -> dict[str, CallSpec]:
    specs = {}
    for name, function in get_methods(cls).items():
        raw = inspect.getattr_static(cls, name)
        unbound = not isinstance(raw, (staticmethod, classmethod))
        specs[name] = CallSpec.of(function, f"{class_name}.{name}", bound=unbound)
    return specs


@dataclasses.dataclass(frozen=True)
class ActorInfo:
    """What a handle knows about its actor's class; travels with the handle."""

    class_name: str
    methods: dict[str, CallSpec]
    #: Methods of the wrapper only. They can be called, but aren't listed.
    unlisted: frozenset[str] = frozenset()

    def list_methods(self) -> list[str]:
        """Return the names of the user's methods."""
        return [name for name in self.methods if name not in self.unlisted]
