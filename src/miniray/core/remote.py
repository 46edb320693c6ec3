"""``@remote``: what turns a function into a task and a class into an actor.

Nothing here knows how code gets to another process; that is the engine's work. These objects hold
the user's code, check arguments early, and forward to the engine of the session.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, overload

from miniray.core import session, startup
from miniray.core.engine import Engine
from miniray.core.options import Options
from miniray.core.refs import ObjectRef, ObjectRefGenerator

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_METHOD_OPTIONS = "__miniray_method_options__"


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
        declared: dict[str, Any] = getattr(function, _METHOD_OPTIONS, {})
        num_returns = declared.get("num_returns")
        if num_returns is None:
            num_returns = "streaming" if generator else 1
        signature = _bare_signature(function, bound)
        low, high = 0, -1
        if signature is not None:
            low, high = positional_range(signature)
        return cls(
            name=name,
            signature=signature,
            min_positional=low,
            max_positional=high,
            is_generator=generator,
            is_async=inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function),
            num_returns=num_returns,
        )

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``TypeError``, as the call itself would, when the arguments do not fit."""
        if not kwargs and self.min_positional <= len(args) <= self.max_positional:
            return  # the common case, a hundred times cheaper than binding
        if self.signature is None:
            return
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self.name}(): {error}") from None


def _bare_signature(function: Callable[..., Any], bound: bool) -> inspect.Signature | None:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # builtins and C functions may have none
        return None
    if bound:
        parameters = parameters[1:]
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            p.replace(annotation=empty, default=empty if p.default is empty else None)
            for p in parameters
        ]
    )


def positional_range(signature: inspect.Signature) -> tuple[int, int]:
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


class ClassSpec:
    """A user's class, its methods, and what engines cache about it."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self.cache: dict[Any, Any] = {}

    @functools.cached_property
    def name(self) -> str:
        return self.cls.__qualname__

    @functools.cached_property
    def init(self) -> CallSpec:
        return CallSpec.of(_constructor(self.cls), self.name, bound=True)

    @functools.cached_property
    def info(self) -> ActorInfo:
        cls = self.cls
        return ActorInfo(
            cls.__name__,
            {
                name: _method_spec(cls, name, function)
                for name, function in inspect.getmembers(cls, callable)
                if not (name.startswith("__") and name != "__call__") and name != "__class__"
            },
        )

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


def _method_spec(cls: type, name: str, function: Callable[..., Any]) -> CallSpec:
    raw = inspect.getattr_static(cls, name)
    unbound = not isinstance(raw, (staticmethod, classmethod))
    return CallSpec.of(function, f"{cls.__name__}.{name}", bound=unbound)


@dataclasses.dataclass(frozen=True)
class ActorInfo:
    """What a handle knows about its actor's class; travels with the handle."""

    class_name: str
    methods: dict[str, CallSpec]


_adapt: contextvars.ContextVar[Callable[[ClassSpec], ClassSpec] | None] = contextvars.ContextVar(
    "adapt", default=None
)


@contextlib.contextmanager
def adapting(adapt: Callable[[ClassSpec], ClassSpec]) -> Iterator[None]:
    """Actors created inside are made of what ``adapt`` gives for their class.

    For trainers whose workers can do more than the user's class says.
    """
    token = _adapt.set(adapt)
    try:
        yield
    finally:
        _adapt.reset(token)


class RemoteFunction:
    """A function that runs as a task: ``f.remote(...)``."""

    def __init__(self, spec: FunctionSpec, options: Options) -> None:
        self._spec = spec
        self._options = options
        functools.update_wrapper(self, spec.function)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the task; returns an ``ObjectRef`` (or several, or a generator) at once."""
        self._spec.call.check(args, kwargs)
        return session.engine().submit(self._spec, args, kwargs, self._options)

    def options(self, **changes: Any) -> RemoteFunction:
        """The same function with some options changed."""
        return RemoteFunction(self._spec, self._options.merged("function", changes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._spec.name
        raise TypeError(
            f"remote function {name} cannot be called directly: use {name}.remote(...), "
            f"or {name}.__wrapped__(...) to run it here"
        )

    def __reduce__(self) -> Any:
        return _rebuild_function, (self._spec.function, self._options)


class ActorClass(Generic[T]):
    """A class whose instances run as actors: ``C.remote(...)`` gives a handle."""

    def __init__(self, spec: ClassSpec, options: Options) -> None:
        self._spec = spec
        self._options = options
        self.__doc__ = spec.cls.__doc__
        self.__name__ = spec.cls.__name__
        self.__qualname__ = spec.cls.__qualname__
        self.__module__ = spec.cls.__module__
        self.__wrapped__ = spec.cls

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle[T]:
        """Start an actor; returns its handle at once."""
        adapt = _adapt.get()
        spec = self._spec if adapt is None else adapt(self._spec)
        spec.init.check(args, kwargs)
        options = self._options.inheriting(startup.environment())
        return session.engine().create_actor(spec, args, kwargs, options)

    def options(self, **changes: Any) -> ActorClass[T]:
        """The same class with some options changed."""
        return ActorClass(self._spec, self._options.merged("class", changes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__
        raise TypeError(
            f"actor class {name} cannot be instantiated directly: use {name}.remote(...), "
            f"or {name}.__wrapped__(...) for an ordinary object"
        )

    def __mro_entries__(self, bases: tuple[Any, ...]) -> Any:
        raise TypeError(
            f"cannot inherit from the actor class {self.__name__}: derive from the plain class "
            f"({self.__name__}.__wrapped__) and decorate the result"
        )

    def __repr__(self) -> str:
        return f"ActorClass({self.__name__})"

    def __reduce__(self) -> Any:
        return _rebuild_class, (self._spec.cls, self._options)


class ActorMethod:
    """``handle.method``; ``.remote(...)`` calls it.

    Holds the engine's state of the actor and not the handle: a handle caches its methods, and a
    cycle between the two would keep the actor alive until the garbage collector runs.
    """

    __slots__ = ("_actor", "_engine", "_num_returns", "_spec")

    def __init__(self, engine: Engine, actor: Any, spec: CallSpec, num_returns: int | str) -> None:
        self._engine = engine
        self._actor = actor
        self._spec = spec
        self._num_returns = num_returns

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; returns an ``ObjectRef`` (or several, or a generator) at once."""
        spec = self._spec
        spec.check(args, kwargs)
        name = spec.name.rpartition(".")[2]
        return self._engine.call(self._actor, name, args, kwargs, self._num_returns)

    def options(self, **changes: Any) -> ActorMethod:
        merged = Options(num_returns=self._num_returns).merged("method", changes)  # type: ignore[arg-type]
        num_returns = 1 if merged.num_returns is None else merged.num_returns
        return ActorMethod(self._engine, self._actor, self._spec, num_returns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"actor methods are called with .remote(): {self._spec.name}.remote(...)")


