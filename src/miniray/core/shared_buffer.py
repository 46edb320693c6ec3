"""``SharedBuffer``: memory that outlives the processes that write to it."""

from __future__ import annotations

import mmap
from typing import Protocol

from miniray import limits
from miniray.checks import check_int
from miniray.core import session
from miniray.errors import CapabilityError, ObjectStoreFullError


class SharedMemory(Protocol):
    """The engine's part of a buffer in one process."""

    def map(self) -> mmap.mmap:
        """Return a writable mapping; the same one at each call. Raise ``OSError``."""


class SharedBuffer:
    """A block of zeroed memory that several processes map read-write.

    ::

        buffer = SharedBuffer(size)
        ref = actor.fill.remote(buffer)  # the actor calls np.frombuffer(buffer.map(), "f4")
        miniray.get(ref)
        weights = np.frombuffer(buffer.map(), "f4")

    A buffer can be an argument, a return value, or part of either. Each process that receives it
    maps the same memory; nothing is copied. Writes are visible to all processes at once and aren't
    synchronized: if a reader must not see an incomplete write, use a flag in the buffer that the
    writer sets last.

    Lifetime: the content survives the crash of any process, including SIGKILL in the middle of a
    write; what was written until then stays. The kernel frees the memory when the last process
    that holds it has closed the buffer and dropped its views, or has ended. The memory has no name
    in the file system, so nothing can be left behind. After ``miniray.shutdown()``, the driver
    keeps its access, but can't send the buffer to actors of a new session.

    The memory is reserved when the buffer is created and can't be spilled to disk. It doesn't count
    toward ``object_store_memory``.

    Args:
        size: Number of bytes.

    Raises:
        CapabilityError: The engine has no shared memory (``capabilities.shared_memory``).
        ObjectStoreFullError: The control group or the machine has less free memory.
    """

    __slots__ = ("_memory", "_size")

    def __init__(self, size: int) -> None:
        self._size = check_int("size", size, 1)
        engine = session.engine()
        if not engine.capabilities.shared_memory:
            raise CapabilityError(
                f"the {engine.name} engine has no shared memory: use backend='local', or 'inline'"
            )
        # Reserving more than the control group allows ends in an OOM kill, not in an error.
        available = limits.memory_available()
        if self._size > available:
            raise self._full(f"{available / 1e6:.1f} MB of memory are available")
        try:
            self._memory: SharedMemory | None = engine.allocate_shared(self._size)
        except OSError as error:
            raise self._full(limits.describe_reached(error)) from error

    @classmethod
    def _over(cls, memory: SharedMemory, size: int) -> SharedBuffer:
        """Return a buffer over memory that exists: in the process that receives it."""
        buffer = cls.__new__(cls)
        buffer._memory, buffer._size = memory, size
        return buffer

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self._size

    def map(self, *, writable: bool = True) -> memoryview:
        """Return the memory, for ``np.frombuffer`` or ``torch.frombuffer``.

        The view and the arrays built on it stay valid after ``close``.

        Raises:
            ValueError: The buffer is closed in this process.
            ObjectStoreFullError: This process can't map it, such as at the limit of descriptors.
        """
        try:
            view = memoryview(self._open_memory().map())
        except OSError as error:
            raise self._full(limits.describe_reached(error)) from error
        return view if writable else view.toreadonly()

    def close(self) -> None:
        """Give up this process's hold on the memory; other processes keep theirs."""
        self._memory = None

    def _open_memory(self) -> SharedMemory:
        if self._memory is None:
            raise ValueError(f"{self!r} is closed in this process")
        return self._memory

    def _full(self, reason: str) -> ObjectStoreFullError:
        return ObjectStoreFullError(
            f"can't allocate or map a shared buffer of {self._size / 1e6:.1f} MB: {reason}. Use a "
            "smaller buffer, close others, or raise the limit of the container or job."
        )

    def __repr__(self) -> str:
        return f"SharedBuffer({self._size})"

    def __reduce__(self) -> str:
        # miniray's own pickler (core/serialize.py) doesn't call this.
        raise TypeError(
            f"{self!r} can't be pickled outside of a call: pass it to an actor, or return it"
        )
