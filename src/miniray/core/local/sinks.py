"""Where the result of a call goes: into one object, several, a stream, or nowhere.

Each has ``resolve(state, value)`` and ``fail(error)``, as an ``Entry`` has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniray.core.local.objects import BLOB, FAILED, Blob, Entry, LocalRef
from miniray.core.refs import ObjectRefGenerator

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

    def fail(self, error: BaseException) -> None:
        for entry in self.entries:
            entry.fail(error)


class Nowhere:
    """The sink of a call with ``num_returns=0``."""

    def resolve(self, state: int, value: Any) -> None:
        return

    def fail(self, error: BaseException) -> None:
        return


class StreamState:
    """The sink of a streaming call: items as they come, then an end.

    Held by the channel while the call runs; the generator the user has is a separate object, so
    that dropping it is noticed: items that come after that are let go at once.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.items: deque[Entry] = deque()
        self.ended = False
        self.abandoned = False
        self.condition = threading.Condition()

    def add(self, blob: Blob) -> None:
        if self.abandoned:
            return
        entry = Entry(self.node, next(self.node.ids))
        entry.resolve(BLOB, blob)
        with self.condition:
            self.items.append(entry)
            self.condition.notify_all()

    def resolve(self, state: int, value: Any) -> None:
        """The end; with ``FAILED``, the error becomes the last item."""
        with self.condition:
            if self.ended:
                return
            if state == FAILED:
                entry = Entry(self.node, next(self.node.ids))
                entry.resolve(FAILED, value)
                self.items.append(entry)
            self.ended = True
            self.condition.notify_all()

    def fail(self, error: BaseException) -> None:
        self.resolve(FAILED, Blob.of(self.node, error))


class LocalGenerator(ObjectRefGenerator):
    """Refs to the items of a remote generator."""

    def __init__(self, state: StreamState) -> None:
        self._state = state

    def __next__(self) -> LocalRef:
        state = self._state
        state.node.flush_calls()
        state.node.awaited.add(state)
        if state.node.closing:
            state.node.fail_awaited()
        with state.condition:
            while not state.items and not state.ended:
                state.condition.wait()
            if state.items:
                return LocalRef(state.items.popleft())
        raise StopIteration

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
