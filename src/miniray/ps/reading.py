"""Weights in another process's memory, read piece by piece when they are computed with.

The process must be held meanwhile (see ``offer.py``). Nothing is copied but into room of the size
of a piece, which stays in the cache.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from miniray.ps.leaves import Array, Entries, Source

if TYPE_CHECKING:
    from miniray.ps.places import Places, Run

#: Places that one system call takes.
_IOV_MAX = 1024


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


class Far(Entries):
    """The entries of a worker's weights in its own memory. Each is read when it is asked for."""

    def __init__(self, places: Places, memory: Memory, addresses: Array) -> None:
        self.places = places
        self._memory = memory
        self._addresses = addresses
        self.runs = [FarRun(memory, run, addresses) for run in places.runs]

    def __len__(self) -> int:
        return len(self._addresses)

    def entry(self, index: int) -> Source:
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
