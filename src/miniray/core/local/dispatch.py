"""Who runs a task: workers of the pool, leased from the driver and sent tasks directly.

A submitter asks for one worker a queued task, up to what the machine can run at once, keeps each
lease while it has tasks for it, and returns it as soon as it has none. Tasks that turn out to be
short are sent several at a time; a worker that gets stuck on one gives the rest back.
"""

from __future__ import annotations

import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import FUNCTION, Call, sink_entries
from miniray.core.local.objects import Blob, Failure
from miniray.core.local.peers import DRIVER, STEAL
from miniray.core.local.tasks import Demand, Function, Lane, Leased
from miniray.core.local.wire import Closed

if TYPE_CHECKING:
    from miniray.core.local.node import Node

#: Tasks behind one that takes longer than this, against expectation, are for another worker.
_STUCK_SECONDS = 0.02
#: So many workers in a row that die before they get a task, and the next task fails.
_MOST_STILLBORN = 10


class Dispatcher:
    """Sends this process's tasks, once their arguments are there."""

    def __init__(self, node: Node, max_parallel: int) -> None:
        self.node = node
        self._max_parallel = max_parallel
        self._lock = threading.RLock()
        self._lanes: dict[Demand, Lane] = {}
        self._workers: dict[int, Leased] = {}  # kept after the lease, for the next one
        self.pending = True  # the I/O thread looks at it in a moment, like at a channel

    def lane(self, demand: Demand) -> Lane:
        """Where tasks that need this wait."""
        with self._lock:
            return self._lanes.setdefault(demand, Lane(demand))

    def enqueue(self, call: Call, lane: Lane) -> None:
        with self._lock:
            if call.cancelled:
                call.fail_cancelled(self.node)
                return
            lane.queue.append(call)
            self._dispatch(lane)

    def _dispatch(self, lane: Lane) -> None:
        """Send queued tasks to leased workers with room, and ask for more workers."""
        while lane.queue:
            usable = [w for w in lane.leased.values() if not (w.recalled or w.blocked)]
            worker = min(usable, key=lambda w: len(w.pending), default=None)
            if worker is None or not worker.has_room(lane.queue[0]):
                break
            call = lane.queue.popleft()
            if not worker.pending:
                worker.last_event = time.monotonic()
            try:
                self._send(worker, lane, call)
            except Closed:
                lane.queue.appendleft(call)
                del lane.leased[worker.peer]
                worker.lost()
        while lane.asked < min(len(lane.queue), self._max_parallel):
            self._ask(lane)

    def _ask(self, lane: Lane) -> None:
        lane.asked += 1
        self.node.ask(
            DRIVER, "lease", lane.demand, [], lambda ok, proc, _: self._granted(lane, ok, proc)
        )

    def _send(self, worker: Leased, lane: Lane, call: Call) -> None:
        function: Function = call.spec
        if function.id not in worker.functions:
            fds: list[int] = []
            wire = function.blob.to_wire(self.node, worker.peer, fds)
            worker.send_ahead(FUNCTION, pickle.dumps((function.id, function.name, wire)), fds)
            worker.functions.add(function.id)
        worker.submit(call)
        if len(worker.pending) == 2:
            self.node.look_later(self)
        if len(worker.pending) == 1 and lane.queue:
            worker.arm()  # its result makes room for the next task: somebody must read it

    def _granted(self, lane: Lane, ok: bool, proc: Any) -> None:
        with self._lock:
            lane.asked -= 1
            if not ok:
                self._fail_queued(lane, proc)
                return
            worker = self._workers.get(proc)
            if worker is None or worker.closed:
                try:
                    worker = Leased(self.node, proc, True, self)
                except Closed:
                    # It died between the grant and now. Returned, it would be granted again at
                    # once: the lease ends when its death is noticed.
                    self._tell_driver("kill_worker", proc)
                    self.node.ask(
                        DRIVER, "worker_lost", proc, [],
                        lambda ok, _, blobs: self._stillborn(lane, blobs),
                    )  # fmt: skip
                    return
                except OSError as error:  # no descriptor left
                    self._tell_driver("return_worker", proc)
                    text = f"no task can be sent: {error.strerror}"
                    self._fail_queued(lane, OSError(error.errno, text))
                    return
                self._workers[proc] = worker
            lane.leased[proc] = worker
            worker.lane = lane
            self._dispatch(lane)
            self._settle(lane, worker)

    def _stillborn(self, lane: Lane, cause: list[Blob]) -> None:
        """A worker died before anything was sent: another one, unless that goes on and on."""
        with self._lock:
            lane.stillborn += 1
            if lane.stillborn > _MOST_STILLBORN and lane.queue and cause:
                lane.queue.popleft().fail(self.node, cause[0])
            self._dispatch(lane)

    def _fail_queued(self, lane: Lane, error: Exception) -> None:
        while lane.queue:
            lane.queue.popleft().fail(self.node, error)

    def _tell_driver(self, what: str, proc: int) -> None:
        self.node.ask(DRIVER, what, (proc,), [], lambda *_: None)

    def took(self, worker: Leased) -> None:
        """Results came."""
        with self._lock:
            lane = worker.lane
            if lane is None:
                return
            lane.stillborn = 0
            worker.blocked = False
            worker.measure()
            if lane.queue:
                self._dispatch(lane)
            if not worker.pending:
                self._settle(lane, worker)

    def _settle(self, lane: Lane, worker: Leased) -> None:
        """A leased worker with nothing to do: take over from a busy one, or give it back."""
        if worker.pending or worker.peer not in lane.leased or worker.stealing:
            return
        if worker.closed:  # it has died: ``lost`` has what was pending, and ends the lease
            return
        for other in () if worker.recalled else lane.leased.values():
            if len(other.pending) > 1 and self._ask_back(other, worker.peer):
                worker.stealing = True
                other.arm()  # the answer comes there, maybe after the last result
                return
        del lane.leased[worker.peer]
        worker.lane = None
        worker.recalled = worker.blocked = False
        self._tell_driver("return_worker", worker.peer)

    def _ask_back(self, worker: Leased, thief: int) -> bool:
        """Ask for tasks it has not started, for ``thief`` to run; False if it is gone."""
        worker.flush_batch()  # it can give back only what it has
        worker.thieves += 1
        told = self.node.tell(worker.peer, STEAL, thief)
        worker.thieves -= not told
        return told

    def arm(self) -> None:
        """A task takes long and has others behind it: ask for a worker to take these over.

        Short tasks are not always short. Without this they would wait for it, and for ever if it
        waits for what one of them does.
        """
        long_ago = time.monotonic() - _STUCK_SECONDS
        with self._lock:
            for lane in self._lanes.values():
                behind = [w for w in lane.leased.values() if len(w.pending) > 1]
                if behind:
                    self.node.look_later(self)
                if not lane.asked and any(
                    w.last_event < long_ago and not w.blocked for w in behind
                ):
                    self._ask(lane)

    def recall(self, proc: int) -> None:
        """The driver wants ``proc`` back: send it nothing more, return it when it is idle."""
        with self._lock:
            worker = self._workers.get(proc)
            if worker is not None and worker.lane is not None:
                worker.recalled = True
                self._settle(worker.lane, worker)

    def stolen(self, victim: Leased, thief: int | None, ids: list[int]) -> None:
        """A worker gave back tasks it had not started; ``thief`` was waiting for them.

        Without a thief, the worker waits inside a task, perhaps for one of those behind it: it gets
        no more until it has finished, and what was sent meanwhile is asked back too.

        The answer comes among the results, so that a thread that reads there for one of these
        tasks notices that it has moved.
        """
        with self._lock:
            victim.thieves -= thief is not None
            lane = victim.lane
            if lane is not None:
                calls = [victim.pending.pop(id) for id in ids if id in victim.pending]
                for call in reversed(calls):
                    for entry in sink_entries(call.sink):
                        entry.channel = None
                    if call.cancelled:  # what the worker was told about it does not come along
                        call.fail_cancelled(self.node)
                    else:
                        lane.queue.appendleft(call)
                if thief is None:
                    victim.blocked = True
                    if len(victim.pending) > 1:
                        self._ask_back(victim, victim.peer)
            idle = None if thief is None else self._workers.get(thief)
            if idle is not None and idle.lane is not None:
                idle.stealing = False
                self._dispatch(idle.lane)
                self._settle(idle.lane, idle)
            elif lane is not None:
                self._dispatch(lane)

    # -- failure and cancellation -----------------------------------------------------------------

    def lost(self, worker: Leased, calls: list[Call]) -> None:
        """A worker is gone: send its tasks again, as far as they may be, once it is known why."""
        with self._lock:
            lane, worker.lane = worker.lane, None
            if lane is None:
                self._forget(worker)
                return
            lane.leased.pop(worker.peer, None)
            for idle in list(lane.leased.values()):
                idle.stealing = False  # it may have been waiting for what this one gives back
                self._settle(lane, idle)

        def then(ok: bool, _: Any, blobs: list[Blob]) -> None:
            with self._lock:
                self._forget(worker)
                for number, call in enumerate(calls):
                    running = number == 0
                    if call.cancelled:
                        call.fail_cancelled(self.node)
                    elif call.retries or not running:
                        # Only the first can have been running; the others lose no retry.
                        call.retries -= running and call.retries > 0
                        lane.queue.append(call)
                    else:
                        call.fail(self.node, Failure(self.node, blobs[0]))
                self._dispatch(lane)

        if worker.interrupted:
            # The worker still runs what nobody can hear about any more.
            self._tell_driver("kill_worker", worker.peer)
        self.node.ask(DRIVER, "worker_lost", worker.peer, [], then)

    def _forget(self, worker: Leased) -> None:
        if self._workers.get(worker.peer) is worker:
            del self._workers[worker.peer]

    def calls(self) -> list[Call]:
        """All that are queued here or were sent and not answered."""
        with self._lock:
            queued = [call for lane in self._lanes.values() for call in lane.queue]
            sent = [call for w in self._workers.values() for call in list(w.pending.values())]
            return queued + sent

    def cancel(self, call: Call, force: bool, recursive: bool) -> None:
        """Take a task that is marked as cancelled out of the queue, or tell its worker."""
        with self._lock:
            for lane in self._lanes.values():
                if call in lane.queue:
                    lane.queue.remove(call)
                    call.fail_cancelled(self.node)
                    return
            for proc, worker in self._workers.items():
                sent = list(worker.pending)
                if call.id in sent:
                    worker.flush_batch()
                    # One behind another has not started: no reason to end what runs there.
                    if force and call.id == sent[0]:
                        self._tell_driver("kill_worker", proc)
                        return
                    break
            else:
                return
        # Without the lock: if the call has just ended, this runs what waits for it.
        call.request_cancel(self.node, proc, recursive)
