"""Where the result of a call goes: into one object, several, a stream, or nowhere.

Each has ``resolve(state, value)``, as an ``Entry`` has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miniray.core.local.interrupts import LONGEST_SLEEP
from miniray.core.local.objects import BLOB, FAILED, Blob, Entry, LocalRef
from miniray.core.refs import ObjectRefGenerator, announced

if TYPE_CHECKING:
    from miniray.core.local.node import Node


class Many:
    """The sink of a call with several return values."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries

    def resolve(self, state: int, value: Any) -> None:
        if state == FAILED:
            for entry in self.entries:
                entry.resolve(FAILED, value)
        else:
            for entry, blob in zip(self.entries, value, strict=True):
                entry.resolve(BLOB, blob)


class Nowhere:
    """The sink of a call with ``num_returns=0``."""

    def resolve(self, state: int, value: Any) -> None:
        return


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
        #: The client that made the call and the call itself, for cancel.
        self.origin: tuple[Any, Any] | None = None
        self._come = 0  # items of all runs of the call together, each counted once
        self._known = 0  # items that this run is still to repeat
        self._lock = threading.Lock()
        self._waiters: list[Callable[[], None]] = []

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
            if end:
                self.ended, self.origin = True, None
            waiters, self._waiters = self._waiters, []
        for callback in waiters:
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
        self._state = state

    @property
    def origin(self) -> tuple[Any, Any] | None:
        """Who to ask to cancel the call, and the call; None when it has ended."""
        return self._state.origin

    def _begin(self) -> StreamState:
        state = self._state
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
        self._state.abandoned = True
        self._state.node.awaited.discard(self._state)


def make_sink(node: Node, id: int, num_returns: int | str) -> tuple[Any, Any]:
    """(sink, what the user gets) for a call."""
    if num_returns == 1:
        entry = Entry(node, id)
        return entry, LocalRef(entry)
    if num_returns == "streaming":
        state = StreamState(node)
        return state, LocalGenerator(state)
    if num_returns == 0:
        return Nowhere(), None
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