class ActorHandle(Generic[T]):
    """A reference to an actor, wherever it runs. Methods are attributes with ``.remote(...)``.

    Handles travel: in arguments, containers, return values and closures. The actor ends when the
    last one is gone.
    """

    def __init__(self, engine: Engine, actor: Any, actor_id: str, info: ActorInfo) -> None:
        self._engine = engine
        self._actor = actor
        self._actor_id = actor_id
        self._info = info

    def __getattr__(self, name: str) -> ActorMethod:
        try:
            spec = self.__dict__["_info"].methods[name]
        except KeyError:
            if name.startswith("__") or "_info" not in self.__dict__:
                raise AttributeError(name) from None  # copy, pickle and friends probe for these
            info: ActorInfo = self.__dict__["_info"]
            known = ", ".join(sorted(m for m in info.methods if not m.startswith("_"))) or "none"
            raise AttributeError(
                f"actor {info.class_name} has no method {name!r}; its methods are: {known}"
            ) from None
        method = ActorMethod(self._engine, self._actor, spec, spec.num_returns)
        self.__dict__[name] = method
        return method

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and self._actor_id == other._actor_id

    def __hash__(self) -> int:
        return hash(self._actor_id)

    def __repr__(self) -> str:
        return f"ActorHandle({self._info.class_name}, {self._actor_id})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._info.methods]

    def __reduce__(self) -> Any:
        return self._engine.reduce_handle(self)


def _rebuild_function(function: Callable[..., Any], options: Options) -> RemoteFunction:
    return RemoteFunction(FunctionSpec(function), options)


def _rebuild_class(cls: type, options: Options) -> ActorClass[Any]:
    return ActorClass(ClassSpec(cls), options)


@overload
def remote(target: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]
@overload
def remote(target: Callable[..., Any], /) -> RemoteFunction: ...
@overload
def remote(**options: Any) -> Callable[[Any], Any]: ...
def remote(*args: Any, **options: Any) -> Any:
    """Make a function a task or a class an actor; with arguments, options for it.

    ``num_cpus, num_gpus, runtime_env`` for both; ``num_returns, max_retries`` for functions;
    ``max_restarts, max_task_retries, max_concurrency, name, namespace, get_if_exists, lifetime``
    for classes.
    """
    if len(args) == 1 and not options:
        return _make(args[0], {})
    if args or not options:
        raise TypeError("use @miniray.remote or @miniray.remote(option=value, ...)")
    return lambda target: _make(target, options)


def _make(target: Any, options: dict[str, Any]) -> Any:
    if isinstance(target, (RemoteFunction, ActorClass)):
        raise TypeError(f"{target!r} is remote already")
    if inspect.isclass(target):
        return ActorClass(ClassSpec(target), Options().merged("class", options))
    if callable(target):
        return RemoteFunction(FunctionSpec(target), Options().merged("function", options))
    raise TypeError(f"@miniray.remote needs a function or a class, not {target!r}")


def method(**options: Any) -> Callable[[F], F]:
    """Set options of an actor's method: ``@miniray.method(num_returns=2)``."""
    Options().merged("method", options)

    def mark(function: F) -> F:
        setattr(function, _METHOD_OPTIONS, options)
        return function

    return mark


__all__ = [
    "ActorClass",
    "ActorHandle",
    "ActorMethod",
    "ObjectRef",
    "ObjectRefGenerator",
    "RemoteFunction",
    "method",
    "remote",
]
