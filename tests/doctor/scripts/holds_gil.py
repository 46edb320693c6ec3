"""Rank 1 calls C code that never gives Python's lock back."""

import ctypes

from common import RANK, dist, start

start()
if RANK == 1:
    # PyDLL keeps the GIL, as a badly written extension does: a mutex that is locked twice.
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
dist.barrier()
