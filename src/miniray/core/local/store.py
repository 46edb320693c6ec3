"""Shared memory: segments that hold one large object each, recycled while their pages are warm.

The process that writes an object allocates its segment and is the segment's home. Receivers map
the same memory. When the last use anywhere is gone the home uses the segment again: touching fresh
pages costs about ten times a copy into warm ones. If any holder died the segment is not used again,
because somebody unknown may still read it; the kernel frees it with its last mapping.

Beyond the session's memory limit segments are files on disk instead, unlinked from the start, and
otherwise the same: mapped, passed on and freed alike.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from miniray.core.local import system
from miniray.core.local.sharing import Shared, Sharing
from miniray.errors import ObjectStoreFullError

_PAGE = mmap.PAGESIZE
_ALIGN = 64

#: A segment unused for this long is given back to the system.
IDLE_SECONDS = 10.0
#: Receivers keep this many bytes of other processes' segments mapped for the next use.
MAPPED_CACHE_BYTES = 1 << 30


class Segment:
    """The memory itself: a descriptor and one mapping of it. Lives as long as anyone refers to it.

    ``id`` stays the same over all uses, so a receiver recognises a segment it has mapped already.
    """

    __slots__ = ("doubtful", "fd", "id", "kept", "map", "on_disk", "size", "used_at")

    def __init__(self, id: int, fd: int, size: int, *, writable: bool, on_disk: bool) -> None:
        self.fd = fd
        self.id = id
        self.size = size
        self.on_disk = on_disk
        self.used_at = 0.0
        #: A private mapping that nobody uses any more, and that still shows the segment itself;
        #: doubtful until somebody looked whether it does.
        self.kept: mmap.mmap | None = None
        self.doubtful = False
        prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self.map = mmap.mmap(fd, size, mmap.MAP_SHARED, prot, **system.NO_DUP)

    def private_map(self) -> mmap.mmap:
        """Another mapping whose writes nobody else sees (copy on write).

        The one of the last use serves again if nothing was written to it: filling a new one with
        pages takes as long as copying them.
        """
        kept, self.kept = self.kept, None
        if kept is not None:
            return kept
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self.fd, self.size, mmap.MAP_PRIVATE, prot, **system.NO_DUP)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class Lease(Shared):
    """One use of a segment, from being written to the end of its last reader anywhere.

    Values built over the memory keep the lease alive through their buffers (see ``view``).
    """

    __slots__ = ("abandoned", "faults", "private", "segment", "store")

    def __init__(
        self, sharing: Sharing, id: int, parent: int | None, segment: Segment, store: Store
    ) -> None:
        super().__init__(sharing, id, parent)
        self.segment = segment
        self.store = store
        self.abandoned = False
        self.private: weakref.ref[mmap.mmap] | None = None
        self.faults: int | None = None

    def private_map(self) -> mmap.mmap:
        """Writable memory with the object in it, for one receiver. Views on it hold the lease."""
        # The first write to a page is a fault: no fault, nothing written. A new mapping has none of
        # its pages, so that reading it is faults, too.
        self.faults = None if self.segment.kept is None else system.page_faults()
        memory = self.segment.private_map()
        # Weak: what a receiver wrote there takes memory, and is freed with its last view.
        self.private = weakref.ref(memory)
        return memory

    def holder_lost(self) -> None:
        self.abandoned = True

    def __del__(self) -> None:
        # The mapping is still there if the last view on it is what held the lease until now.
        self.segment.kept = None if self.private is None else self.private()
        self.segment.doubtful = self.faults is None or self.faults != system.page_faults()
        self.store.returned.append((self.segment, self.parent is None, self.abandoned))
        super().__del__()


class Store:
    """The segments of one process: its own, and others' it has mapped."""

    def __init__(
        self,
        sharing: Sharing,
        next_id: Any,
        usage: Usage,
        spill_dir: str,
        wake: Callable[[], None],
    ) -> None:
        #: Whether there is anything that `trim` may have to look at later.
        self.watched = False
        self._wake = wake
        # Held here too: out of a cycle of garbage, a segment must not be finalised beside the lease
        # that hands it back.
        self._in_use: set[Segment] = set()
        self.returned: deque[tuple[Segment, bool, bool]] = deque()
        self._sharing = sharing
        self._next_id = next_id
        self._usage = usage
        self._spill_dir = spill_dir
        self._lock = threading.Lock()
        self._free: list[Segment] = []
        self._mapped: dict[int, Segment] = {}

    def allocate(self, size: int) -> Lease:
        """A segment of at least ``size`` bytes to write one object into.

        Raises ``ObjectStoreFullError`` when neither memory nor disk has room.
        """
        size = -(-size // _PAGE) * _PAGE
        with self._lock:
            self._collect()
            segment = self._reuse(size) or self._fresh(size)
            self._in_use.add(segment)
        self._watch()
        return Lease(self._sharing, next(self._next_id), None, segment, self)

    def adopt(self, lease_id: int, segment_id: int, fd: int, size: int, parent: int) -> Lease:
        """A lease on another process's segment, which came as ``fd`` (owned from now on).

        Raises ``OSError`` when it cannot be mapped, also when ``fd`` got lost on the way (-1).
        """
        with self._lock:
            self._collect()
            segment = self._mapped.pop(segment_id, None)
            if segment is None:
                if fd < 0:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                segment = Segment(segment_id, fd, size, writable=False, on_disk=False)
            elif fd >= 0:
                os.close(fd)
            self._in_use.add(segment)
        self._watch()
        return Lease(self._sharing, lease_id, parent, segment, self)

    def _watch(self) -> None:
        if not self.watched:
            self.watched = True
            self._wake()

    def _reuse(self, size: int) -> Segment | None:
        """The smallest free segment that fits without wasting half of itself."""
        fitting = [s for s in self._free if size <= s.size <= 2 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda s: (s.size, -s.used_at))
        self._free.remove(best)
        return best

    def _fresh(self, size: int) -> Segment:
        while self._free and not self._usage.fits(size):
            self._release(self._free.pop(0))
        on_disk = not self._usage.fits(size)
        try:
            if on_disk:
                fd = system.anonymous_file(self._spill_dir, size)
            else:
                fd = system.anonymous_memory(size)
            segment = Segment(next(self._next_id), fd, size, writable=True, on_disk=on_disk)
        except OSError as error:
            raise self._full(size, on_disk, error) from error
        self._usage.add(size, on_disk=on_disk)
        return segment

    def _full(self, size: int, on_disk: bool, error: OSError) -> ObjectStoreFullError:
        if error.errno == errno.EMFILE:
            return ObjectStoreFullError(
                "too many large objects at once: each holds a file descriptor and the limit of "
                "this process is reached; raise it with `ulimit -n` or drop refs you no longer need"
            )
        place = f"on the disk of {self._spill_dir}" if on_disk else "in memory"
        hint = (
            "Free disk space, set MINIRAY_SPILL_DIR to a larger disk, raise object_store_memory, "
            "or drop refs you no longer need."
        )
        return ObjectStoreFullError(
            f"no room for an object of {size / 1e6:.1f} MB {place} ({error.strerror}); objects in "
            f"memory now: {self._usage.total() / 1e6:.1f} MB of "
            f"{self._usage.limit / 1e6:.1f} MB. {hint}"
        )

    def _collect(self) -> None:
        """Sort what leases gave up since last time: to use again, to keep mapped, or to drop."""
        now = time.monotonic()
        while self.returned:
            segment, home, abandoned = self.returned.popleft()
            segment.used_at = now
            self._in_use.discard(segment)
            kept = segment.kept
            if kept is not None and segment.doubtful and not system.is_untouched(kept):
                segment.kept = None  # what the last receiver wrote there is nobody's business
            if not home:
                self._mapped[segment.id] = segment
            elif abandoned or segment.on_disk:
                self._release(segment)
            else:
                self._free.append(segment)
        mapped = sum(s.size for s in self._mapped.values())
        while mapped > MAPPED_CACHE_BYTES:
            oldest = self._mapped.pop(next(iter(self._mapped)))
            mapped -= oldest.size

    def _release(self, segment: Segment) -> None:
        self._usage.add(-segment.size, on_disk=segment.on_disk)

    def trim(self) -> None:
        """Give back segments idle for long."""
        before = time.monotonic() - IDLE_SECONDS
        with self._lock:
            self._collect()
            for segment in [s for s in self._free if s.used_at < before]:
                self._free.remove(segment)
                self._release(segment)
            for segment in [s for s in self._mapped.values() if s.used_at < before]:
                del self._mapped[segment.id]
            self.watched = bool(self._in_use or self._free or self._mapped)

    def close(self) -> None:
        """The session ends: keep nothing, now or later, though somebody may still refer to us."""
        self.returned = deque(maxlen=0)
        with self._lock:
            self._free.clear()
            self._mapped.clear()
            self._in_use.clear()

    def forget_home(self, proc: int) -> None:
        """Drop cached mappings of a dead process's segments: they can never be used again."""
        with self._lock:
            self._collect()
            for id in [id for id in self._mapped if id >> 40 == proc]:
                del self._mapped[id]


class Usage:
    """Bytes of shared memory and of disk in use, by process, in a small shared table.

    Each process writes only its own two slots, so no lock crosses processes.
    """

    SLOTS = 4096

    def __init__(self, fd: int, slot: int, limit: int) -> None:
        self.fd = fd
        self.limit = limit
        self._slot = slot
        # Those for the disk follow those for the memory.
        self._table = memoryview(mmap.mmap(fd, 2 * self.SLOTS * 8, mmap.MAP_SHARED)).cast("q")
        if slot >= self._table[0]:
            self._table[0] = slot + 1  # slot 0 holds how many slots were ever used

    @classmethod
    def create(cls, limit: int) -> Usage:
        return cls(system.anonymous_memory(2 * cls.SLOTS * 8), 1, limit)

    def add(self, size: int, *, on_disk: bool = False) -> None:
        self._table[self._slot + on_disk * self.SLOTS] += size

    def clear(self, slot: int) -> None:
        """Forget a dead process's use."""
        self._table[slot] = self._table[slot + self.SLOTS] = 0

    def total(self) -> int:
        return sum(self._table[1 : self._table[0]])

    def total_on_disk(self) -> int:
        return sum(self._table[self.SLOTS + 1 : self.SLOTS + self._table[0]])

    def fits(self, size: int) -> bool:
        return self.total() + size <= self.limit


def default_spill_dir() -> str:
    return os.environ.get("MINIRAY_SPILL_DIR") or tempfile.gettempdir()


def aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN
