"""A call on its way to a worker: what is sent, what it waits for before, where its result goes.

That is a sink: one object, several, or a stream. Each has ``resolve(state, value)`` and
``add_waiter(callback)``, as an ``Entry`` has.
"""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miniray.core.local.objects import (
    BLOB,
    FAILED,
    PENDING,
    Blob,
    Entry,
    LocalRef,
    entry_of,
    is_plain,
)
from miniray.core.local.peers import CANCEL, FORGET
from miniray.core.local.waiting import LONGEST_SLEEP
from miniray.core.local.wire import frame
from miniray.core.refs import ObjectRefGenerator, announced
from miniray.core.serialize import pack
from miniray.errors import NotSerializableError, TaskCancelledError

if TYPE_CHECKING:
    from miniray.core.local.node import Node

# Kinds of frame on a call connection: calls one way, results the other.
CALL_PLAIN, CALL, FUNCTION, R_PLAIN, R_ONE, R_MANY, R_ITEM, R_END, R_STOLEN = range(1, 10)


@dataclasses.dataclass(slots=True, eq=False)
class Call:
    """One call. ``body`` is its frame body when all arguments are plain, else ``args`` holds them.

    ``deps`` are the top-level refs among the arguments, by position or keyword: they are resolved
    before the call is sent. ``retries`` is how often it may be sent again when the worker dies,
    unless it was ``cancelled``.
    A task has the id of its function as ``method``, the function itself as ``spec``, and the call
    that submitted it as ``parent``.
    """

    id: int
    sink: Any
    method: str | int
    num_returns: int | str
    retries: int = 0
    cancelled: bool = False
    body: bytes | None = None
    args: Blob | None = None
    deps: list[tuple[int | str, Entry]] = dataclasses.field(default_factory=list)
    spec: Any = None
    parent: int | None = None

    def fail(self, node: Node, cause: Blob | BaseException) -> None:
        """Have it end with an error: soon, in the I/O thread.

        Not here and now, for those who wait for it go on at once. The caller may hold a lock that
        one of them needs, and in a chain of calls each would go on inside the one before.
        """
        blob = Blob.of(node, cause) if isinstance(cause, BaseException) else cause
        node.post(lambda: self.sink.resolve(FAILED, blob))

    def fail_cancelled(self, node: Node) -> None:
        self.fail(node, TaskCancelledError(f"{self.label} was cancelled"))

    def request_cancel(self, node: Node, proc: int, recursive: bool) -> None:
        """Ask worker ``proc`` to cancel the call, and to forget the request when the call ends.

        Only this side knows that: a worker can't tell a call that has ended from one that hasn't
        arrived yet.
        """

        def forget() -> None:
            node.tell(proc, FORGET, self.id)

        if node.tell(proc, CANCEL, (self.id, recursive)):
            self.sink.add_waiter(forget)

    @property
    def label(self) -> str:
        """What the user calls it."""
        return self.spec.name if self.spec is not None else str(self.method)

    def pending_deps(self) -> list[Entry]:
        return [entry for _, entry in self.deps if entry.state == PENDING]

    def failed_dep(self) -> Entry | None:
        return next((entry for _, entry in self.deps if entry.state == FAILED), None)

    def encode(self, node: Node, proc: int) -> tuple[bytes, list[int]]:
        """The frame to send to ``proc``; gives it credits on what is inside. Raises ``Closed``."""
        if self.body is not None:
            return frame(CALL_PLAIN, self.body), []
        assert self.args is not None
        fds: list[int] = []
        wires = node.encode([self.args, *(entry.blob() for _, entry in self.deps)], proc, fds)
        places = [place for place, _ in self.deps]
        body = pickle.dumps((self.id, self.method, self.num_returns, wires, places), 5)
        return frame(CALL, body, len(fds)), fds


