"""Objects, their refs, and their bytes on the way between processes.

An ``Entry`` is what a process knows about one object: pending, or a small plain value, or a
``Blob`` (pickled, inline or in shared memory), or a failure (a pickled exception). The process that
made the ref owns the object: others who hold it ask the owner for the value.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from miniray.core.local.mapped import unreadable, view_of, write
from miniray.core.local.shared_memory import SharedMemory
from miniray.core.local.sharing import Shared
from miniray.core.local.store import Lease
from miniray.core.refs import ObjectRef, later, say_unseen
from miniray.core.serialize import pack, unpack
from miniray.errors import SessionEndedError, TaskCancelledError
from miniray.tracebacks import hide_frames

if TYPE_CHECKING:
    import concurrent.futures

    from miniray.core.local.channel import Channel
    from miniray.core.local.node import Node

#: From this size on a value goes through shared memory.
LARGE = 100_000
#: Values of these types are immutable and pickle to themselves: no need for cloudpickle, nor for
#: unpickling anew at each get.
PLAIN_TYPES = frozenset({type(None), bool, int, float, complex})
_TEXT_TYPES = frozenset({str, bytes})
_MAX_TEXT = 16384

PENDING, PLAIN, BLOB, FAILED = range(4)

Wire = tuple[Any, ...]


def is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in PLAIN_TYPES or (kind in _TEXT_TYPES and len(value) <= _MAX_TEXT)


class Entry(Shared):
    """One object. ``value`` is the plain value or the Blob, by ``state``.

    While pending, ``channel`` is the connection the result will come on, if it is on its way, so
    that a waiting thread can read it there itself; ``origin`` is who to ask about the call behind
    it (for cancel and retry).
    """

    __slots__ = ("channel", "origin", "state", "value", "waiters")

    sharing: Node

    def __init__(self, node: Node, id: int, parent: int | None = None) -> None:
        self.sharing = node
        self.id = id
        self.parent = parent
        self.given = {}
        self.state = PENDING
        self.value: Any = None
        self.waiters: list[Callable[[], None]] | None = None
        self.channel: Channel | None = None
        self.origin: Any = None

    def resolve(self, state: int, value: Any) -> None:
        """Set the outcome, once, and tell who waits. A second outcome is ignored."""
        if self.state != PENDING:
            return
        self.value = value
        self.state = state
        self.channel = None
        self.origin = None
        # Order matters: `add_waiter` appends and then looks at the state, so one of us sees it.
        if self.waiters:
            self._notify()

    def fail(self, error: BaseException) -> None:
        self.resolve(FAILED, Blob.of(self.sharing, error))

    def add_waiter(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when there is an outcome; at once if there is one."""
        node = self.sharing
        with node.lock:
            if self.waiters is None:
                self.waiters = []
                node.awaited.add(self)
            self.waiters.append(callback)
        if self.state != PENDING:
            self._notify()
            return
        if node.closing:
            node.fail_awaited()
            return
        channel = self.channel
        if channel is not None:
            channel.arm()  # nobody may be reading there: have the I/O thread do it

    def remove_waiter(self, callback: Callable[[], None]) -> None:
        """Whoever gave up waiting leaves nothing behind, however often he comes back."""
        with self.sharing.lock:
            if self.waiters and callback in self.waiters:
                self.waiters.remove(callback)
                if not self.waiters:
                    self.waiters = None
                    self.sharing.awaited.discard(self)

    def looked_at(self) -> None:
        """Somebody knows how it ended, or has no need to."""
        if isinstance(self.value, Failure):
            self.value.node = None

    def _notify(self) -> None:
        with self.sharing.lock:
            self.sharing.awaited.discard(self)
            waiters, self.waiters = self.waiters, None
        for callback in waiters or ():
            callback()

    def blob(self) -> Blob:
        """The outcome as a Blob, to send on."""
        if self.state == PLAIN:
            return Blob(data=pickle.dumps(self.value, 5))
        blob: Blob = self.value
        return blob


class LocalRef(ObjectRef[Any]):
    """A ref of the local engine."""

    __slots__ = ("_entry",)

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @property
    def _engine(self) -> Any:
        return self._entry.sharing.engine

    @property
    def _id(self) -> bytes:
        return self._entry.id.to_bytes(12, "big")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LocalRef) and self._entry.id == other._entry.id

    def __hash__(self) -> int:
        return self._entry.id

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            with self._engine.on_block():
                return (yield from super().__await__())
        except BaseException as error:
            hide_frames(error)
            raise

    def future(self) -> concurrent.futures.Future[Any]:
        # From here to its end: who waits for it, and when, is not to be known.
        future, waiting = super().future(), self._engine.on_block()
        waiting.__enter__()
        future.add_done_callback(lambda _: waiting.__exit__(None, None, None))
        return future


