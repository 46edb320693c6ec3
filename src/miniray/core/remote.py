"""``@remote``: what turns a function into a task and a class into an actor.

Nothing here knows how code gets to another process; that is the engine's work. These objects hold
the user's code, check arguments early, and forward to the engine of the session.

Type checkers see the signatures of functions and of the methods of typed actors (``Actor``).
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from miniray.core import session, startup
from miniray.core.options import Options
from miniray.core.refs import ActorHandle, ActorMethod, ObjectRef, ObjectRefGenerator, P, R, T
from miniray.core.specs import METHOD_OPTIONS, NOT_A_METHOD, CallSpec, ClassSpec, FunctionSpec

A = TypeVar("A", bound="Actor")
V = TypeVar("V")
Q = ParamSpec("Q")


class RemoteFunction(Generic[P, R]):
    """A function that runs as a task: ``f.remote(...)``."""

    def __init__(self, spec: FunctionSpec, options: Options) -> None:
        self._spec = spec
        self._options = options
        functools.update_wrapper(self, spec.function)

    # A ref may be given in place of a value, as for ActorMethod.
    @overload
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def remote(self, a: Any, b: Any, c: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> R: ...
    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Start the task; returns an ``ObjectRef`` (or several, or a generator) at once."""
        self._spec.call.check(args, kwargs)
        return session.engine().submit(self._spec, args, kwargs, self._options)

    @overload
    def options(self, *, num_returns: int | str, **changes: Any) -> RemoteFunction[P, Any]: ...
    @overload
    def options(self, **changes: Any) -> RemoteFunction[P, R]: ...
    def options(self, **changes: Any) -> RemoteFunction[P, Any]:
        """The same function with some options changed."""
        return RemoteFunction(self._spec, self._options.merged("function", changes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._spec.name
        raise TypeError(
            f"remote function {name} cannot be called directly: use {name}.remote(...), "
            f"or {name}.__wrapped__(...) to run it here"
        )

    def __repr__(self) -> str:
        return f"RemoteFunction({self._spec.name})"

    def __reduce__(self) -> Any:
        return _rebuild_function, (self._spec.function, self._options)


class ActorClass(Generic[T, P]):
    """A class whose instances run as actors: ``C.remote(...)`` gives a handle."""

    def __init__(self, spec: ClassSpec, options: Options) -> None:
        self._spec = spec
        self._options = options
        self.__doc__ = spec.cls.__doc__
        self.__name__ = spec.cls.__name__
        self.__qualname__ = spec.cls.__qualname__
        self.__module__ = spec.cls.__module__
        self.__wrapped__ = spec.cls

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]:
        """Start an actor; returns its handle at once."""
        spec = self._spec
        wrapper = startup.current_wrapper()
        if wrapper is not None and spec.wrapper is None:
            spec = spec.wrapped_with(wrapper)
        spec.init.check(args, kwargs)
        options = self._options.inheriting(startup.environment())
        return session.engine().create_actor(spec, args, kwargs, options)

    def options(self, **changes: Any) -> ActorClass[T, P]:
        """The same class with some options changed."""
        return ActorClass(self._spec, self._options.merged("class", changes))

    def wrap_with(self, wrapper: type) -> ActorClass[T, P]:
        """Return the same class with actors that also hold ``wrapper(instance)``.

        Arguments, handles and names in errors are those of the user's class. If ``wrapper`` defines
        a method, calls of it go to the wrapper, even if the user's class has a method of that name.
        All other calls go to the instance. If ``wrapper(instance)`` raises, it is an error in
        ``__init__``. A static method ``__before_init__`` of the wrapper is called with the instance
        before its ``__init__``.

        Raises:
            TypeError: ``wrapper`` isn't a class, or this class has a wrapper already.
        """
        if not inspect.isclass(wrapper):
            raise TypeError(f"wrapper must be a class, not {wrapper!r}")
        if self._spec.wrapper is not None:
            raise TypeError(f"{self!r} is already wrapped with {self._spec.wrapper.__qualname__}")
        return ActorClass(self._spec.wrapped_with(wrapper), self._options)

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
        return _rebuild_class, (self._spec.cls, self._options, self._spec.wrapper)


class Actor:
    """A base class for actors whose calls a type checker can follow.

    A class derived from it needs no decorator: ``C.remote(...)`` starts an actor. To a checker and
    an editor the handle is a ``C``, and methods marked ``@miniray.method`` have a ``.remote(...)``
    with their own signature. At run time it is a handle like any other.
    """

    if TYPE_CHECKING:

        @classmethod
        def remote(cls: Callable[Q, V], *args: Q.args, **kwargs: Q.kwargs) -> V:
            """Start an actor; returns its handle at once."""

        @classmethod
        def options(cls: Callable[Q, V], **changes: Any) -> _TypedActorClass[V, Q]:
            """The same class with some options changed."""

    else:

        @classmethod
        def remote(cls, *args: Any, **kwargs: Any) -> Any:
            """Start an actor; returns its handle at once."""
            return _actor_class(cls).remote(*args, **kwargs)

        @classmethod
        def options(cls, **changes: Any) -> Any:
            """The same class with some options changed."""
            return _actor_class(cls).options(**changes)

        setattr(remote.__func__, NOT_A_METHOD, True)
        setattr(options.__func__, NOT_A_METHOD, True)


if TYPE_CHECKING:

    class _TypedActorClass(ActorClass[V, Q]):
        """An ``ActorClass`` of a typed actor: its handles are seen as instances."""

        def remote(self, *args: Q.args, **kwargs: Q.kwargs) -> V:  # type: ignore[override]
            ...

        def options(self, **changes: Any) -> _TypedActorClass[V, Q]: ...

    class _Method(Generic[Q, V, R]):
        """A method of a typed actor: called on ``self`` it gives V, with ``.remote`` R."""

        def __get__(self, instance: object, owner: type | None = None) -> _Bound[Q, V, R]: ...

    class _Bound(ActorMethod[Q, R], Generic[Q, V, R]):
        def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> V: ...


#: One for each typed actor's class: engines remember what they know of it there.
_actor_classes: weakref.WeakKeyDictionary[type, ActorClass[Any]] = weakref.WeakKeyDictionary()


def _actor_class(cls: type) -> ActorClass[Any]:
    known = _actor_classes.get(cls)
    if known is None:
        known = _actor_classes[cls] = _make(cls, {})
    return known


def _rebuild_function(function: Callable[..., Any], options: Options) -> RemoteFunction:
    return RemoteFunction(FunctionSpec(function), options)


def _rebuild_class(cls: type, options: Options, wrapper: type | None) -> ActorClass[Any]:
    return ActorClass(ClassSpec(cls, wrapper), options)


# Functions that give a stream give a generator of refs, and so do their typed calls.
@overload
def remote(target: Callable[Q, A], /) -> _TypedActorClass[A, Q]: ...  # type: ignore[overload-overlap]
@overload
def remote(target: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]
@overload
def remote(target: Callable[Q, Coroutine[Any, Any, V]], /) -> RemoteFunction[Q, ObjectRef[V]]: ...
@overload
def remote(  # type: ignore[overload-overlap]
    target: Callable[Q, Iterator[V] | AsyncIterator[V]], /
) -> RemoteFunction[Q, ObjectRefGenerator[V]]: ...
@overload
def remote(target: Callable[Q, V], /) -> RemoteFunction[Q, ObjectRef[V]]: ...
@overload
def remote(*, num_returns: int | str, **options: Any) -> _RemoteOfMany: ...
@overload
def remote(**options: Any) -> _Remote: ...
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


if TYPE_CHECKING:

    class _Remote:
        """What ``remote(option=value)`` gives."""

        @overload
        def __call__(self, target: Callable[Q, A], /) -> _TypedActorClass[A, Q]: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(self, target: type[T], /) -> ActorClass[T]: ...  # type: ignore[overload-overlap]
        @overload
        def __call__(
            self, target: Callable[Q, Coroutine[Any, Any, V]], /
        ) -> RemoteFunction[Q, ObjectRef[V]]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]
            self, target: Callable[Q, Iterator[V] | AsyncIterator[V]], /
        ) -> RemoteFunction[Q, ObjectRefGenerator[V]]: ...
        @overload
        def __call__(self, target: Callable[Q, V], /) -> RemoteFunction[Q, ObjectRef[V]]: ...
        def __call__(self, target: Any, /) -> Any: ...

    class _RemoteOfMany:
        """What ``remote(num_returns=n)`` gives: a call may give several refs, or none."""

        def __call__(self, target: Callable[Q, Any], /) -> RemoteFunction[Q, Any]: ...

    class _MethodOf:
        """What ``method(option=value)`` gives."""

        def __call__(self, function: Callable[Concatenate[Any, Q], V], /) -> _Method[Q, V, Any]: ...


