"""A call on its way to a worker: what is sent, and what it waits for before that."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from miniray.core.local.objects import FAILED, PENDING, Blob, Entry, LocalRef, entry_of, is_plain
from miniray.core.local.wire import frame
from miniray.core.serialize import pack
from miniray.errors import NotSerializableError, TaskCancelledError

if TYPE_CHECKING:
    from miniray.core.local.node import Node

# Kinds of frame on a call connection: calls one way, results the other.
CALL_PLAIN, CALL, FUNCTION, R_PLAIN, R_ONE, R_MANY, R_ITEM, R_END, R_STOLEN = range(1, 10)


class Call:
    """One call. ``body`` is its frame body when all arguments are plain, else ``args`` holds them.

    ``deps`` are the top-level refs among the arguments, by position or keyword: they are resolved
    before the call is sent. ``retries`` is how often it may be sent again when the worker dies,
    unless it was ``cancelled``.
    A task has the id of its function as ``method``, the function itself as ``spec``, and the call
    that submitted it as ``parent``.
    """

    __slots__ = (
        "args",
        "body",
        "cancelled",
        "deps",
        "id",
        "method",
        "num_returns",
        "parent",
        "retries",
        "sink",
        "spec",
    )

    def __init__(self, id: int, sink: Any, method: str | int, num_returns: int | str) -> None:
        self.id = id
        self.sink = sink
        self.method = method
        self.num_returns = num_returns
        self.retries = 0
        self.cancelled = False
        self.body: bytes | None = None
        self.args: Blob | None = None
        self.deps: list[tuple[int | str, Entry]] = []
        self.spec: Any = None
        self.parent: int | None = None

    def fail(self, node: Node, cause: Blob | BaseException) -> None:
        """Have it end with an error: soon, in the I/O thread.

        Not here and now, for those who wait for it go on at once. The caller may hold a lock that
        one of them needs, and in a chain of calls each would go on inside the one before.
        """
        blob = Blob.of(node, cause) if isinstance(cause, BaseException) else cause
        node.post(lambda: self.sink.resolve(FAILED, blob))

    def fail_cancelled(self, node: Node) -> None:
        self.fail(node, TaskCancelledError(f"{self.label} was cancelled"))

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
