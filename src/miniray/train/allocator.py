"""Memory that a step frees stays with the process for the next one.

glibc gives freed memory back to the kernel above limits that begin at 128 KB and grow with what is
freed: a training step then takes the same pages from the kernel again and again, zeroed each time.
"""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt
#: What glibc itself comes to in a process that has freed large blocks.
_LARGEST, _KEPT = 32 << 20, 64 << 20


def keep_freed_memory() -> None:
    """Keep up to 64 MB that were freed, and blocks of up to 32 MB in the heap.

    Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
