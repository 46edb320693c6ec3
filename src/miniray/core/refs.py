"""What callers hold: refs to values, streams of them, and the handles of actors."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from miniray.core.options import Options
from miniray.core.specs import ActorInfo, CallSpec

# asyncio and concurrent.futures are imported where used: they would double `import miniray`.
if TYPE_CHECKING:
    import asyncio
    import concurrent.futures
    import queue

    from miniray.core.engine import Engine

T = TypeVar("T")
Value = TypeVar("Value", covariant=True)

if TYPE_CHECKING:
    from typing_extensions import ParamSpec as ParamSpecWithDefault
    from typing_extensions import TypeVar as TypeVarWithDefault

    Item = TypeVarWithDefault("Item", covariant=True, default=Any)
    #: What a call takes, and what it gives at once; anything where it is not said.
    P = ParamSpecWithDefault("P", default=...)
    R = TypeVarWithDefault("R", default=Any)
else:
    Item = TypeVar("Item", covariant=True)
    P = ParamSpec("P")
    R = TypeVar("R")


class ObjectRef(Generic[Value]):
    """A reference to a value that exists, or will exist, somewhere.

    Pass it to other calls, put it in containers, return it; ``miniray.get(ref)`` or ``await ref``
    gives the value. The value is freed when the last ref to it, in any process, is gone.

    Each engine subclasses this and provides ``_engine`` and ``_id``.
    """

    __slots__ = ("__weakref__",)

    @property
    def _engine(self) -> Engine:
        raise NotImplementedError("provided by the engine's own subclass")

    @property
    def _id(self) -> bytes:
        raise NotImplementedError("provided by the engine's own subclass")

    def hex(self) -> str:
        """The object's id, as text."""
        return self._id.hex()

    def binary(self) -> bytes:
        """The object's id, as bytes."""
        return self._id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"ObjectRef({self.hex()})"

    def __copy__(self) -> ObjectRef[Value]:
        return self

    def __deepcopy__(self, memo: object) -> ObjectRef[Value]:
        return self  # a copy of a reference refers to the same

    def __reduce__(self) -> Any:
        # miniray's own pickler (core/serialize.py) does not come this way.
        raise TypeError(
            f"{self!r} means nothing outside of this session: pass it to a call, put it in a "
            "container or return it, but do not pickle it yourself; to save the value, get it"
        )

    def future(self) -> concurrent.futures.Future[Value]:
        """A ``concurrent.futures.Future`` that completes with the value or the error."""
        import concurrent.futures

        future: concurrent.futures.Future[Value] = concurrent.futures.Future()

        def finish() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = self._engine.get([self], None)[0]
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        # Not in the engine's own thread: unpickling and what the user adds to the future may block.
        self._engine.on_ready(self, lambda: later(finish))
        return future

    def __await__(self) -> Generator[Any, None, Value]:
        ready, notify = announced()
        self._engine.on_ready(self, notify)
        yield from ready.__await__()
        value: Value = self._engine.get([self], None)[0]
        return value


def announced() -> tuple[asyncio.Future[None], Callable[[], None]]:
    """A future of the running event loop, and what any thread calls to complete it."""
    import asyncio

    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    def notify() -> None:
        # The loop may be closed by the time a result nobody waits for any more arrives.
        if not loop.is_closed():
            loop.call_soon_threadsafe(wake)

    return ready, notify


def later(task: Callable[[], None]) -> None:
    """Do ``task``, which may block, in a thread kept for that; one after the other."""
    _callbacks().put(task)


def say_unseen(error: BaseException) -> None:
    """Log that a call ended with ``error`` and that its last ref is gone without anybody asking."""
    import logging

    logging.getLogger("miniray").error("a call failed and nobody asked for its result: %s", error)


@functools.lru_cache(maxsize=1)
def _callbacks() -> queue.SimpleQueue[Callable[[], None]]:
    """The queue of that thread."""
    import queue
    import threading

    tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            tasks.get()()

    threading.Thread(target=work, name="miniray-callbacks", daemon=True).start()
    return tasks


os.register_at_fork(after_in_child=_callbacks.cache_clear)  # the thread is not in the child


class ObjectRefGenerator(Iterator[ObjectRef[Item]], AsyncIterator[ObjectRef[Item]]):
    """Refs to the items of a remote generator, each available as soon as it was yielded.

    Iterate with ``for`` or ``async for``. An exception in the generator is raised by ``get`` on the
    item where it happened; iteration ends after it. Each engine subclasses this.
    """

    def __next__(self) -> ObjectRef[Item]:
        raise NotImplementedError("provided by the engine's own subclass")

    async def __anext__(self) -> ObjectRef[Item]:
        raise NotImplementedError("provided by the engine's own subclass")

    def __reduce__(self) -> Any:
        raise TypeError("an ObjectRefGenerator cannot be sent to another process; send its refs")


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
            public = sorted(m for m in info.list_methods() if not m.startswith("_"))
            known = ", ".join(public) or "none"
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
        return [*super().__dir__(), *self._info.list_methods()]

    def __copy__(self) -> ActorHandle[T]:
        return self

    def __deepcopy__(self, memo: object) -> ActorHandle[T]:
        return self  # there is one actor, whatever refers to it

    def __reduce__(self) -> Any:
        return self._engine.reduce_handle(self)
