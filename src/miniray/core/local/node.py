"""One process of a session: its socket, its I/O thread, its connections to the other processes.

Two kinds of connection exist. *Call* connections carry calls to a worker and results back; the
worker's main thread reads them itself, and so does a caller that waits for a result, so a call
costs no thread switch. *Control* connections carry everything else (fetching values, giving back
credits, questions to the driver) and are served by the I/O thread, also while user code runs.

The I/O thread never runs user code and never blocks on a peer.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import struct
import threading
import time
import traceback
from _operator import _compare_digest as compare_digest  # hmac's, without loading hashlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from miniray.core.local import system
from miniray.core.local.actors import ActorEntry
from miniray.core.local.info import SessionInfo
from miniray.core.local.objects import PENDING, PLAIN, Blob, Entry
from miniray.core.local.sharing import Sharing
from miniray.core.local.store import Lease, Store, Usage
from miniray.core.local.wire import Closed, Stream, frame
from miniray.errors import MinirayError, ObjectLostError, SessionEndedError

DRIVER = 0
_MOMENT = 0.02
_TRIM_SECONDS = 3.0
_ID_BITS = 40
_HELLO = struct.Struct("<32sII")
CALLS, CONTROL = 1, 2  # what a new connection is for

# Kinds of control message.
FETCH, VALUE, RETURNS, DEAD, ASK, ANSWER, INIT, EXIT, CANCEL, STEAL, RECALL, BLOCKED = range(1, 13)

Reply = Callable[[Any, Sequence[Blob]], None]


def owner_of(id: int) -> int:
    """The process that made the id, and so the object or the call."""
    return id >> _ID_BITS


class Node(Sharing):
    """The process's part in the session. ``engine`` is set by whoever makes it."""

    engine: Any

    def __init__(self, info: SessionInfo, proc: int, slot: int, listener: socket.socket) -> None:
        self._waker = system.Waker()
        super().__init__(self.wake)
        self.info = info
        self.proc = proc
        self.ids = itertools.count((proc << _ID_BITS) + 1)
        self.usage = Usage(info.usage_fd, slot, info.memory_limit)
        self.store = Store(self, self.ids, self.usage, info.spill_dir, self.wake)
        self.poller = system.Poller()
        self.dirty: set[Any] = set()  # channels with calls not yet written to the socket
        self.channels: dict[int, set[Any]] = {}
        #: Objects and streams that somebody waits for.
        self.awaited: set[Any] = set()
        self.closing = False
        #: What to do with a new call connection; only workers take calls.
        self.on_calls: Callable[[socket.socket, int], None] | None = None
        #: What to do when a process closes its control connection.
        self.on_peer_lost: Callable[[int], None] = lambda proc: None
        self.answers: dict[str, Callable[[int, Any, list[Blob], Reply], None]] = {}
        self.messages: dict[int, Callable[[int, Any, list[Blob]], None]] = {
            FETCH: self._on_fetch,
            VALUE: self._on_value,
            RETURNS: lambda proc, meta, _: self.take_back(proc, meta),
            DEAD: lambda _, meta, __: self.declare_dead(meta),
            ASK: self._on_ask,
            ANSWER: self._on_answer,
        }
        self._listener = listener
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poll_lock = threading.Lock()
        self._peers: dict[int, Stream] = {}
        self._asked: dict[int, tuple[int, Callable[[bool, Any, list[Blob]], None]]] = {}
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False
        self._later: set[Any] = set()
        self._ticking = False
        self._thread = threading.Thread(target=self._run, name="miniray-io", daemon=True)

    def start(self) -> None:
        self._listener.setblocking(False)
        self.watch(self._listener.fileno(), lambda _: self._accept())
        self.watch(self._waker.fd, lambda _: self._waker.clear())
        self._thread.start()

    @property
    def in_io_thread(self) -> bool:
        return threading.get_ident() == self._thread.ident

    # -- the I/O thread -------------------------------------------------------------------------

    def wake(self) -> None:
        """Have the I/O thread look at its queues. Cheap, and safe from ``__del__``."""
        if self._woken:
            return
        try:
            self._woken = True
            if not self.closing:
                self._waker.wake()
        except BaseException:
            # Ctrl-C right here: with the flag set and nobody woken, all later ones would be lost.
            self._woken = False
            raise

    def look_later(self, channel: Any) -> None:
        """Have the I/O thread read ``channel`` in a moment if no waiting thread does by then."""
        self._later.add(channel)
        if not self._ticking:  # the I/O thread clears this before it looks: one of us notices
            self._ticking = True
            self.wake()

    def _look(self) -> None:
        self._ticking = False
        count = len(self._later)
        if count:
            self._ticking = True
        for _ in range(count):  # not by iteration: other threads add to it meanwhile
            channel = self._later.pop()
            if channel.pending:
                channel.arm()

    def post(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the I/O thread soon."""
        self._posted.append(action)
        self.wake()

    def watch(self, fd: int, handler: Callable[[int], None]) -> None:
        """Call ``handler`` in the I/O thread when ``fd`` is readable."""
        with self._poll_lock:
            self._handlers[fd] = handler
            self.poller.set(fd, 0, system.IN)

    def unwatch(self, fd: int) -> None:
        with self._poll_lock:
            del self._handlers[fd]
            self.poller.set(fd, system.IN, 0)

    def rewatch(self, stream: Stream, add: int = 0, remove: int = 0) -> None:
        """Change what a stream is watched for; its ``handler`` gets the events."""
        with self._poll_lock:
            events = (stream.events | add) & ~remove
            if events:
                assert stream.handler is not None
                self._handlers[stream.fd] = stream.handler
            else:
                self._handlers.pop(stream.fd, None)
            self.poller.set(stream.fd, stream.events, events)
            stream.events = events

    def watch_output(self, stream: Stream) -> None:
        """Call ``stream.flush`` when it can be written to again."""
        self.rewatch(stream, add=system.OUT)

    def flush_output(self, stream: Stream) -> None:
        """The socket is writable: send what is queued, and stop watching when all is out."""
        stream.flush(lambda: self.rewatch(stream, remove=system.OUT))

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            # A bug of ours. Without this thread everybody would wait for ever: better to end.
            traceback.print_exc()
            self.crashed(MinirayError(f"miniray's I/O thread failed: {error!r}"))

    def crashed(self, error: MinirayError) -> None:
        """Nothing works any more: whoever waits gets ``error``. A worker just ends."""
        self.closing = True
        self.fail_awaited(error)

    def _serve(self) -> None:
        look_at = trim_at = 0.0
        while not self.closing:
            timeout = _MOMENT if self._ticking else _TRIM_SECONDS if self.store.watched else None
            for fd, events in self.poller.poll(timeout):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler(events)
                handler = None  # it may be the last to hold a connection that just ended
            # Cleared before the queues are read: what is added later wakes us again.
            self._woken = False
            while self._posted:
                self._posted.popleft()()
            for parent, returned in self.pop_returns().items():
                self._return(parent, returned)
            now = time.monotonic()
            if self._ticking and now >= look_at:
                self._look()
                look_at = now + _MOMENT
            if self.store.watched and now >= trim_at:
                self.store.trim()
                trim_at = now + _TRIM_SECONDS

    def _return(self, parent: int, returned: list[tuple[int, int]]) -> None:
        if parent == self.proc:
            self.released_actors([id for id, _ in returned])
        else:
            self.tell(parent, RETURNS, returned)

    def released_actors(self, ids: list[int]) -> None:
        """The last handle of these actors is gone. Only the driver is anyone's last parent."""

    def close(self) -> None:
        """Stop the I/O thread and end all connections."""
        self.closing = True
        self._waker.wake()
        if not self.in_io_thread and self._thread.ident is not None:
            self._thread.join()
        with self._poll_lock:
            self._handlers.clear()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()
        self._listener.close()
        self._posted.clear()
        self.poller.close()
        self._waker.close()
        self.store.close()
        self.forget()
        self.fail_awaited()

    def fail_awaited(self, error: MinirayError | None = None) -> None:
        """The session has ended: nothing will come any more for those who wait."""
        if error is None:
            error = SessionEndedError("this miniray session was shut down while somebody waited")
        while self._asked:
            _, (_, then) = self._asked.popitem()
            then(False, error, [])
        while self.awaited:
            self.awaited.pop().fail(error)

    # -- connections ----------------------------------------------------------------------------

    def dial(self, proc: int, purpose: int) -> socket.socket:
        """A new connection to ``proc``. Raises ``Closed`` when it does not listen (any more)."""
        if self.closing or proc in self.dead:
            raise Closed
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(self.info.path(proc))
            sock.send(_HELLO.pack(self.info.token, self.proc, purpose))
        except OSError as error:
            sock.close()
            raise Closed from error
        return sock

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left: it stays in the queue until there is one
            time.sleep(0.01)
            return
        # Nothing is unpickled from a peer that has not proved to belong to the session.
        if system.peer_uid(sock) not in (os.getuid(), 0):
            sock.close()
            return
        sock.setblocking(False)
        received = bytearray()

        def hello(_: int) -> None:
            try:
                data = sock.recv(_HELLO.size - len(received))
            except BlockingIOError:
                return
            except OSError:
                data = b""
            received.extend(data)
            if data and len(received) < _HELLO.size:
                return
            self.unwatch(sock.fileno())
            if not data or not compare_digest(received[:32], self.info.token):
                sock.close()
                return
            _, proc, purpose = _HELLO.unpack(received)
            self._welcome(sock, proc, purpose)

        self.watch(sock.fileno(), hello)

    def _welcome(self, sock: socket.socket, proc: int, purpose: int) -> None:
        sock.setblocking(True)
        if purpose == CONTROL:
            self._peers[proc] = self._add_peer(sock, proc)
        elif self.on_calls is not None:
            self.on_calls(sock, proc)
        else:
            sock.close()

    def _add_peer(self, sock: socket.socket, proc: int) -> Stream:
        peer = Stream(sock, proc, self.watch_output)
        peer.handler = lambda events: self._on_peer(peer, events)
        self.rewatch(peer, add=system.IN)
        return peer

    def _peer(self, proc: int) -> Stream:
        peer = self._peers.get(proc)
        if peer is None:
            with self.lock:
                peer = self._peers.get(proc)
                if peer is None:
                    peer = self._peers[proc] = self._add_peer(self.dial(proc, CONTROL), proc)
        return peer

    def _on_peer(self, peer: Stream, events: int) -> None:
        try:
            if events & system.OUT:
                self.flush_output(peer)
            if events & ~system.OUT:
                for kind, body, fds in peer.read():
                    self._on_message(peer.peer, kind, body, fds)
        except Closed:
            self._drop_peer(peer)

    def _drop_peer(self, peer: Stream) -> None:
        self.rewatch(peer, remove=peer.events)
        peer.handler = None  # it refers to the peer: no cycle, so the socket closes now
        peer.close()
        if self._peers.get(peer.peer) is peer:
            del self._peers[peer.peer]
            self.on_peer_lost(peer.peer)

    # -- control messages -----------------------------------------------------------------------

    def tell(self, proc: int, kind: int, meta: Any, blobs: Sequence[Blob] = ()) -> bool:
        """Send a control message; False when ``proc`` is gone."""
        fds: list[int] = []
        try:
            wires = [blob.to_wire(self, proc, fds) for blob in blobs]
            body = pickle.dumps((meta, wires), 5)
            self._peer(proc).send(frame(kind, body, len(fds)), fds)
        except Closed:
            return False
        return True

    def _on_message(self, proc: int, kind: int, body: bytearray, fds: Sequence[int]) -> None:
        meta, wires = pickle.loads(body)
        taken = iter(fds)
        blobs = [Blob.from_wire(self, wire, proc, taken) for wire in wires]
        self.messages[kind](proc, meta, blobs)

    def ask(
        self,
        proc: int,
        question: str,
        meta: Any,
        blobs: Sequence[Blob],
        then: Callable[[bool, Any, list[Blob]], None],
    ) -> None:
        """Send a question; ``then(ok, answer, blobs)`` is called with the answer, in any thread.

        When ``proc`` dies first, ``then(False, error, [])`` is called.
        """
        if proc == self.proc:
            self._answer(proc, question, meta, list(blobs), lambda m, b: then(True, m, list(b)))
            return
        number = next(self.ids)
        self._asked[number] = (proc, then)
        if not self.tell(proc, ASK, (number, question, meta), blobs):
            self._asked.pop(number, None)
            then(False, ObjectLostError("the process that was asked is gone"), [])

    def ask_and_wait(
        self, proc: int, question: str, meta: Any, blobs: Sequence[Blob] = ()
    ) -> tuple[Any, list[Blob]]:
        """``ask`` for user threads: blocks for the answer, raises what the other side raised."""
        assert not self.in_io_thread, "the I/O thread would wait for itself"
        done = threading.Lock()
        done.acquire()
        outcome: list[Any] = []

        def then(ok: bool, answer: Any, blobs: list[Blob]) -> None:
            outcome.extend((ok, answer, blobs))
            done.release()

        self.ask(proc, question, meta, blobs, then)
        done.acquire()
        ok, answer, answered = outcome
        if not ok:
            raise answer
        return answer, answered

    def _on_ask(self, proc: int, meta: Any, blobs: list[Blob]) -> None:
        number, question, inner = meta

        def reply(answer: Any, answered: Sequence[Blob]) -> None:
            failed = isinstance(answer, BaseException)
            self.tell(proc, ANSWER, (number, not failed, answer), answered)

        try:
            self._answer(proc, question, inner, blobs, reply)
        except (MinirayError, ValueError, TypeError, OSError) as error:
            reply(error, ())

    def _answer(self, proc: int, question: str, meta: Any, blobs: list[Blob], reply: Reply) -> None:
        self.answers[question](proc, meta, blobs, reply)

    def _on_answer(self, proc: int, meta: Any, blobs: list[Blob]) -> None:
        number, ok, answer = meta
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked[1](ok, answer, blobs)

    # -- values of other processes' objects -------------------------------------------------------

    def fetch(self, entry: Entry) -> None:
        """Ask the owner for the value of a borrowed object, once; ``entry`` resolves later."""
        if entry.parent is None or entry.origin is not None or entry.state != PENDING:
            return
        entry.origin = "fetching"
        owner = owner_of(entry.id)

        def then(ok: bool, answer: Any, blobs: list[Blob]) -> None:
            if not ok:
                entry.fail(ObjectLostError(f"the owner of object {entry.id:x} is gone: {answer}"))
            elif answer is None:
                entry.fail(ObjectLostError(f"object {entry.id:x} was freed by its owner"))
            else:
                state, value = answer
                entry.resolve(state, blobs[0] if blobs else value)

        number = next(self.ids)
        self._asked[number] = (owner, then)
        if not self.tell(owner, FETCH, (number, entry.id)):
            self._asked.pop(number, None)
            then(False, "its process ended", [])

    def _on_fetch(self, proc: int, meta: Any, _: list[Blob]) -> None:
        number, id = meta
        entry = self.find(id)
        if not isinstance(entry, Entry):
            self.tell(proc, VALUE, (number, None))
            return

        def send() -> None:
            if entry.state == PLAIN:
                self.tell(proc, VALUE, (number, (PLAIN, entry.value)))
            else:
                self.tell(proc, VALUE, (number, (entry.state, None)), [entry.value])

        entry.add_waiter(send)

    def _on_value(self, proc: int, meta: Any, blobs: list[Blob]) -> None:
        number, answer = meta
        asked = self._asked.pop(number, None)
        if asked is not None:
            asked[1](True, answer, blobs)

    # -- receiving shared things ------------------------------------------------------------------

    def receive_ref(self, id: int, proc: int) -> Entry:
        """The entry of an object whose ref ``proc`` sent us with one credit."""
        with self.lock:
            known = self.find(id)
            if known is not None:
                self.give_back(proc, id)  # we hold it already, from somebody else or as owner
                return known  # type: ignore[return-value]
            entry = Entry(self, id, proc)
            self.borrowed[id] = entry
        return entry

    def receive_actor(self, wire: Any, proc: int) -> ActorEntry:
        with self.lock:
            known = self.find(wire[0])
            if known is not None:
                self.give_back(proc, wire[0])
                return known  # type: ignore[return-value]
            actor = ActorEntry.from_wire(self, wire, proc)
            self.borrowed[actor.id] = actor
        return actor

    def receive_lease(self, id: int, segment_id: int, size: int, fd: int, proc: int) -> Lease:
        with self.lock:
            known = self.find(id)
            if known is not None:
                if fd >= 0:
                    os.close(fd)
                self.give_back(proc, id)
                return known  # type: ignore[return-value]
            try:
                lease = self.store.adopt(id, segment_id, fd, size, proc)
            except OSError:
                self.give_back(proc, id)
                raise
            self.borrowed[id] = lease
        return lease

    # -- death ------------------------------------------------------------------------------------

    def declare_dead(self, proc: int) -> None:
        """``proc`` ended: void its credits, fail what waits for it, drop its memory."""
        super().declare_dead(proc)
        self.store.forget_home(proc)
        peer = self._peers.get(proc)
        if peer is not None:
            # A child it forked may hold its end open: what is sent there would never be answered.
            peer.close()
        for channel in self.channels.pop(proc, set()).copy():
            channel.lost()
        for number, (asked, then) in list(self._asked.items()):
            if asked == proc and self._asked.pop(number, None) is not None:
                then(False, ObjectLostError("its process ended"), [])

    def flush_calls(self) -> None:
        """Write out calls that were held back to go together; before any wait."""
        while self.dirty:
            self.dirty.pop().flush_batch()
