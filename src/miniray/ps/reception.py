"""Where workers report during a sync: an address that nobody else knows, gone with the sync."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
from typing import NamedTuple

from miniray.ps.offer import HEADER, OFFERED

_LARGEST_MESSAGE = 1 << 20


class Report(NamedTuple):
    """What a worker said, and from which process: an offer, or in words why there is none.

    It waits for an answer on ``conn`` if it made an offer.
    """

    worker: int
    pid: int
    offered: bool
    body: bytes
    conn: socket.socket


class Reception:
    """Listens to workers. Who still waits for an answer when it closes finds the line dead."""

    def __init__(self, workers: int) -> None:
        self.token = secrets.token_bytes(16)
        # An abstract address: it is no file, and nothing is left of it.
        self.address = f"\0miniray-ps-{secrets.token_hex(16)}"
        self._open = contextlib.ExitStack()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._rung, self._bell = socket.socketpair()
        self._guests: dict[int, socket.socket] = {}
        self._poll = select.poll()
        for sock in (self._listener, self._rung, self._bell):
            self._open.enter_context(sock)
        self._listener.bind(self.address)
        self._listener.listen(workers)
        for sock in (self._listener, self._rung):
            self._poll.register(sock, select.POLLIN)

    def close(self) -> None:
        self._open.close()

    def ring(self) -> None:
        """End the wait for reports, from any thread, also after the end."""
        with contextlib.suppress(OSError):  # closed, or it rings already
            self._bell.send(b"!", socket.MSG_DONTWAIT)

    def reports(self, seconds: float | None) -> list[Report]:
        """All that are there; waits until something happens, or for so long."""
        found = []
        limit = None if seconds is None else max(0.0, seconds) * 1000
        while events := self._poll.poll(limit):
            limit = 0
            for fd, _ in events:
                if fd == self._rung.fileno():
                    self._rung.recv(4096)
                elif fd == self._listener.fileno():
                    self._admit()
                else:
                    found += self._heard(self._guests.pop(fd))
        return found

    def _admit(self) -> None:
        conn, _ = self._listener.accept()
        self._open.enter_context(conn)
        self._guests[conn.fileno()] = conn
        self._poll.register(conn, select.POLLIN)

    def _heard(self, conn: socket.socket) -> list[Report]:
        """One report; none if it is not from a worker of ours."""
        self._poll.unregister(conn)
        message = conn.recv(_LARGEST_MESSAGE)
        credentials = conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, uid, _ = struct.unpack("3i", credentials)
        if uid != os.geteuid() or len(message) < HEADER.size:
            return []
        token, worker, kind = HEADER.unpack_from(message)
        if not hmac.compare_digest(token, self.token):
            return []
        return [Report(worker, pid, kind == OFFERED, message[HEADER.size :], conn)]
