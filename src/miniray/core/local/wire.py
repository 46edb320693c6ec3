"""Frames over Unix sockets: ordered, non-blocking to send, with file descriptors attached.

A frame is a header (body length, kind, number of descriptors) and a body. Sending never blocks:
what the kernel does not take at once is queued and goes out when the socket is writable again.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from miniray.core.local.system import CLOEXEC_FLAG

HEADER = struct.Struct("<IBxH")
_HEADER_SIZE = HEADER.size
_MAX_FDS = 200  # the kernel's limit for one message is 253
_ANCILLARY = socket.CMSG_SPACE(_MAX_FDS * 4)
_SEND_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
_READ_FLAGS = socket.MSG_DONTWAIT | CLOEXEC_FLAG
_READ_SIZE = 65536
#: No room now. The last: more descriptors of this user are on the way than a process may have open.
_LATER = (errno.EAGAIN, errno.EWOULDBLOCK, errno.ETOOMANYREFS)
_LOST = -1  # stands for the descriptors of a message that the kernel could not give us

Frame = tuple[int, bytearray, Sequence[int]]


def frame(kind: int, body: bytes, nfds: int = 0) -> bytes:
    return HEADER.pack(len(body), kind, nfds) + body


class Closed(Exception):  # noqa: N818  # a signal between our own functions, not an error
    """The other end is gone. Internal: callers turn it into the error a user understands."""


class Stream:
    """One end of a connection.

    ``send`` may be called from any thread. ``read`` only by whoever holds ``read_lock``.
    ``on_backlog`` is called (under the send lock) when output had to be queued: the owner then
    watches the socket for writability and calls ``flush``.
    """

    def __init__(
        self, sock: socket.socket, peer: int, on_backlog: Callable[[Stream], None]
    ) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.peer = peer
        self.read_lock = threading.Lock()
        self.closed = False
        #: What the I/O thread watches the socket for, and what it calls; kept by ``Node.rewatch``.
        self.events = 0
        self.handler: Callable[[int], None] | None = None
        self._on_backlog = on_backlog
        self._send_lock = threading.Lock()
        self._out: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._crowded = False
        self._buffer = bytearray(_READ_SIZE)
        self._start = 0
        self._end = 0
        self._fds: deque[int] = deque()

    # -- sending --------------------------------------------------------------------------------

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send or queue one or more whole frames. Raises ``Closed`` if the peer is known gone."""
        with self._send_lock:
            if self.closed:
                raise Closed
            if self._out:
                self._out.append((memoryview(data), fds))
                return
            if not fds:
                try:
                    sent = self.sock.send(data, _SEND_FLAGS)
                except BlockingIOError:
                    sent = 0
                except OSError as error:
                    raise Closed from error
                if sent == len(data):
                    return
                self._out.append((memoryview(data)[sent:], ()))
            else:
                self._out.append((memoryview(data), fds))
                if self._flush():
                    return
            self._on_backlog(self)

    def flush(self, on_empty: Callable[[], None]) -> None:
        """Send what is queued; when nothing is left, ``on_empty`` is called.

        That happens under the send lock: a backlog that another thread makes a moment later calls
        ``on_backlog`` after it, so the two cannot undo each other in the wrong order.
        """
        with self._send_lock:
            if self._flush():
                on_empty()
            elif self._crowded:
                time.sleep(0.001)  # the socket itself is writable: it would be tried at once

    def _flush(self) -> bool:
        while self._out:
            data, fds = self._out.popleft()
            ancillary = []
            piece = data
            if fds:
                now, later = fds[:_MAX_FDS], fds[_MAX_FDS:]
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", now))]
                if later:  # descriptors ride on bytes: keep some for the next lot
                    piece = data[:1]
                    self._out.appendleft((data[1:], later))
            try:
                sent = self.sock.sendmsg([piece], ancillary, _SEND_FLAGS)
            except OSError as error:
                if error.errno not in _LATER:
                    raise Closed from error
                if fds and later:
                    self._out.popleft()
                self._out.appendleft((data, fds))
                self._crowded = error.errno == errno.ETOOMANYREFS
                return False
            if sent < len(piece):
                self._out.appendleft((piece[sent:], ()))
        return True

    # -- receiving ------------------------------------------------------------------------------

    def read(self) -> list[Frame]:
        """Whole frames that have arrived; none if there are none. Never blocks.

        Raises ``Closed`` at the end of the stream. The descriptors of a frame belong to the caller.
        """
        buffer, start, end = self._buffer, self._start, self._end
        if start == end:
            start = end = 0
        elif len(buffer) - end < _READ_SIZE // 2:
            start, end = self._make_room(start, end)
        self._start, self._end = start, end
        try:
            with memoryview(buffer) as view:
                count, ancillary, flags, _ = self.sock.recvmsg_into(
                    [view[end:]], _ANCILLARY, _READ_FLAGS
                )
        except BlockingIOError:
            return []
        except OSError as error:
            raise Closed from error
        if ancillary or flags & socket.MSG_CTRUNC:
            self._keep_fds(ancillary, flags)
        if count == 0:
            raise Closed
        end += count
        frames: list[Frame] = []
        while end - start >= _HEADER_SIZE:
            length, kind, nfds = HEADER.unpack_from(buffer, start)
            stop = start + _HEADER_SIZE + length
            if stop > end:
                if stop - start > len(buffer):
                    buffer.extend(bytes(stop - start - len(buffer) + _READ_SIZE))
                break
            fds = self._pop_fds(nfds) if nfds else ()
            frames.append((kind, buffer[start + _HEADER_SIZE : stop], fds))
            start = stop
        self._start, self._end = start, end
        return frames

    def _make_room(self, start: int, end: int) -> tuple[int, int]:
        """Move what is in the buffer to its front, and double it where that is not enough."""
        buffer = self._buffer
        buffer[: end - start] = buffer[start:end]
        start, end = 0, end - start
        if len(buffer) - end < _READ_SIZE // 2:
            buffer.extend(bytes(len(buffer)))
        return start, end

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(data) - len(data) % 4
                self._fds.extend(array.array("i", data[:whole]))
        if flags & socket.MSG_CTRUNC:
            self._fds.append(_LOST)

    def _pop_fds(self, count: int) -> list[int]:
        """The descriptors of one frame, -1 for each that got lost.

        When this process has no descriptor left the kernel drops those of a message from some
        point on, and says so (``MSG_CTRUNC``). What follows must still find its own.
        """
        fds: list[int] = []
        while len(fds) < count:
            until = min(count, len(fds) + _MAX_FDS)  # as many as came with one message
            while len(fds) < until:
                fd = self._fds.popleft() if self._fds else _LOST
                if fd == _LOST:
                    fds.extend([-1] * (until - len(fds)))
                else:
                    fds.append(fd)
        return fds

    def close(self) -> None:
        """End the connection: both ends see it closed, a thread blocked in ``read`` wakes up.

        The descriptor itself is closed with the object, when no thread can be using it any more.
        """
        with self._send_lock:
            if self.closed:
                return
            self.closed = True
            self._out.clear()
            with contextlib.suppress(OSError):  # not connected any more: nothing to shut down
                self.sock.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        if not hasattr(self, "_fds"):
            return  # never connected
        for fd in self._fds:
            if fd != _LOST:
                os.close(fd)
        self.sock.close()
