"""Reading ahead: a thread that reads blocks, threads that decode, batches that come in order.

What is in flight is counted in bytes: blocks in memory against somewhat over a quarter of the
budget, decoded batches that nobody has taken yet against half of it; the rest is for what decoding
needs. At least one batch is always let through, or a budget smaller than a batch would stop
everything.

Threads end when the pipeline is closed: at the end, after an error, when the iterator is dropped
and when the interpreter exits. An error is raised at its batch, after all batches before it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from miniray.data.dataset import Dataset
from miniray.data.loader.batching import Batch
from miniray.data.loader.blocks import BlockCache, Piece
from miniray.data.loader.decode import Decoder, Task, size_of

_LOOK_AHEAD = 4096  # rows whose blocks are known in advance
_PATIENCE = 3.0  # seconds for threads to end

_open: weakref.WeakSet[Pipeline] = weakref.WeakSet()


class Pipeline:
    """Batches of ``plan`` in order, made ahead of the one that takes them."""

    def __init__(
        self,
        dataset: Dataset,
        plan: Iterator[Batch],
        cache: BlockCache,
        decoder: Decoder,
        *,
        prefetch: int,
        workers: int,
        budget: int,
    ) -> None:
        self._dataset, self._plan, self._cache, self._decoder = dataset, plan, cache, decoder
        self._prefetch, self._workers = prefetch, workers
        self._budget = budget
        self._condition = threading.Condition()
        self._upcoming: deque[Task] = deque()
        self._known = 0  # rows of those
        self._sent: deque[Task] = deque()
        self._needed: Counter[Piece] = Counter()
        self._exhausted = False
        self._closed = False
        self._failed: BaseException | None = None
        self._typical: int | None = None  # bytes of a decoded batch, as the last ones had
        self._pid = os.getpid()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        if prefetch:
            self._start("miniray-read", self._read_ahead)
            for number in range(workers):
                self._start(f"miniray-decode-{number}", self._work)
            _open.add(self)

    def _start(self, name: str, target: Callable[[], None]) -> None:
        # Daemons, and closed at exit: a loader that was forgotten does not hold up the interpreter.
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # -- the one that takes ----------------------------------------------------------------------

    def take(self) -> Task | None:
        """The next batch, or None after the last."""
        if self._pid != os.getpid():
            raise RuntimeError(
                "this loader's iterator was made before a fork, and its threads are in the parent;"
                " make a new one with iter(loader) in the child"
            )
        if not self._prefetch:
            return self._take_now()
        with self._condition:
            while True:
                if self._sent and self._sent[0].done:
                    task = self._sent.popleft()
                    self._condition.notify_all()
                    break
                if not self._sent and (self._failed is not None or self._exhausted):
                    if self._failed is not None:
                        raise self._failed
                    return None
                if self._closed:
                    return None
                self._condition.wait()
        if task.error is not None:
            raise task.error
        return task

    def _take_now(self) -> Task | None:
        self._look_ahead()
        if not self._upcoming:
            return None
        task = self._next()
        self._hold(task)
        self._decoder.whole(task)
        with self._condition:
            self._let_go(task)
        if task.error is not None:
            raise task.error
        return task

    def close(self) -> None:
        """End the threads and free the memory. Safe to call twice and from any thread.

        A thread that is in a transform which does not come back cannot be ended: it is left behind,
        with a ``RuntimeWarning``, and ends with that transform or the interpreter.
        """
        _open.discard(self)
        if self._pid != os.getpid():
            return  # threads, and whoever holds the locks, are in the parent
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        for _ in range(self._workers):
            self._jobs.put(None)
        # Not from a thread of our own, where the garbage collector may have brought us: it may hold
        # the lock that another needs to end.
        if threading.current_thread() not in self._threads:
            self._join()
        self._upcoming.clear()
        self._sent.clear()
        self._cache.clear()

    def _join(self) -> None:
        until = time.monotonic() + _PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        left = [thread.name for thread in self._threads if thread.is_alive()]
        if left:
            self._decoder.give_up()
            warnings.warn(
                f"{', '.join(left)}: a transform has not come back {_PATIENCE:.0f} s after the"
                " loader was closed, and is left behind",
                RuntimeWarning,
                stacklevel=2,
            )

    # -- reading ---------------------------------------------------------------------------------

    def _read_ahead(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # whatever a file or a user's length function raises
            with self._condition:
                self._failed = error
                self._condition.notify_all()

    def _step(self) -> bool:
        """Send one batch, or read a block for a later one, or wait. False when there is no more."""
        self._look_ahead()
        with self._condition:
            if self._closed:
                return False
            if not self._upcoming:
                self._exhausted = True
                self._condition.notify_all()
                return False
            free = self._has_room()
        if free:
            task = self._next()
            self._hold(task)
            self._send(task)
            return True
        if not self._read_one_more():
            with self._condition:
                while not self._closed and not self._has_room():
                    self._condition.wait()
        return True

    def _has_room(self) -> bool:
        at_most = self._prefetch + max(0, self._workers - 1)
        if self._typical is None or not self._sent:  # the first one tells what a batch takes
            return not self._sent
        waiting = sum(task.nbytes or self._typical for task in self._sent)
        return len(self._sent) < at_most and waiting + self._typical <= self._budget

    def _look_ahead(self) -> None:
        """Know the blocks of the next rows, so that they can be read and kept in time."""
        if self._known >= _LOOK_AHEAD // 2 and len(self._upcoming) > 1:
            return
        batches: list[Batch] = []
        rows = 0
        for batch in self._plan:
            batches.append(batch)
            rows += len(batch.index)
            if rows >= _LOOK_AHEAD // 2:
                break
        if not batches:
            return
        places = self._dataset.places([i for batch in batches for i in batch.index])
        start = 0
        for batch in batches:
            own = places[start : start + len(batch.index)]
            start += len(batch.index)
            pieces = self._cache.pieces(own)
            with self._condition:
                self._needed.update(pieces)
            self._upcoming.append(Task(batch, own, pieces))
            self._known += len(own)

    def _next(self) -> Task:
        task = self._upcoming.popleft()
        self._known -= len(task.places)
        return task

    def _hold(self, task: Task) -> None:
        """Read what a batch needs; what no known batch needs makes room."""
        keep = self._keep()
        for piece in task.pieces:
            task.held[piece] = self._cache.get(piece, keep=keep)

    def _keep(self) -> set[Piece]:
        with self._condition:
            return set(self._needed)

    def _let_go(self, task: Task) -> None:
        task.held = {}
        for piece in task.pieces:
            self._needed[piece] -= 1
            if not self._needed[piece]:
                del self._needed[piece]

    def _read_one_more(self) -> bool:
        """Read the first block that a known batch needs and that is not there, if it fits."""
        for task in self._upcoming:
            for piece in task.pieces:
                if not self._cache.holds(piece):
                    keep = self._keep()
                    if not self._cache.room_for(piece, keep):
                        return False
                    self._cache.get(piece, keep)
                    return True
        return False

    # -- decoding --------------------------------------------------------------------------------

    def _send(self, task: Task) -> None:
        with self._condition:
            self._sent.append(task)
        if not self._workers:
            self._decoder.whole(task)
            self._finish(task)
            return
        parts = self._decoder.split(task, self._workers)
        task.parts, task.missing = [None] * len(parts), len(parts)
        for number, part in enumerate(parts):
            self._jobs.put(lambda n=number, p=part: self._decode(task, n, p))  # type: ignore[misc]

    def _decode(self, task: Task, number: int, part: Any) -> None:
        try:
            task.parts[number] = self._decoder.part(task, part)
        except BaseException as error:  # raised where the batch is taken
            task.error = task.error or error
        with self._condition:
            task.missing -= 1
            last = task.missing == 0
        if last:
            self._decoder.join(task)
            self._finish(task)

    def _finish(self, task: Task) -> None:
        task.parts = []
        task.nbytes = size_of(task.result)
        with self._condition:
            self._let_go(task)
            self._typical = max(task.nbytes, (self._typical or 0) * 7 // 8)
            task.done = True
            self._condition.notify_all()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if not self._closed:
                job()


@atexit.register
def _close_all() -> None:
    for pipeline in list(_open):
        pipeline.close()
