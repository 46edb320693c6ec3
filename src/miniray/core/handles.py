"""What callers hold of an actor: its handle and the handle's methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from miniray.core.engine import Engine
from miniray.core.options import Options
from miniray.core.refs import ObjectRef
from miniray.core.specs import ActorInfo, CallSpec

if TYPE_CHECKING:
    from typing_extensions import ParamSpec as ParamSpecWithDefault
    from typing_extensions import TypeVar as TypeVarWithDefault

    #: What a call takes, and what it gives at once; anything where it is not said.
    P = ParamSpecWithDefault("P", default=...)
    R = TypeVarWithDefault("R", default=Any)
else:
    P = ParamSpec("P")
    R = TypeVar("R")

T = TypeVar("T")


class ActorMethod(Generic[P, R]):
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

    # Any argument may be a ref in place of the value: not to be said with a ParamSpec, so the first
    # three places are written out.
    @overload
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def remote(self, a: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def remote(self, a: Any, b: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> R: ...
    @overload
    def remote(self, a: Any, b: Any, c: ObjectRef[Any], /, *args: Any, **kwargs: Any) -> R: ...
    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; returns an ``ObjectRef`` (or several, or a generator) at once."""
        spec = self._spec
        spec.check(args, kwargs)
        name = spec.name.rpartition(".")[2]
        return self._engine.call(self._actor, name, args, kwargs, self._num_returns)

    def options(self, **changes: Any) -> ActorMethod[P, Any]:
        merged = Options(num_returns=self._num_returns).merged("method", changes)  # type: ignore[arg-type]
        num_returns = 1 if merged.num_returns is None else merged.num_returns
        return ActorMethod(self._engine, self._actor, self._spec, num_returns)

    def __repr__(self) -> str:
        return f"ActorMethod({self._spec.name})"

    def __reduce__(self) -> Any:
        handle = self._engine.handle(self._actor)
        return _method_of, (handle, self._spec, self._num_returns)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"actor methods are called with .remote(): {self._spec.name}.remote(...)")


def _method_of(
    handle: ActorHandle[Any], spec: CallSpec, num_returns: int | str
) -> ActorMethod[..., Any]:
    return ActorMethod(handle._engine, handle._actor, spec, num_returns)


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

    def __getattr__(self, name: str) -> ActorMethod[..., Any]:
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
        method: ActorMethod[..., Any] = ActorMethod(
            self._engine, self._actor, spec, spec.num_returns
        )
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

    def __copy__(self) -> ActorHandle[T]:
        return self

    def __deepcopy__(self, memo: object) -> ActorHandle[T]:
        return self  # there is one actor, whatever refers to it

    def __reduce__(self) -> Any:
        return self._engine.reduce_handle(self)
