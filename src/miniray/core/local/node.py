"""One process of a session: its objects, the memory they are in, and what it owes the others."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any

from miniray.core.local.actors import ActorEntry
from miniray.core.local.objects import PENDING, PLAIN, Blob, Entry, Wire
from miniray.core.local.peers import DEAD, ID_BITS, RETURNS, Peers, Reply
from miniray.core.local.shared_memory import SharedMemory
from miniray.core.local.spawner import SessionInfo
from miniray.core.local.store import Lease, Store, Usage
from miniray.errors import MinirayError, ObjectLostError, SessionEndedError

_TRIM_SECONDS = 3.0


def owner_of(id: int) -> int:
    """The process that made the id, and so the object or the call."""
    return id >> ID_BITS


class Node(Peers):
    """The process's part in the session. ``engine`` is set by whoever makes it."""

    engine: Any

    def __init__(self, info: SessionInfo, proc: int, slot: int, listener: socket.socket) -> None:
        super().__init__(info, proc, listener)
        self.usage = Usage(info.usage_fd, slot, info.memory_limit)
        self.store = Store(self, self.ids, self.usage, info.spill_dir, self.wake)
        self.dirty: set[Any] = set()  # channels with calls not yet written to the socket
        self.channels: dict[int, set[Any]] = {}
        #: Objects and streams that somebody waits for.
        self.awaited: set[Any] = set()
        self._trim_at = 0.0
        self.messages.update(
            {
                RETURNS: lambda proc, meta, _: self.take_back(proc, meta),
                DEAD: lambda _, meta, __: self.declare_dead(meta),
            }
        )
        self._asked_when_idle: list[Reply] = []
        self.answers["value"] = self._answer_value
        self.answers["cancel"] = self._answer_cancel
        self.answers["when_idle"] = lambda _, __, ___, reply: self._asked_when_idle.append(reply)

    def crashed(self, error: MinirayError) -> None:
        """Nothing works any more: whoever waits gets ``error``. A worker just ends."""
        self.closing = True
        self.fail_awaited(error)

    def patience(self) -> float | None:
        return _TRIM_SECONDS if self.store.watched or self._asked_when_idle else None

    def turn(self) -> None:
        """Give back the credits that are not needed any more, and now and then memory."""
        for parent, returned in self.pop_returns().items():
            self._return(parent, returned)
        if self.store.watched and (now := time.monotonic()) >= self._trim_at:
            self.store.trim()
            self._trim_at = now + _TRIM_SECONDS
        if self._asked_when_idle and self._is_idle():
            replies, self._asked_when_idle = self._asked_when_idle, []
            for reply in replies:
                reply(None, ())

    def _is_idle(self) -> bool:
        """Return whether this process could end without a loss for any other process.

        It can't while another process holds an object of it, or an object or actor it passed on,
        or while calls it made are unanswered or wait for an argument. Memory that other processes
        have mapped outlives it.
        """
        with self.lock:
            if any(not isinstance(item, (Lease, SharedMemory)) for item in self.shared.values()):
                return False
        channels = [channel for each in list(self.channels.values()) for channel in list(each)]
        return not (
            self.asked
            or any(isinstance(item, Entry) for item in list(self.awaited))
            or any(channel.pending for channel in channels)
        )

    def _return(self, parent: int, returned: list[tuple[int, int]]) -> None:
        if parent == self.proc:
            self.released_actors([id for id, _ in returned])
        else:
            self.tell(parent, RETURNS, returned)

    def released_actors(self, ids: list[int]) -> None:
        """The last handle of these actors is gone. Only the driver is anyone's last parent."""

    def close(self) -> None:
        super().close()
        self.store.close()
        self.forget()
        self.fail_awaited()

    def fail_awaited(self, error: MinirayError | None = None) -> None:
        """The session has ended: nothing will come any more for those who wait."""
        if error is None:
            error = SessionEndedError("this miniray session was shut down while somebody waited")
        while self.asked:
            _, (_, then) = self.asked.popitem()
            then(False, error, [])
        while self.awaited:
            self.awaited.pop().fail(error)

    # -- values on the way ------------------------------------------------------------------------

    def encode(self, blobs: Sequence[Blob], proc: int, fds: list[int]) -> list[Wire]:
        return [blob.to_wire(self, proc, fds) for blob in blobs]

    def decode(self, wires: Sequence[Wire], proc: int, fds: Sequence[int]) -> list[Blob]:
        taken = iter(fds)
        return [Blob.from_wire(self, wire, proc, taken) for wire in wires]

    # -- values of other processes' objects -------------------------------------------------------

    def fetch(self, entry: Entry) -> None:
        """Ask the owner for the value of a borrowed object, once; ``entry`` resolves later."""
        if entry.parent is None or entry.origin is not None or entry.state != PENDING:
            return
        entry.origin = "fetching"

        def then(ok: bool, answer: Any, blobs: list[Blob]) -> None:
            if not ok:
                entry.fail(
                    ObjectLostError(
                        f"the owner of object {entry.id:x} is gone: {answer}. What a process puts, "
                        "and what its calls give, is lost with it: keep a handle of the actor for "
                        "as long as refs from it are used, or return values instead of refs"
                    )
                )
            elif answer is None:
                entry.fail(ObjectLostError(f"object {entry.id:x} was freed by its owner"))
            else:
                state, value = answer
                entry.resolve(state, blobs[0] if blobs else value)

        self.ask(owner_of(entry.id), "value", entry.id, [], then)

    def _answer_value(self, _: int, id: int, __: list[Blob], reply: Reply) -> None:
        entry = self.find(id)
        if not isinstance(entry, Entry):
            reply(None, ())
            return

        def send() -> None:
            if entry.state == PLAIN:
                reply((PLAIN, entry.value), ())
            else:
                reply((entry.state, None), [entry.value])

        entry.add_waiter(send)

    def _answer_cancel(self, _: int, meta: Any, __: list[Blob], reply: Reply) -> None:
        """Cancel the call of this process that resolves an object, for a borrower."""
        id, force, recursive = meta
        entry = self.find(id)
        if isinstance(entry, Entry):
            self.engine.cancel_owned(entry, force, recursive)
        reply(None, ())

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

    def receive_memory(self, id: int, size: int, fd: int, proc: int) -> SharedMemory:
        """Return the memory that ``proc`` sent with a descriptor; -1 if that was lost."""
        with self.lock:
            known = self.find(id)
            if known is not None:
                assert isinstance(known, SharedMemory)
                known.take_descriptor(fd)
                self.give_back(proc, id)
                return known
            memory = SharedMemory(self, id, proc, fd, size)
            self.borrowed[id] = memory
        return memory

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
        for number, (asked, then) in list(self.asked.items()):
            if asked == proc and self.asked.pop(number, None) is not None:
                then(False, ObjectLostError("its process ended"), [])

    def flush_calls(self) -> None:
        """Write out calls that were held back to go together; before any wait."""
        while self.dirty:
            self.dirty.pop().flush_batch()