@dataclasses.dataclass(slots=True, eq=False)
class Blob:
    """A pickled value: inline (``data``, ``buffers``) or in shared memory (``lease``, ``layout``).

    ``layout`` has (offset, length) of the pickle stream and then of each buffer. ``refs`` are the
    entries of objects and actors inside; the blob keeps them alive.
    """

    data: bytes | None = None
    buffers: Sequence[bytes] = ()
    private: Sequence[bool] = ()
    refs: Sequence[Shared] = ()
    lease: Lease | None = None
    layout: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(
        cls,
        node: Node,
        value: Any,
        what: str = "value",
        holes: Sequence[Any] = (),
        fill: Callable[[list[Any]], None] | None = None,
    ) -> Blob:
        """Pickle ``value``. Raises ``NotSerializableError``, ``ObjectStoreFullError``.

        ``holes``, the bytes of arrays inside it, are written by ``fill``: in shared memory if the
        value goes there.
        """
        packed = pack(value, what)
        refs = [entry_of(node, r) for r in packed.refs]
        if packed.nbytes < LARGE:
            if fill is not None:
                fill(list(holes))
            buffers = [bytes(b) for b in packed.buffers]
            return cls(bytes(packed.data), buffers, packed.private, refs)
        lease, layout, memory = write(node, packed, holes)
        if fill is not None:
            fill(memory)
        return cls(private=packed.private, refs=refs, lease=lease, layout=layout)

    def load(self, node: Node, *, writable: bool = True) -> Any:
        """The value, over the shared memory itself where it is large.

        Unless ``writable``, tensors are over read-only memory as well.
        """
        refs = [_public(node, r) for r in self.refs] if self.refs else ()
        if self.lease is None:
            assert self.data is not None
            return unpack(self.data, self.buffers, refs)
        (offset, length), *places = self.layout
        end = offset + length if not places else places[-1][0] + places[-1][1]
        shared = private = view_of(self.lease, self.lease.segment.map, end, False)
        if writable and any(self.private):
            private = view_of(self.lease, self.lease.private_map(), end, True)
        # Slices of one view: hundreds of tensors need not cost an array with a lease each.
        buffers = [
            (private if own else shared)[at : at + size]
            for (at, size), own in zip(places, self.private, strict=True)
        ]
        stream = shared[offset : offset + length]
        return unpack(stream, buffers, refs, readonly_tensors=not writable)

    def to_wire(self, node: Node, proc: int, fds: list[int]) -> Wire:
        """What to send to ``proc``: gives it credits on all that is inside. Raises ``Closed``."""
        refs = [_describe(node, r, proc, fds) for r in self.refs] if self.refs else ()
        if self.lease is None:
            return refs, self.private, self.data, self.buffers
        node.give(self.lease, proc)
        segment = self.lease.segment
        fds.append(segment.fd)
        return refs, self.private, self.lease.id, segment.id, segment.size, self.layout

    @classmethod
    def from_wire(cls, node: Node, wire: Wire, proc: int, fds: Iterator[int]) -> Blob:
        """The blob that ``proc`` sent; takes over its credits."""
        refs = [_receive(node, r, proc, fds) for r in wire[0]] if wire[0] else ()
        if len(wire) == 4:
            return cls(wire[2], wire[3], wire[1], refs)
        _, private, lease_id, segment_id, size, layout = wire
        try:
            lease = node.receive_lease(lease_id, segment_id, size, next(fds), proc)
        except OSError as error:
            return cls(unreadable(size, error))
        return cls(private=private, refs=refs, lease=lease, layout=layout)


class Failure(Blob):
    """How a call of ours ended. If it is let go and nobody has looked at it, that is said."""

    __slots__ = ("node",)

    def __init__(self, node: Node, blob: Blob) -> None:
        super().__init__(blob.data, blob.buffers, blob.private, blob.refs, blob.lease, blob.layout)
        self.node: Node | None = node  # None once somebody has looked

    def load(self, node: Node, *, writable: bool = True) -> Any:
        self.node = None
        return super().load(node, writable=writable)

    def to_wire(self, node: Node, proc: int, fds: list[int]) -> Wire:
        self.node = None  # it is the receiver's now
        return super().to_wire(node, proc, fds)

    def __del__(self) -> None:
        node = self.node
        if node is not None and not node.closing:
            # This may run in any thread, with any lock held; unpickling and logging are user code.
            node.post(lambda: later(lambda: self._say(node)))

    def _say(self, node: Node) -> None:
        error = self.load(node)
        if not isinstance(error, TaskCancelledError):
            say_unseen(error)


def entry_of(node: Node, public: Any) -> Shared:
    """Return what ``node`` knows of a ref, a handle or shared memory.

    Raise ``SessionEndedError`` if it belongs to a different session, and ``OSError`` if this
    process has no descriptor of the memory to pass on.
    """
    if isinstance(public, SharedMemory):
        public.check_descriptor()
        entry: Any = public
    else:
        entry = public._entry if isinstance(public, LocalRef) else getattr(public, "_actor", None)
    if not isinstance(entry, Shared) or entry.sharing is not node:
        # Ids begin anew in each session: it would be taken for something else.
        raise SessionEndedError(f"{public!r} belongs to another session, which has ended")
    return entry


def _public(node: Node, entry: Shared) -> Any:
    if isinstance(entry, Entry):
        return LocalRef(entry)
    return entry if isinstance(entry, SharedMemory) else node.engine.handle(entry)


def _describe(node: Node, entry: Shared, proc: int, fds: list[int]) -> Wire:
    node.give(entry, proc)
    if isinstance(entry, Entry):
        return (entry.id,)
    if isinstance(entry, SharedMemory):
        fds.append(entry.fd)
        return entry.id, entry.size
    return entry.describe()  # type: ignore[attr-defined, no-any-return]


def _receive(node: Node, wire: Wire, proc: int, fds: Iterator[int]) -> Shared:
    if len(wire) == 1:
        return node.receive_ref(wire[0], proc)
    if len(wire) == 2:
        return node.receive_memory(*wire, next(fds), proc)
    return node.receive_actor(wire, proc)