@overload
def method(
    function: Callable[Concatenate[Any, Q], Coroutine[Any, Any, V]], /
) -> _Method[Q, Coroutine[Any, Any, V], ObjectRef[V]]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, Q], Iterator[V]], /
) -> _Method[Q, Iterator[V], ObjectRefGenerator[V]]: ...
@overload
def method(  # type: ignore[overload-overlap]
    function: Callable[Concatenate[Any, Q], AsyncIterator[V]], /
) -> _Method[Q, AsyncIterator[V], ObjectRefGenerator[V]]: ...
@overload
def method(function: Callable[Concatenate[Any, Q], V], /) -> _Method[Q, V, ObjectRef[V]]: ...
@overload
def method(**options: Any) -> _MethodOf: ...
def method(*args: Any, **options: Any) -> Any:
    """Mark a method as one for callers, or set its options: ``@miniray.method(num_returns=2)``.

    Every method of an actor can be called; on an ``Actor`` only marked ones have a ``.remote`` for
    type checkers. Calls on ``self`` stay what they are.
    """
    if len(args) == 1 and not options and callable(args[0]):
        return args[0]
    if args or not options:
        raise TypeError("use @miniray.method or @miniray.method(option=value, ...)")
    Options().merged("method", options)

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(function, METHOD_OPTIONS, options)
        return function

    return mark


__all__ = [
    "Actor",
    "ActorClass",
    "ActorHandle",
    "CallSpec",
    "ClassSpec",
    "RemoteFunction",
    "method",
    "remote",
]
