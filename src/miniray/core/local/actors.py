"""Handles of actors in one process, and the client that sends their calls in order."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import Call, fill_arguments, make_sink, set_origin
from miniray.core.local.channel import Channel
from miniray.core.local.objects import Blob, Failure
from miniray.core.local.peers import CANCEL, DRIVER
from miniray.core.local.sharing import Shared
from miniray.core.local.wire import Closed
from miniray.core.specs import ActorInfo
from miniray.errors import ActorDiedError, MinirayError

if TYPE_CHECKING:
    from miniray.core.local.node import Node


class ActorEntry(Shared):
    """What a process knows about one actor. All handles of it in the process share this.

    The driver's entry is the root: its parent is the driver itself, so that "given back to the
    driver" means the last handle anywhere is gone.
    """

    __slots__ = ("client", "info_bytes", "unpacked_info")

    sharing: Node

    def __init__(
        self,
        node: Node,
        id: int,
        parent: int,
        proc: int,
        info_bytes: bytes,
        retries: int,
        sequential: bool,
    ) -> None:
        super().__init__(node, id, parent)
        self.info_bytes = info_bytes
        self.unpacked_info: ActorInfo | None = None
        self.client = ActorClient(node, id, proc, retries, sequential)

    @property
    def info(self) -> ActorInfo:
        if self.unpacked_info is None:
            self.unpacked_info = pickle.loads(self.info_bytes)
        assert self.unpacked_info is not None
        return self.unpacked_info

    def describe(self) -> tuple[Any, ...]:
        client = self.client
        return self.id, client.proc, self.info_bytes, client.retries, client.sequential

    @classmethod
    def from_wire(cls, node: Node, wire: tuple[Any, ...], parent: int) -> ActorEntry:
        id, proc, info_bytes, retries, sequential = wire
        return cls(node, id, parent, proc, info_bytes, retries, sequential)

    def __del__(self) -> None:
        client = getattr(self, "client", None)
        if client is not None:
            self.sharing.post(client.retire)
        super().__del__()


class ActorClient:
    """Sends calls to one actor, in order, wherever its process currently is.

    While a call waits for an argument, or the actor is being restarted, later calls queue behind
    it. When the process dies, calls in flight fail with ``ActorDiedError``, or are sent again if
    they have retries left and the actor comes back.
    """

    def __init__(self, node: Node, id: int, proc: int, retries: int, sequential: bool) -> None:
        self.node = node
        self.id = id
        self.proc = proc
        self.retries = retries
        self.sequential = sequential
        self._lock = threading.RLock()
        self._queue: deque[Call] = deque()
        self._channel: Channel | None = None
        self._locating = False
        self._death: Blob | None = None
        # Keeps the actor alive while answers are due, though the last handle may be gone.
        self._keep: ActorEntry | None = None

    def call(
        self,
        actor: ActorEntry,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_returns: int | str,
    ) -> Any:
        node = self.node
        id = next(node.ids)
        sink, result = make_sink(node, id, num_returns)
        call = Call(id, sink, method, num_returns)
        set_origin(sink, self, call)
        call.retries = self.retries
        fill_arguments(node, call, args, kwargs)
        with self._lock:
            self._keep = actor
            channel = self._channel
            if channel is not None and not self._queue and not call.deps:
                try:
                    channel.submit(call)
                    return result
                except Closed:
                    self._queue.append(call)
                    channel.lost()
                    return result
            self._queue.append(call)
        for entry in call.pending_deps():
            node.fetch(entry)
            entry.add_waiter(self._pump)
        self._pump()
        return result

    def _pump(self) -> None:
        """Send queued calls as far as they are ready."""
        with self._lock:
            while self._queue and not self._locating:
                call = self._queue[0]
                if self._death is not None:
                    self._queue.popleft().fail(self.node, self._death)
                    continue
                if call.pending_deps():
                    return
                failed = call.failed_dep()
                if failed is not None:
                    self._queue.popleft().fail(self.node, failed.value)
                    continue
                try:
                    if self._channel is None:
                        self._channel = Channel(self.node, self.proc, self.sequential, self)
                    self._channel.submit(call)
                except Closed:
                    if self._channel is not None:
                        self._channel.lost()
                        self._channel = None
                        self._locating = True
                    else:
                        self._locate([])
                    return
                except OSError as error:  # no descriptor left
                    text = f"{call.label} could not be sent: {error.strerror}"
                    call.fail(self.node, OSError(error.errno, text))
                self._queue.popleft()

    def took(self, channel: Channel) -> None:
        if not channel.pending:
            with self._lock:
                if not channel.pending and not self._queue:
                    self._keep = None

    def lost(self, channel: Channel, calls: list[Call]) -> None:
        with self._lock:
            if self._channel is channel:
                self._channel = None
        if channel.interrupted:
            for call in calls:
                text = f"the result of {call.label} was lost by an interrupt (Ctrl-C)"
                call.fail(self.node, MinirayError(text))
            with self._lock:
                self._locating = False
            self._pump()
        else:
            self._locate(calls)

    def _locate(self, calls: list[Call]) -> None:
        """Ask the driver what became of the actor; then retry or fail ``calls``."""
        self._locating = True
        proc = self.proc

        def then(ok: bool, answer: Any, blobs: list[Blob]) -> None:
            with self._lock:
                if ok:
                    alive, self.proc, on_purpose = answer
                    cause = blobs[0]
                else:  # the driver is gone, or the session
                    alive, on_purpose = False, True
                    cause = Blob.of(self.node, ActorDiedError(str(answer)))
                if not alive:
                    self._death = cause
                    calls.extend(self._queue)
                    self._queue.clear()
                failed = []
                for call in reversed(calls):
                    if alive and call.cancelled:
                        call.fail_cancelled(self.node)
                    elif alive and call.retries:
                        call.retries -= call.retries > 0
                        self._queue.appendleft(call)
                    else:
                        failed.append(call)
                if failed and not on_purpose:
                    cause = Failure(self.node, cause)
                for call in failed:
                    call.fail(self.node, cause)
                self._locating = False
            self._pump()
            if not self._queue:
                self._keep = None

        self.node.ask(DRIVER, "actor_lost", (self.id, proc), [], then)

    def cancel(self, call: Call, recursive: bool) -> None:
        """Cancel a call: dropped if queued here, else its worker is told."""
        call.cancelled = True
        with self._lock:
            if call in self._queue:
                self._queue.remove(call)
                call.fail_cancelled(self.node)
                self._pump()  # those behind it need not wait for its arguments
                return
        self.node.flush_calls()
        self.node.tell(self.proc, CANCEL, (call.id, recursive))

    def retire(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.retire()
