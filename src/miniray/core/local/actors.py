"""Handles of actors in one process, and the client that sends their calls."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import Call, fill_arguments, make_sink, set_origin
from miniray.core.local.channel import Channel
from miniray.core.local.objects import Blob, Failure
from miniray.core.local.peers import DRIVER
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
    """Send the calls of this process to one actor, even if the actor's process changes.

    A ``sequential`` actor (one call at a time, not async) gets its calls in submission order: if
    a call waits for an argument, later calls queue behind it. Other actors run calls concurrently,
    so calls with ready arguments overtake it. Without that, an actor would deadlock if a later
    call produces the argument. While the actor restarts, all calls wait.

    When the process dies, calls in flight fail with ``ActorDiedError``, or are sent again if they
    have retries left and the actor restarts.
    """

    def __init__(self, node: Node, id: int, proc: int, retries: int, sequential: bool) -> None:
        self.node = node
        self.id = id
        self.proc = proc
        self.retries = retries
        self.sequential = sequential
        self._lock = threading.RLock()
        self._queue: deque[Call] = deque()
        #: Calls that later ones may overtake, until their arguments are ready.
        self._overtakable: dict[int, Call] = {}
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
            waiting = call.pending_deps()
            if waiting and not self.sequential and self._death is None:
                self._overtakable[call.id] = call
            else:
                self._queue.append(call)
        for entry in waiting:
            node.fetch(entry)
            entry.add_waiter(partial(self._on_argument, call))
        self._pump()
        return result

    def _on_argument(self, call: Call) -> None:
        """Send ``call`` if this was its last missing argument, and the calls queued behind it."""
        if call.pending_deps():
            return
        with self._lock:
            if self._overtakable.pop(call.id, None) is not None:
                self._queue.append(call)
        self._pump()

    def _pump(self) -> None:
        """Send queued calls until one isn't ready."""
        with self._lock:
            self._watch()
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
            self._release_if_idle()

    def _watch(self) -> None:
        """Connect to the process while calls wait, so that they fail if the process dies."""
        waits = self._queue or self._overtakable
        if not waits or self._channel is not None or self._locating or self._death is not None:
            return
        try:
            channel = self._channel = Channel(self.node, self.proc, self.sequential, self)
        except Closed:
            self._locate([])
        except OSError:  # no descriptor left, which is reported when a call is sent
            return
        else:
            if self.proc in self.node.dead:  # it died while this connected
                channel.lost()

    def took(self, channel: Channel) -> None:
        if not channel.pending:
            with self._lock:
                self._release_if_idle()

    def _release_if_idle(self) -> None:
        """Stop keeping the actor alive if no call is queued or unanswered."""
        unanswered = self._channel is not None and self._channel.pending
        if not (self._queue or self._overtakable or self._locating or unanswered):
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
                    calls.extend([*self._queue, *self._overtakable.values()])
                    self._queue.clear()
                    self._overtakable.clear()
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

        self.node.ask(DRIVER, "actor_lost", (self.id, proc), [], then)

    def cancel(self, call: Call, recursive: bool) -> None:
        """Drop a call that is queued here; otherwise send the request to its worker."""
        call.cancelled = True
        with self._lock:
            queued = self._overtakable.pop(call.id, None) is not None
            if call in self._queue:
                self._queue.remove(call)
                queued = True
            if queued:
                call.fail_cancelled(self.node)
                self._pump()  # calls behind it no longer wait for its arguments
                return
        self.node.flush_calls()
        call.request_cancel(self.node, self.proc, recursive)

    def retire(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.retire()
