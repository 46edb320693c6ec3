"""The bytes of large values in shared memory: written there, and buffers over them."""

from __future__ import annotations

import errno
import functools
import pickle
from typing import TYPE_CHECKING, Any

from miniray.core.local.copying import copy
from miniray.core.local.store import Lease, aligned
from miniray.core.serialize import Packed
from miniray.errors import ObjectStoreFullError

if TYPE_CHECKING:
    from miniray.core.local.node import Node


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
