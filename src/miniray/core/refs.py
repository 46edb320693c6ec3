"""Futures of remote values: ``ObjectRef`` and the stream of them a generator gives."""

from __future__ import annotations

import functools
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

# asyncio and concurrent.futures are imported where used: they would double `import miniray`.
if TYPE_CHECKING:
    import asyncio
    import concurrent.futures
    import queue

    from miniray.core.engine import Engine

T = TypeVar("T", covariant=True)

if TYPE_CHECKING:
    from typing_extensions import TypeVar as TypeVarWithDefault

    Item = TypeVarWithDefault("Item", covariant=True, default=Any)
else:
    Item = TypeVar("Item", covariant=True)


class ObjectRef(Generic[T]):
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

    def __copy__(self) -> ObjectRef[T]:
        return self

    def __deepcopy__(self, memo: object) -> ObjectRef[T]:
        return self  # a copy of a reference refers to the same

    def __reduce__(self) -> Any:
        # miniray's own pickler (core/serialize.py) does not come this way.
        raise TypeError(
            f"{self!r} means nothing outside of this session: pass it to a call, put it in a "
            "container or return it, but do not pickle it yourself; to save the value, get it"
        )

    def future(self) -> concurrent.futures.Future[T]:
        """A ``concurrent.futures.Future`` that completes with the value or the error."""
        import concurrent.futures

        future: concurrent.futures.Future[T] = concurrent.futures.Future()

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

    def __await__(self) -> Generator[Any, None, T]:
        ready, notify = announced()
        self._engine.on_ready(self, notify)
        yield from ready.__await__()
        value: T = self._engine.get([self], None)[0]
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
