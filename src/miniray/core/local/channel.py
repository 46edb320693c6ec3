"""The caller's side of calls: a connection to a worker, and who reads the results on it.

A thread that waits for a result reads the connection itself (*leads* it), so a synchronous call
costs no thread switch. When nobody leads and more than one result is due, the I/O thread reads
(the channel is *armed*). With exactly one result due, a thread will most likely ask for it next:
the I/O thread gives it a moment before it takes over.

Calls to a worker that runs one at a time are held back while it is busy and sent together; every
wait, every result and a full buffer send them.
"""

from __future__ import annotations

import pickle
import select
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniray.core.local import system, waiting
from miniray.core.local.calls import (
    R_ITEM,
    R_MANY,
    R_PLAIN,
    R_STOLEN,
    Call,
    StreamState,
    sink_entries,
)
from miniray.core.local.objects import BLOB, FAILED, PENDING, PLAIN, Entry, Failure
from miniray.core.local.wire import Closed, Stream, frame

if TYPE_CHECKING:
    from miniray.core.local.node import Node

_BATCH_BYTES = 8192
_LONGEST_POLL = 1e9  # milliseconds: days, and what fits a C int


class Channel(Stream):
    """The caller's end of a call connection to one worker.

    What happens is told to ``owner``: ``lost(channel, calls)`` once, in the I/O thread, when the
    worker is gone, with the calls that were not answered; ``took(channel)`` after each read; for
    tasks ``stolen(channel, thief, ids)``, when the worker gives some back.
    """

    def __init__(self, node: Node, proc: int, batching: bool, owner: Any) -> None:
        super().__init__(node.dial(proc, 1), proc, node.watch_output)
        self.node = node
        self.handler = self._on_events
        self.pending: dict[int, Call] = {}
        self.thieves = 0  # asked to give tasks back; an answer comes to each
        #: What the last read brought, for tasks.
        self.taken = 0
        self.last_function: Any = None
        self._batching = batching
        self._owner = owner
        self._batch: list[bytes] = []
        self._batch_bytes = 0
        self._call_lock = threading.Lock()
        self._mode_lock = threading.Lock()
        self._led = False
        self._lost = False
        self.interrupted = False
        readiness = select.poll()
        readiness.register(self.fd, select.POLLIN)
        self._patience = system.Patience(readiness.poll)
        node.channels.setdefault(proc, set()).add(self)

    # -- sending --------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Send ``call``, or hold it back to go with others. Raises ``Closed``: it was not sent."""
        data, fds = call.encode(self.node, self.peer)
        sink = call.sink
        with self._call_lock:
            pending = self.pending
            pending[call.id] = call
            busy = len(pending) > 1
            if type(sink) is Entry:
                sink.channel = self
                read_now = busy or sink.waiters
            else:
                for entry in sink_entries(sink):
                    entry.channel = self
                if type(sink) is StreamState:
                    sink.begin()
                read_now = True
            try:
                if busy and self._batching and not fds:
                    self._batch.append(data)
                    self._batch_bytes += len(data)
                    if self._batch_bytes >= _BATCH_BYTES:
                        self._send_batch()
                    else:
                        self.node.dirty.add(self)
                else:
                    if self._batch:
                        self._send_batch()
                    self.send(data, fds)
            except Closed:
                del pending[call.id]
                raise
        if not self.events & system.IN:
            if read_now:
                self.arm()
            else:
                self.node.look_later(self)

    def send_ahead(self, kind: int, body: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame before the calls that follow. Raises ``Closed``."""
        with self._call_lock:
            if self._batch:
                self._send_batch()
            self.send(frame(kind, body, len(fds)), fds)

    def flush_batch(self) -> None:
        with self._call_lock:
            if self._batch:
                try:
                    self._send_batch()
                except Closed:
                    self.lost()

    def _send_batch(self) -> None:
        data = b"".join(self._batch)
        self._batch.clear()
        self._batch_bytes = 0
        self.send(data)

    # -- receiving ------------------------------------------------------------------------------

    def arm(self) -> None:
        """Have the I/O thread read results, unless a waiting thread is reading them."""
        with self._mode_lock:
            if self._led or self._lost or self.events & system.IN:
                return
            self.node.rewatch(self, add=system.IN)

    def lead_until(self, entry: Entry, deadline: float | None) -> bool:
        """Read results in this thread until ``entry`` has one; False if somebody else reads.

        Returns True also when the time is up, the worker is gone or the call went to another one:
        the caller looks at the entry.
        """
        if not self.read_lock.acquire(blocking=False):
            return False
        try:
            with self._mode_lock:
                if self._lost:
                    return False
                self._led = True
                if self.events & system.IN:
                    self.node.rewatch(self, remove=system.IN)
            while entry.state == PENDING and entry.channel is self:
                if self._wait(deadline):
                    self._read_and_take()
                elif deadline is not None and time.monotonic() >= deadline:
                    break
        except Closed:
            self.lost()
        finally:
            self._led = False
            self.read_lock.release()
            if (self.pending or self.thieves) and not self._lost:
                self.arm()
        return True

    def _wait(self, deadline: float | None) -> list[Any]:
        """Sleep until something has come; nothing has at the deadline, and now and then before."""
        left = None
        if deadline is not None:
            left = min(max(0.0, deadline - time.monotonic()) * 1000, _LONGEST_POLL)
        if not waiting.pause_interrupts():
            return self._patience.wait(left)
        longest = waiting.LONGEST_SLEEP * 1000
        try:
            return self._patience.wait(longest if left is None else min(left, longest))
        finally:
            waiting.resume_interrupts()

    def _read_and_take(self) -> None:
        try:
            self._take(self.read())
        except Closed:
            raise
        except BaseException:
            # Ctrl-C while waiting is harmless. Between reading and taking it loses a result: then
            # the connection is of no use any more, and those who wait on it must hear of it.
            self.lost(interrupted=True)
            raise

    def _on_events(self, events: int) -> None:
        try:
            if events & system.OUT:
                self.node.flush_output(self)
            if events & ~system.OUT and self.read_lock.acquire(blocking=False):
                try:
                    self._take(self.read())
                finally:
                    self.read_lock.release()
        except Closed:
            self.lost()

    def _take(self, frames: Sequence[Any]) -> None:
        node, peer, pending = self.node, self.peer, self.pending
        call: Call | None = None
        for kind, body, fds in frames:
            if kind == R_PLAIN:
                id, value = pickle.loads(body)
                call = pending.pop(id, None)
                if call is not None:
                    call.sink.resolve(PLAIN, value)
                continue
            if kind == R_STOLEN:
                thief, ids = pickle.loads(body)
                self._owner.stolen(self, thief, ids)
                continue
            id, state, wires = pickle.loads(body)
            # Decoded even if nobody wants it: its credits and descriptors must be given back.
            blobs = node.decode(wires, peer, fds)
            if kind == R_ITEM:
                call = pending.get(id)
                if call is not None:
                    call.sink.add(blobs[0])
                continue
            call = pending.pop(id, None)
            if call is None:
                continue
            if kind == R_MANY:
                call.sink.resolve(BLOB, blobs)
            elif state == FAILED:
                call.sink.resolve(FAILED, Failure(node, blobs[0]))
            else:  # R_ONE, or R_END without an error
                call.sink.resolve(state, blobs[0] if blobs else None)
        if self._batch:
            self.flush_batch()
        if frames:
            self.taken = len(frames)
            self.last_function = call.spec if call is not None else None
            self._owner.took(self)

    def lost(self, interrupted: bool = False) -> None:
        """The worker is gone, or (``interrupted``) only this connection to it is of no use.

        Safe to call from anywhere, more than once.
        """
        with self._mode_lock:
            if self._lost:
                return
            self._lost = True
            self.interrupted = interrupted
        self.close()
        self.node.post(self._report_lost)

    def _report_lost(self) -> None:
        self._unregister()
        with self.read_lock:
            try:  # answers that arrived before the end still count
                while frames := self.read():
                    self._take(frames)
            except Closed:
                pass
            with self._call_lock:  # a call being sent is among them or raises Closed, not neither
                calls = list(self.pending.values())
        self._owner.lost(self, calls)

    def retire(self) -> None:
        """Close without reporting: nothing is due any more."""
        with self._mode_lock:
            if self._lost:
                return
            self._lost = True
        self._unregister()
        self.close()

    def _unregister(self) -> None:
        self.node.rewatch(self, remove=self.events)
        self.handler = None  # it refers to the channel: no cycle, so the socket closes now
        self.node.channels.get(self.peer, set()).discard(self)
        self.node.dirty.discard(self)
