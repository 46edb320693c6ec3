"""Connections to the other processes of a session, and the messages and questions on them.

Two kinds of connection exist. *Call* connections carry calls to a worker and results back; the
worker's main thread reads them itself, and so does a caller that waits for a result, so a call
costs no thread switch. *Control* connections carry everything else (fetching values, giving back
credits, questions to the driver) and are served by the I/O thread, also while user code runs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import struct
import threading
import time
from _operator import _compare_digest as compare_digest  # hmac's, without loading hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from miniray.core.local import system
from miniray.core.local.iothread import IoThread
from miniray.core.local.objects import Blob, Wire
from miniray.core.local.sharing import Sharing
from miniray.core.local.spawner import SessionInfo
from miniray.core.local.wire import Closed, Stream, frame
from miniray.errors import MinirayError, ObjectLostError, SessionEndedError

DRIVER = 0
ID_BITS = 40
_HELLO = struct.Struct("<32sII")
CALLS, CONTROL = 1, 2  # what a new connection is for

# Kinds of control message.
RETURNS, DEAD, ASK, ANSWER, INIT, EXIT, CANCEL, FORGET, STEAL, RECALL, BLOCKED = range(1, 12)

Reply = Callable[[Any, Sequence[Blob]], None]


class Peers(IoThread, Sharing):
    """The connections of one process, number ``proc`` of the session."""

    def __init__(self, info: SessionInfo, proc: int, listener: socket.socket) -> None:
        IoThread.__init__(self)
        Sharing.__init__(self, self.wake)
        self.info = info
        self.proc = proc
        self.ids = itertools.count((proc << ID_BITS) + 1)
        #: What to do with a new call connection; only workers take calls.
        self.on_calls: Callable[[socket.socket, int], None] | None = None
        #: What to do when a process closes its control connection.
        self.on_peer_lost: Callable[[int], None] = lambda proc: None
        self.answers: dict[str, Callable[[int, Any, list[Blob], Reply], None]] = {}
        self.messages: dict[int, Callable[[int, Any, list[Blob]], None]] = {
            ASK: self._on_ask,
            ANSWER: self._on_answer,
        }
        self.asked: dict[int, tuple[int, Callable[[bool, Any, list[Blob]], None]]] = {}
        self._listener = listener
        self._peers: dict[int, Stream] = {}

    def start(self) -> None:
        self._listener.setblocking(False)
        self.watch(self._listener.fileno(), lambda _: self._accept())
        super().start()

    def close(self) -> None:
        """Stop the I/O thread and end all connections."""
        super().close()
        for peer in list(self._peers.values()):
            peer.close()
        self._peers.clear()
        self._listener.close()

    # -- connections ----------------------------------------------------------------------------

    def dial(self, proc: int, purpose: int) -> socket.socket:
        """A new connection to ``proc``. Raises ``Closed`` when it does not listen (any more).

        Raises ``OSError`` when this process has no descriptor left.
        """
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

    @abstractmethod
    def encode(self, blobs: Sequence[Blob], proc: int, fds: list[int]) -> list[Wire]:
        """What to send to ``proc`` for these values. Raises ``Closed``."""

    @abstractmethod
    def decode(self, wires: Sequence[Wire], proc: int, fds: Sequence[int]) -> list[Blob]:
        """The values that ``proc`` sent."""

    # -- control messages -----------------------------------------------------------------------

    def tell(self, proc: int, kind: int, meta: Any, blobs: Sequence[Blob] = ()) -> bool:
        """Send a control message; False when ``proc`` is gone or cannot be reached."""
        fds: list[int] = []
        try:
            wires = self.encode(blobs, proc, fds)
            body = pickle.dumps((meta, wires), 5)
            self._peer(proc).send(frame(kind, body, len(fds)), fds)
        except (Closed, OSError):
            return False
        return True

    def _on_message(self, proc: int, kind: int, body: bytearray, fds: Sequence[int]) -> None:
        meta, wires = pickle.loads(body)
        blobs = self.decode(wires, proc, fds)
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

            def told(answer: Any, answered: Sequence[Blob]) -> None:
                then(not isinstance(answer, BaseException), answer, list(answered))

            self.answers[question](proc, meta, list(blobs), told)
            return
        number = next(self.ids)
        self.asked[number] = (proc, then)
        if not self.tell(proc, ASK, (number, question, meta), blobs):
            self.asked.pop(number, None)
            then(False, ObjectLostError("its process ended"), [])

    def ask_and_wait(
        self, proc: int, question: str, meta: Any, blobs: Sequence[Blob] = ()
    ) -> tuple[Any, list[Blob]]:
        """``ask`` for user threads: blocks for the answer, raises what the other side raised."""
        assert not self.in_io_thread, "the I/O thread would wait for itself"
        done = threading.Lock()
        done.acquire()
        outcomes: list[tuple[bool, Any, list[Blob]]] = []

        def then(ok: bool, answer: Any, blobs: list[Blob]) -> None:
            outcomes.append((ok, answer, blobs))
            with contextlib.suppress(RuntimeError):  # it was released before
                done.release()

        number = next(self.ids)
        self.asked[number] = (proc, then)  # for the end of the session, by another thread
        try:
            self.ask(proc, question, meta, blobs, then)
            if self.closing:
                then(False, SessionEndedError("this miniray session has ended"), [])
            done.acquire()
        finally:
            self.asked.pop(number, None)
        ok, answer, answered = outcomes[0]
        if not ok:
            raise answer
        return answer, answered

    def _on_ask(self, proc: int, meta: Any, blobs: list[Blob]) -> None:
        number, question, inner = meta

        def reply(answer: Any, answered: Sequence[Blob]) -> None:
            failed = isinstance(answer, BaseException)
            self.tell(proc, ANSWER, (number, not failed, answer), answered)

        try:
            self.answers[question](proc, inner, blobs, reply)
        except (MinirayError, ValueError, TypeError, OSError) as error:
            reply(error, ())

    def _on_answer(self, proc: int, meta: Any, blobs: list[Blob]) -> None:
        number, ok, answer = meta
        asked = self.asked.pop(number, None)
        if asked is not None:
            asked[1](ok, answer, blobs)
