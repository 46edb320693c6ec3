"""The server's side of a sync whose weights are read where they are.

It hears from each worker where they lie, and reads them piece by piece as it computes with them.

The worker's process must be held meanwhile (see ``offer.py``). Nothing is copied but into room of
the size of a piece, which stays in the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hmac
import os
import secrets
import select
import socket
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miniray.ps.leaves import Array, Source
from miniray.ps.offer import HEADER, OFFERED

if TYPE_CHECKING:
    from miniray.ps.places import Places, Run

#: Places that one system call takes.
_IOV_MAX = 1024
_LARGEST_MESSAGE = 1 << 20


class UnreadableError(Exception):
    """A worker's memory could not be read. Its weights must come another way, if it still lives."""


class Memory:
    """The memory of another process of the same user."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def read(self, local: Rows, remote: Rows) -> None:
        """Read the places ``remote`` into ``local``, which are as many and as large.

        Raises ``UnreadableError`` unless all of it was read: the kernel refuses it, the process is
        gone, or has no memory there.
        """
        done, readv = 0, _readv()
        for (mine, count), (theirs, _) in zip(local.calls, remote.calls, strict=True):
            got = readv(self.pid, mine, count, theirs, count, 0)
            if got < 0:
                raise self._unreadable(os.strerror(ctypes.get_errno()))
            done += got
        if done != remote.total:
            raise self._unreadable("part of it is not there")

    def _unreadable(self, reason: str) -> UnreadableError:
        return UnreadableError(f"the memory of process {self.pid} cannot be read: {reason}")

    def read_bytes(self, address: int, size: int) -> bytes:
        room = np.empty(size, np.uint8)
        self.read(Rows([_address(room)], [size]), Rows([address], [size]))
        return room.tobytes()


class Rows:
    """Places in memory, as the kernel wants them: rows of (address, size).

    ``calls`` are (address, number) of as many rows as one system call takes.
    """

    __slots__ = ("_rows", "calls", "total")

    def __init__(self, addresses: Any, sizes: Any) -> None:
        self._rows = np.array([addresses, sizes], np.uint64).T.copy()
        self.total = int(self._rows[:, 1].sum())
        count, start = len(self._rows), _address(self._rows)
        self.calls = [
            (start + 16 * at, min(count - at, _IOV_MAX)) for at in range(0, count, _IOV_MAX)
        ]


class Room:
    """Where one thread puts pieces of one worker's weights."""

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self._array = np.empty(size, dtype)
        self.address = _address(self._array)
        self.block = self._array.view()
        self.block.flags.writeable = False  # as all that a strategy is given


class FarRun:
    """A run of neighbouring entries (see ``places.py``), wherever each of them really lies."""

    def __init__(self, memory: Memory, run: Run, addresses: Array) -> None:
        self.dtype = run.dtype
        self._memory = memory
        self._starts = np.array(run.starts)
        self._ends = self._starts + run.sizes
        self._addresses = addresses[run.leaves]
        #: Places in the other memory by piece, and in ours by room and piece.
        self._remote: dict[int, Rows] = {}
        self._local: dict[tuple[int, int], Rows] = {}

    def read(self, start: int, stop: int, room: Room) -> Array:
        """The numbers from ``start`` to ``stop``, in ``room``; between entries there is anything.

        Cut alike at each call. Raises ``UnreadableError``.
        """
        local = self._local.get((room.address, start))
        if local is None:
            here, there, sizes = self._places(start, stop)
            self._remote.setdefault(start, Rows(there, sizes))
            local = self._local[room.address, start] = Rows(here + room.address, sizes)
        self._memory.read(local, self._remote[start])
        block: Array = room.block[: stop - start]
        return block

    def _places(self, start: int, stop: int) -> tuple[Array, Array, Array]:
        """(from the start of the room, address in the other memory, size) of entries, in bytes."""
        inside = slice(
            int(np.searchsorted(self._ends, start, "right")),
            int(np.searchsorted(self._starts, stop, "left")),
        )
        first, width = self._starts[inside], self.dtype.itemsize
        low, high = np.maximum(first, start), np.minimum(self._ends[inside], stop)
        there = self._addresses[inside] + ((low - first) * width).astype(np.uint64)
        return (low - start) * width, there, (high - low) * width


class Far(Sequence[Source]):
    """The entries of a worker's weights in its own memory. Each is read when it is asked for."""

    def __init__(self, places: Places, memory: Memory, addresses: Array) -> None:
        self.places = places
        self._memory = memory
        self._addresses = addresses
        self.runs = [FarRun(memory, run, addresses) for run in places.runs]

    def __len__(self) -> int:
        return len(self._addresses)

    def __getitem__(self, index: Any) -> Any:
        size, dtype = self.places.shape(index)
        return np.frombuffer(self._memory.read_bytes(int(self._addresses[index]), size), dtype)


@functools.cache
def _readv() -> Any:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    pointer, number = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, pointer, number, pointer, number, number]
    function.restype = ctypes.c_ssize_t
    return function


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


# -- workers that report ---------------------------------------------------------------------------


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
    """Where workers report during a sync: an address that nobody else knows, gone with the sync.

    Who still waits for an answer when it closes finds the line dead.
    """

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
