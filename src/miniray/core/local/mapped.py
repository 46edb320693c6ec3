"""The bytes of large values in shared memory: written there, and buffers over them.

Large ones are copied by two threads: one core alone does not use what the memory can give.
"""

from __future__ import annotations

import errno
import functools
import os
import pickle
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from miniray.core.local.store import Lease, aligned
from miniray.core.serialize import Packed
from miniray.errors import ObjectStoreFullError

if TYPE_CHECKING:
    from miniray.core.local.node import Node


#: Below this a second thread costs more than it saves.
_LARGE = 32 << 20
_PIECE = 4 << 20
_CORES = os.cpu_count() or 1


def write(node: Node, packed: Packed) -> tuple[Lease, list[tuple[int, int]]]:
    """Where a pickled value now is, and (offset, length) of its parts there.

    Raises ``ObjectStoreFullError``, and so does ``reserve``.
    """
    lease, layout = reserve(node, packed)
    target = writable_bytes(lease)
    for (at, size), part in zip(layout, [packed.data, *packed.buffers], strict=True):
        if size:
            copy(target[at : at + size], as_array(part))
    return lease, layout


def reserve(node: Node, packed: Packed) -> tuple[Lease, list[tuple[int, int]]]:
    """Room for a pickled value, not yet written."""
    layout = [(0, len(packed.data))]
    offset = aligned(len(packed.data))
    for buffer in packed.buffers:
        layout.append((offset, buffer.nbytes))
        offset = aligned(offset + buffer.nbytes)
    return node.store.allocate(max(offset, 1)), layout


def writable_bytes(lease: Lease) -> Any:
    return as_array(lease.segment.map)


def as_array(memory: Any) -> Any:
    import numpy as np

    return np.frombuffer(memory, np.uint8)


def address_of(array: Any) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def copy(target: Any, source: Any) -> None:
    """Copy flat arrays of bytes. numpy does that with the interpreter's lock released.

    The helper takes pieces as it gets to them, so that with all cores busy nobody waits for it
    longer than a piece takes. When an error (Ctrl-C) ends the copying it has ended, too: the memory
    may be used again.
    """
    if len(source) < _LARGE or _CORES < 2:
        target[:] = source
        return
    places = iter(range(0, len(source), _PIECE))

    def work() -> None:
        for at in places:  # each place is given out once
            target[at : at + _PIECE] = source[at : at + _PIECE]

    helper = threading.Thread(target=work, name="miniray-copy", daemon=True)
    helper.start()
    try:
        work()
    finally:
        deque(places, maxlen=0)  # nothing is left to do for it
        helper.join()


def view_of(lease: Lease, memory: Any, size: int, writable: bool) -> memoryview:
    """A buffer over ``memory`` that keeps ``lease`` alive as long as anything is built on it."""
    view = as_array(memory)[:size].view(_leased_array())
    view.lease = lease
    view.flags.writeable = writable
    # Not the array itself: numpy would skip it and refer to the memory below, losing the lease.
    return memoryview(view)


@functools.cache
def _leased_array() -> Any:
    """An array type with room for the lease: plain arrays, and Python before 3.12, have no way to
    export a buffer together with an owner. Made on first use, since it needs numpy."""
    import numpy as np

    class LeasedArray(np.ndarray[Any, Any]):
        lease: Lease

    return LeasedArray


class _Unreadable:
    """Pickled in place of a value that came but could not be mapped: ``load`` raises."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __reduce__(self) -> Any:
        return _raise_full, (self.text,)


def _raise_full(text: str) -> None:
    raise ObjectStoreFullError(text)


def unreadable(size: int, error: OSError) -> bytes:
    """A pickle in place of a value of ``size`` bytes that could not be mapped: see above."""
    text = f"an object of {size / 1e6:.1f} MB came but cannot be mapped here: {error.strerror}"
    if error.errno == errno.EMFILE:
        text += (
            "; each large object in use holds a file descriptor: raise the limit with `ulimit -n` "
            "or drop values you no longer need"
        )
    return pickle.dumps(_Unreadable(text), 5)
