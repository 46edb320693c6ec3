"""The memory of a ``SharedBuffer``: a descriptor per process, passed on with the values around it.

The kernel counts who holds the memory, so it outlives any process. Credits (see ``sharing``) only
keep the descriptor open in the sender until the receiver has its own.
"""

from __future__ import annotations

import errno
import mmap
import os

from miniray.core.local import system
from miniray.core.local.sharing import Shared, Sharing


class SharedMemory(Shared):
    """The memory as one process holds it; all its ``SharedBuffer`` objects share this."""

    __slots__ = ("_map", "fd", "size")

    def __init__(self, sharing: Sharing, id: int, parent: int | None, fd: int, size: int) -> None:
        super().__init__(sharing, id, parent)
        #: -1 if it was lost on the way, because this process has too many open.
        self.fd = fd
        self.size = size
        self._map: mmap.mmap | None = None

    @classmethod
    def allocate(cls, sharing: Sharing, id: int, size: int) -> SharedMemory:
        """Reserve memory. Raise ``OSError`` if there isn't enough."""
        return cls(sharing, id, None, system.anonymous_memory(size), size)

    def map(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self.check_descriptor(), self.size, **system.NO_DUP)
        return self._map

    def take_descriptor(self, fd: int) -> None:
        """Use one that was received again if the first one was lost; otherwise close it."""
        if self.fd < 0:
            self.fd = fd
        elif fd >= 0:
            os.close(fd)

    def check_descriptor(self) -> int:
        """Return the descriptor. Raise ``OSError`` if it was lost."""
        if self.fd < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.fd

    def __repr__(self) -> str:
        return f"SharedBuffer({self.size})"

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)
        super().__del__()
