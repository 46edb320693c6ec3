"""Who holds what across processes: reference counting as a tree.

Anything another process may hold (an object, an actor handle, a piece of shared memory) is a
``Shared`` with an id unique in the session. Whoever sends it to process P *gives* P one credit and
becomes P's parent for it. P gives it back when P's last use is gone, and only then; if P passed it
on meanwhile, P stays the parent of those. So a parent always outlives its children's use, no
message needs an answer, and none can overtake another to cause harm: each credit is counted by the
one process that gave it.

When a process dies, its credits are void (the session's death notice says so). What it had passed
on is then unknown: for memory this means "never use again, let the kernel free it", for objects
that holders further down may find the value lost.

Within a process no counting is needed: Python's own reference counts do it. An entry stays in
``Sharing.shared`` while others hold it; without that and without local users it is collected, and
its ``__del__`` queues what must be given back.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable

from miniray.core.local.wire import Closed


class Shared:
    """Base of what can be held by several processes.

    ``parent`` is the process that gave it to us, None where we are the origin. ``given`` counts
    credits by process.
    """

    __slots__ = ("__weakref__", "given", "id", "parent", "sharing")

    def __init__(self, sharing: Sharing, id: int, parent: int | None) -> None:
        self.sharing = sharing
        self.id = id
        self.parent = parent
        self.given: dict[int, int] = {}

    def holder_lost(self) -> None:
        """A process that held this died; what it passed on is not known any more."""

    def __del__(self) -> None:
        # Only queue: this may run in any thread, at any line, with any lock held.
        parent = self.parent
        if parent is not None:
            self.sharing.give_back(parent, self.id)


class Sharing:
    """The credits of one process."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.shared: dict[int, Shared] = {}
        self.borrowed: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()
        self.dead: set[int] = set()
        self._given_to: dict[int, set[int]] = {}
        self._returns: deque[tuple[int, int]] = deque()
        self._wake = wake

    def give(self, item: Shared, proc: int) -> None:
        """Count one more credit of ``proc`` on ``item``. Raises ``Closed`` if it is dead."""
        with self.lock:
            if proc in self.dead:
                raise Closed
            item.given[proc] = item.given.get(proc, 0) + 1
            self.shared[item.id] = item
            self._given_to.setdefault(proc, set()).add(item.id)

    def take_back(self, proc: int, returned: list[tuple[int, int]]) -> None:
        """``proc`` gives back credits: (id, how many)."""
        dropped = []  # destroyed after the lock is released: __del__ runs arbitrary code
        with self.lock:
            for id, count in returned:
                item = self.shared.get(id)
                if item is None or proc not in item.given:
                    continue  # void since the process was declared dead
                item.given[proc] -= count
                if item.given[proc] <= 0:
                    del item.given[proc]
                    self._given_to[proc].discard(id)
                    if not item.given:
                        dropped.append(self.shared.pop(id))
        del dropped

    def give_back(self, parent: int, id: int) -> None:
        """Queue the return of one credit. Safe to call from ``__del__``."""
        self._returns.append((parent, id))
        self._wake()

    def pop_returns(self) -> dict[int, list[tuple[int, int]]]:
        """The queued returns as {parent: [(id, count), ...]}."""
        counts: dict[int, dict[int, int]] = {}
        while self._returns:
            parent, id = self._returns.popleft()
            if parent not in self.dead:
                of_parent = counts.setdefault(parent, {})
                of_parent[id] = of_parent.get(id, 0) + 1
        return {parent: list(ids.items()) for parent, ids in counts.items()}

    def find(self, id: int) -> Shared | None:
        """The entry with this id, if this process still has it."""
        return self.shared.get(id) or self.borrowed.get(id)

    def forget(self) -> None:
        """The session ends: nobody holds anything of ours any more."""
        with self.lock:
            dropped = list(self.shared.values())
            self.shared.clear()
            self._given_to.clear()
        del dropped

    def declare_dead(self, proc: int) -> None:
        """Void all credits of ``proc``."""
        dropped = []
        with self.lock:
            self.dead.add(proc)
            for id in self._given_to.pop(proc, ()):
                item = self.shared[id]
                del item.given[proc]
                item.holder_lost()
                if not item.given:
                    dropped.append(self.shared.pop(id))
        del dropped
