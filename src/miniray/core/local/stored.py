"""An object as it lies in shared memory, for a reader that knows what is inside.

To unpickle hundreds of tensors takes longer than to add up what they hold. Who gets the same
structure again and again looks at it once, and from then on at the memory alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miniray.core.local.mapped import as_array, view_of, writable_bytes
from miniray.core.local.objects import BLOB, Blob, Entry, LocalRef
from miniray.core.local.store import Lease

if TYPE_CHECKING:
    from miniray.core.local.node import Node


class Stored:
    """An object in shared memory, not unpickled. It holds the memory.

    Two with the same ``key`` are the same value but for what its arrays and tensors contain, and
    these are at the same places of ``memory``, a flat read-only array of bytes.
    """

    __slots__ = ("_blob", "_lease", "_node", "key", "memory")

    def __init__(self, node: Node, blob: Blob, lease: Lease) -> None:
        (_, length), *places = blob.layout
        end = places[-1][0] + places[-1][1] if places else length
        self._node = node
        self._blob = blob
        self._lease = lease
        self.memory: Any = as_array(view_of(lease, lease.segment.map, end, False))
        # A copy: it outlives the memory.
        self.key = (self.memory[:length].tobytes(), tuple(places), tuple(blob.private))

    @classmethod
    def of(cls, node: Node, blob: Blob) -> Stored | None:
        """None for a value that is not in shared memory, or has refs or handles inside."""
        if blob.lease is None or blob.refs:
            return None
        return cls(node, blob, blob.lease)

    def another(self, fill: Callable[[Any], None]) -> LocalRef:
        """Store a value of the same ``key``; ``fill`` writes its arrays to the memory it gets.

        What ``fill`` raises is raised here, and nothing is stored. Bytes that it does not write
        have any contents. Raises ``ObjectStoreFullError``.
        """
        blob, end = self._blob, len(self.memory)
        lease = self._node.store.allocate(end)
        target = writable_bytes(lease)[:end]
        length = blob.layout[0][1]
        target[:length] = self.memory[:length]
        fill(target)
        entry = Entry(self._node, next(self._node.ids))
        entry.resolve(BLOB, Blob(private=blob.private, lease=lease, layout=blob.layout))
        return LocalRef(entry)