def fill_arguments(node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Pickle the arguments into ``call``; top-level refs become its dependencies."""
    if all(map(is_plain, args)) and (not kwargs or all(map(is_plain, kwargs.values()))):
        call.body = pickle.dumps((call.id, call.method, call.num_returns, args, kwargs), 5)
        return
    for place, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, LocalRef):
            call.deps.append((place, entry_of(node, value)))  # type: ignore[arg-type]
    if call.deps:
        args = tuple(None if isinstance(v, LocalRef) else v for v in args)
        kwargs = {k: None if isinstance(v, LocalRef) else v for k, v in kwargs.items()}
    try:
        call.args = Blob.of(node, (args, kwargs))
    except NotSerializableError:
        for name, value in [*enumerate(args), *kwargs.items()]:
            pack(value, f"argument {name!r} of {call.label}")  # it says which one it is
        raise


# -- sinks -----------------------------------------------------------------------------------------


class Many:
    """The sink of a call with several return values, or none."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    def resolve(self, state: int, value: Any) -> None:
        values = value if state == BLOB else [value] * len(self.entries)
        for entry, each in zip(self.entries, values, strict=True):
            entry.resolve(state, each)

    def add_waiter(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the call has ended; never if it has no return values."""
        for entry in self.entries[:1]:
            entry.add_waiter(callback)


class StreamState:
    """The sink of a streaming call: items as they come, then an end.

    Held by the channel while the call runs; the generator the user has is a separate object, so
    that dropping it is noticed: items that come after that are let go at once. A call that is run
    again, because its worker died, gives the same items again: they are known already.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.items: deque[Entry] = deque()
        self.ended = False
        self.abandoned = False
        #: The client that made the call and the call itself, for cancel; None when it has ended.
        self.origin: tuple[Any, Any] | None = None
        self._come = 0  # items of all runs of the call together, each counted once
        self._known = 0  # items that this run is still to repeat
        self._lock = threading.Lock()
        self._waiters: list[Callable[[], None]] = []
        self._end_waiters: list[Callable[[], None]] = []

    def begin(self) -> None:
        """The call is sent, for the first time or again."""
        self._known = self._come

    def add(self, blob: Blob) -> None:
        if self._known:
            self._known -= 1
            return
        self._come += 1
        if not self.abandoned:
            self._add(BLOB, blob, end=False)

    def resolve(self, state: int, value: Any) -> None:
        """The end; with ``FAILED``, the error becomes the last item."""
        self._add(state, value, end=True)

    def _add(self, state: int, value: Any, *, end: bool) -> None:
        with self._lock:
            if self.ended:
                return
            if state == FAILED or not end:
                entry = Entry(self.node, next(self.node.ids))
                entry.resolve(state, value)
                self.items.append(entry)
            waiters, self._waiters = self._waiters, []
            if end:
                self.ended, self.origin = True, None
                waiters += self._end_waiters
                self._end_waiters = []
        for callback in waiters:
            callback()

    def add_waiter(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` at the end of the stream; immediately if it has ended."""
        with self._lock:
            if not self.ended:
                self._end_waiters.append(callback)
                return
        callback()

    def fail(self, error: BaseException) -> None:
        self.resolve(FAILED, Blob.of(self.node, error))

    def take(self, notify: Callable[[], None]) -> tuple[LocalRef | None, bool]:
        """(the next item, whether it is over); with neither, ``notify`` is called at a change."""
        with self._lock:
            if self.items:
                return LocalRef(self.items.popleft()), False
            if not self.ended:
                self._waiters.append(notify)
            return None, self.ended


class LocalGenerator(ObjectRefGenerator):
    """Refs to the items of a remote generator."""

    def __init__(self, state: StreamState) -> None:
        self.state = state

    def _begin(self) -> StreamState:
        state = self.state
        state.node.flush_calls()
        state.node.awaited.add(state)
        if state.node.closing:
            state.node.fail_awaited()
        return state

    def __next__(self) -> LocalRef:
        state = self._begin()
        while True:
            some = threading.Event()
            ref, over = state.take(some.set)
            if ref is not None:
                return ref
            if over:
                raise StopIteration
            with state.node.engine.on_block():
                while not some.wait(LONGEST_SLEEP):
                    pass

    async def __anext__(self) -> LocalRef:
        state = self._begin()
        while True:
            some, notify = announced()
            ref, over = state.take(notify)
            if ref is not None:
                return ref
            if over:
                raise StopAsyncIteration
            with state.node.engine.on_block():
                await some

    def __del__(self) -> None:
        self.state.abandoned = True
        self.state.node.awaited.discard(self.state)


def make_sink(node: Node, id: int, num_returns: int | str) -> tuple[Any, Any]:
    """(sink, what the user gets) for a call."""
    if num_returns == 1:
        entry = Entry(node, id)
        return entry, LocalRef(entry)
    if num_returns == "streaming":
        state = StreamState(node)
        return state, LocalGenerator(state)
    if num_returns == 0:
        return Many([]), None
    assert isinstance(num_returns, int)
    entries = [Entry(node, id), *(Entry(node, next(node.ids)) for _ in range(num_returns - 1))]
    return Many(entries), [LocalRef(entry) for entry in entries]


def sink_entries(sink: Any) -> Sequence[Entry]:
    """The entries a sink resolves, to note on them where the result will come from."""
    if isinstance(sink, Entry):
        return (sink,)
    return sink.entries if isinstance(sink, Many) else ()


def set_origin(sink: Any, client: Any, call: Any) -> None:
    """Note who can cancel the call."""
    if isinstance(sink, (Entry, StreamState)):
        sink.origin = (client, call)
    elif isinstance(sink, Many):
        for entry in sink.entries:
            entry.origin = (client, call)
