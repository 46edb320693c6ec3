"""Memory for blocks that is given back at once, or used again while it is warm.

Arrow's memory pools keep what is freed, in pieces that fit nothing, and end at twice the memory in
use. So what Arrow decodes is copied, a chunk at a time, into slabs of our own that are counted.
"""

from __future__ import annotations

import mmap
import threading
from typing import Any

_ROUND = 1 << 16
_POPULATE_WRITE = 23  # all pages in one call, at half the cost; mmap has no name for it yet
_HUGE = 1 << 21
_WASTE = 1.25  # a free slab is used for a request if it is at most this much too large


class Slabs:
    """Anonymous memory in slabs. ``budget`` limits what free slabs may add to those in use."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._free: list[mmap.mmap] = []
        self._total = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> mmap.mmap:
        with self._lock:
            fitting = [
                slab for slab in self._free if size <= len(slab) <= max(size * _WASTE, _ROUND)
            ]
            if fitting:
                best = min(fitting, key=len)
                self._free = [slab for slab in self._free if slab is not best]
                return best
            size = -(-size // _ROUND) * _ROUND
            while self._free and self._total + size > self._budget:
                self._total -= len(self._free.pop(0))
            self._total += size
        # Private: a forked child gets a copy, not a share.
        slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            if size >= _HUGE:  # first touch of large pages costs a fifth
                slab.madvise(mmap.MADV_HUGEPAGE)
            slab.madvise(_POPULATE_WRITE)
        except (AttributeError, OSError, ValueError):
            pass  # not Linux, or before 5.14: then pages come one by one as they are written
        return slab

    def give(self, slab: mmap.mmap) -> None:
        with self._lock:
            if self._total > self._budget:
                self._total -= len(slab)  # and the system has it back when the caller lets go
            else:
                self._free.append(slab)


def copied(batch: Any, slab: mmap.mmap) -> Any:
    """An Arrow record batch with its data in ``slab``."""
    import pyarrow as pa

    buffer = pa.py_buffer(slab)
    with pa.ipc.new_stream(pa.FixedSizeBufferWriter(buffer), batch.schema) as stream:
        stream.write_batch(batch)
    with pa.ipc.open_stream(buffer) as stream:
        return stream.read_next_batch()


def size_for(batch: Any) -> int:
    """Bytes that ``copied`` needs."""
    import pyarrow as pa

    return int(pa.ipc.get_record_batch_size(batch) + batch.schema.serialize().size + 64)


def has_dictionary(kind: Any) -> bool:
    """Whether a type has dictionaries in it, which do not travel with a record batch."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return True
    return any(has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
