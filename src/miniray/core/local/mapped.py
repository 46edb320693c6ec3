"""The bytes of large values in shared memory: written there, and buffers over them.

Large ones are copied by two threads: one core alone does not use what the memory can give.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import pickle
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from miniray import limits
from miniray.core.local.store import Lease, aligned
from miniray.core.serialize import Packed
from miniray.errors import ObjectStoreFullError

if TYPE_CHECKING:
    from miniray.core.local.node import Node
    from miniray.core.local.objects import Blob, LocalRef


#: Below this a second thread costs more than it saves.
_LARGE = 32 << 20
_PIECE = 4 << 20
_CORES = limits.cpu_count()


def write(
    node: Node, packed: Packed, holes: Sequence[Any] = ()
) -> tuple[Lease, list[tuple[int, int]], list[Any]]:
    """Where a pickled value now is, (offset, length) of its parts there, and memory for ``holes``.

    These are parts, as flat arrays of bytes, that are not copied: the caller writes them. Raises
    ``ObjectStoreFullError``.
    """
    layout = [(0, len(packed.data))]
    offset = aligned(len(packed.data))
    for buffer in packed.buffers:
        layout.append((offset, buffer.nbytes))
        offset = aligned(offset + buffer.nbytes)
    lease = node.store.allocate(max(offset, 1))
    target = writable_bytes(lease)
    numbers = {_address_of(hole): i for i, hole in enumerate(holes) if len(hole)}
    memory = list(holes)
    for (at, size), part in zip(layout, [packed.data, *packed.buffers], strict=True):
        if size:
            source = as_array(part)
            number = numbers.get(_address_of(source)) if numbers else None
            if number is None:
                copy(target[at : at + size], source)
            else:
                memory[number] = target[at : at + size]
    return lease, layout, memory


def writable_bytes(lease: Lease) -> Any:
    return as_array(lease.segment.map)


def as_array(memory: Any) -> Any:
    import numpy as np

    return np.frombuffer(memory, np.uint8)


def _address_of(array: Any) -> int:
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


class Stored:
    """An object in shared memory, not unpickled, for a reader that knows what is inside.

    To unpickle hundreds of tensors takes longer than to add up what they hold. Who gets the same
    structure again and again looks at it once, and from then on at the memory alone, which this
    holds. Two with the same ``key`` are the same value but for what its arrays and tensors contain,
    and these are at the same places of ``memory``, a flat read-only array of bytes.
    """

    __slots__ = ("_blob", "_store", "key", "memory")

    def __init__(self, blob: Blob, lease: Lease, store: Callable[[Blob], LocalRef]) -> None:
        (_, length), *places = blob.layout
        end = places[-1][0] + places[-1][1] if places else length
        self._blob = blob
        self._store = store
        self.memory: Any = as_array(view_of(lease, lease.segment.map, end, False))
        # A copy: it outlives the memory.
        self.key = (self.memory[:length].tobytes(), tuple(places), tuple(blob.private))

    def another(self, fill: Callable[[Any], None]) -> LocalRef:
        """Store a value of the same ``key``; ``fill`` writes its arrays to the memory it gets.

        What ``fill`` raises is raised here, and nothing is stored. Bytes that it does not write
        have any contents. Raises ``ObjectStoreFullError``.
        """
        blob, end = self._blob, len(self.memory)
        assert blob.lease is not None
        lease = blob.lease.store.allocate(end)
        target = writable_bytes(lease)[:end]
        length = blob.layout[0][1]
        target[:length] = self.memory[:length]
        fill(target)
        return self._store(dataclasses.replace(blob, lease=lease))
