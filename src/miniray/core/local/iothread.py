"""The I/O thread of a process: watches descriptors, and does what other threads leave to it.

It never runs user code and never blocks on a peer.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from miniray.core.local import system
from miniray.core.local.wire import Stream
from miniray.errors import MinirayError

_MOMENT = 0.02


class IoThread(ABC):
    """See the module's docstring. All methods but the private ones are for any thread."""

    def __init__(self) -> None:
        self.poller = system.Poller()
        self.closing = False
        self._waker = system.Waker()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._poll_lock = threading.Lock()
        self._posted: deque[Callable[[], None]] = deque()
        self._woken = False
        self._later: set[Any] = set()
        self._ticking = False
        self._thread = threading.Thread(target=self._run, name="miniray-io", daemon=True)

    def start(self) -> None:
        self.watch(self._waker.fd, lambda _: self._waker.clear())
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. What was posted and not done yet is not done any more."""
        self.closing = True
        self._waker.wake()
        if not self.in_io_thread and self._thread.ident is not None:
            self._thread.join()
        with self._poll_lock:
            self._handlers.clear()
        self._posted.clear()
        self.poller.close()
        self._waker.close()

    @property
    def in_io_thread(self) -> bool:
        return threading.get_ident() == self._thread.ident

    @abstractmethod
    def crashed(self, error: MinirayError) -> None:
        """The thread failed, so nothing works any more."""

    @abstractmethod
    def patience(self) -> float | None:
        """How many seconds the thread may sleep when nothing happens; None: for ever."""

    @abstractmethod
    def turn(self) -> None:
        """What is to be done each time the thread has woken up."""

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

    def _serve(self) -> None:
        look_at = 0.0
        while not self.closing:
            for fd, events in self.poller.poll(_MOMENT if self._ticking else self.patience()):
                handler = self._handlers.get(fd)
                if handler is not None:
                    handler(events)
                handler = None  # it may be the last to hold a connection that just ended
            # Cleared before the queues are read: what is added later wakes us again.
            self._woken = False
            while self._posted:
                self._posted.popleft()()
            self.turn()
            if self._ticking and (now := time.monotonic()) >= look_at:
                self._look()
                look_at = now + _MOMENT
