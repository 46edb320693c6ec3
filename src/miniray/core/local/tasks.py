"""Tasks: the submitting side. Leases pool workers from the driver and sends them tasks directly.

A submitter asks for one worker a queued task, up to what the machine can run at once, keeps each
lease while it has tasks for it, and returns it as soon as it has none. Tasks that turn out to be
short are sent several at a time; a worker that gets stuck on one gives the rest back.
"""

from __future__ import annotations

import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

from miniray.core.local.actors import fill_arguments
from miniray.core.local.calls import FUNCTION, Call, Channel
from miniray.core.local.executors import current_call
from miniray.core.local.lanes import Demand, Function, Lane, has_room
from miniray.core.local.objects import FAILED, Blob, Failure
from miniray.core.local.peers import CANCEL, DRIVER, STEAL
from miniray.core.local.sinks import make_sink, set_origin, sink_entries
from miniray.core.local.wire import Closed

if TYPE_CHECKING:
    from miniray.core.local.node import Node
    from miniray.core.options import Options
    from miniray.core.remote import FunctionSpec

DEFAULT_RETRIES = 3
#: Tasks behind one that takes longer than this, against expectation, are for another worker.
_STUCK_SECONDS = 0.02
#: So many workers in a row that die before they get a task, and the next task fails.
_MOST_STILLBORN = 10


class TaskClient:
    """Submits this process's tasks."""

    def __init__(self, node: Node, max_parallel: int, env: dict[str, str]) -> None:
        self.node = node
        self.env = env  # what this worker was given: its tasks inherit it
        self._max_parallel = max_parallel
        self._lock = threading.RLock()
        self._waiting: dict[int, Call] = {}  # for arguments that are still being computed
        self._lanes: dict[Demand, Lane] = {}
        self._demands: dict[int, Demand] = {}  # by leased worker
        self._channels: dict[int, Channel] = {}  # kept after the lease, for the next one
        self._watch = _Watch(self)

    def submit(
        self, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        node = self.node
        function = spec.cache.get(node)
        if function is None:
            spec.cache.clear()  # what an earlier session left
            function = spec.cache[node] = Function(node, spec)
        num_returns = spec.num_returns(options)
        id = next(node.ids)
        sink, result = make_sink(node, id, num_returns)
        call = Call(id, sink, function.id, num_returns)
        call.spec = function
        call.parent = current_call.get()
        call.retries = DEFAULT_RETRIES if options.max_retries is None else options.max_retries
        fill_arguments(node, call, args, kwargs)
        env = tuple(sorted({**self.env, **options.env_vars}.items()))
        demand = Demand(options.task_cpus, float(options.num_gpus or 0), env)
        set_origin(sink, self, id)
        waiting = call.pending_deps()
        if waiting:
            self._when_ready(call, demand, waiting)
        else:
            self._enqueue(call, demand)
        return result

    def _when_ready(self, call: Call, demand: Demand, waiting: list[Any]) -> None:
        def check() -> None:
            # Whoever removes it goes on with it: several arguments may become ready at once.
            if not call.pending_deps() and self._waiting.pop(call.id, None) is not None:
                self._enqueue(call, demand)

        self._waiting[call.id] = call
        for entry in waiting:
            self.node.fetch(entry)
            entry.add_waiter(check)

    def _enqueue(self, call: Call, demand: Demand) -> None:
        failed = call.failed_dep()
        if failed is not None:
            call.sink.resolve(FAILED, failed.value)
            return
        with self._lock:
            lane = self._lanes.get(demand)
            if lane is None:
                lane = self._lanes[demand] = Lane()
            lane.queue.append(call)
            self._dispatch(demand, lane)

    # -- dispatching ------------------------------------------------------------------------------

    def _dispatch(self, demand: Demand, lane: Lane) -> None:
        """Send queued tasks to leased workers with room, and ask for more workers."""
        while lane.queue:
            shunned = lane.recalled | lane.blocked
            usable = [c for proc, c in lane.leased.items() if proc not in shunned]
            channel = min(usable, key=lambda c: len(c.pending), default=None)
            if channel is None:
                break
            call = lane.queue[0]
            if not has_room(channel, call):
                break
            lane.queue.popleft()
            if not channel.pending:
                lane.last_event[channel.peer] = time.monotonic()
            try:
                self._send(channel, call)
            except Closed:
                lane.queue.appendleft(call)
                del lane.leased[channel.peer]
                channel.lost()
        while lane.asked < min(len(lane.queue), self._max_parallel):
            self._ask(demand, lane)

    def _ask(self, demand: Demand, lane: Lane) -> None:
        lane.asked += 1
        self.node.ask(
            DRIVER, "lease", demand, [], lambda ok, proc, _: self._granted(demand, ok, proc)
        )

    def _send(self, channel: Channel, call: Call) -> None:
        function: Function = call.spec
        if function.id not in channel.functions:
            fds: list[int] = []
            wire = function.blob.to_wire(self.node, channel.peer, fds)
            channel.send_ahead(FUNCTION, pickle.dumps((function.id, function.name, wire)), fds)
            channel.functions.add(function.id)
        channel.submit(call)
        if len(channel.pending) == 2:
            self.node.look_later(self._watch)
        if len(channel.pending) == 1 and self._lanes[self._demands[channel.peer]].queue:
            channel.arm()  # its result makes room for the next task: somebody must read it

    def _granted(self, demand: Demand, ok: bool, proc: Any) -> None:
        with self._lock:
            lane = self._lanes[demand]
            lane.asked -= 1
            if not ok:
                self._fail_queued(lane, proc)
                return
            channel = self._channels.get(proc)
            if channel is None or channel.closed:
                try:
                    channel = Channel(self.node, proc, True, self._lost, self._result)
                except Closed:
                    # It died between the grant and now. Returned, it would be granted again at
                    # once: the lease ends when its death is noticed.
                    self._kill(proc)
                    self.node.ask(
                        DRIVER, "worker_lost", proc, [],
                        lambda ok, _, blobs: self._stillborn(demand, blobs),
                    )  # fmt: skip
                    return
                except OSError as error:  # no descriptor left
                    self._return(proc)
                    text = f"no task can be sent: {error.strerror}"
                    self._fail_queued(lane, OSError(error.errno, text))
                    return
                channel.on_stolen = self._stolen
                self._channels[proc] = channel
            lane.leased[proc] = channel
            self._demands[proc] = demand
            self._dispatch(demand, lane)
            self._settle(demand, lane, channel)

    def _stillborn(self, demand: Demand, cause: list[Blob]) -> None:
        """A worker died before anything was sent: another one, unless that goes on and on."""
        with self._lock:
            lane = self._lanes[demand]
            lane.stillborn += 1
            if lane.stillborn > _MOST_STILLBORN and lane.queue and cause:
                lane.queue.popleft().sink.resolve(FAILED, cause[0])
            self._dispatch(demand, lane)

    def _fail_queued(self, lane: Lane, error: Exception) -> None:
        while lane.queue:
            lane.queue.popleft().sink.fail(error)

    def _result(self, channel: Channel) -> None:
        with self._lock:
            demand = self._demands.get(channel.peer)
            if demand is None:
                return
            lane = self._lanes[demand]
            lane.stillborn = 0
            lane.blocked.discard(channel.peer)
            self._measure(lane, channel)
            if lane.queue:
                self._dispatch(demand, lane)
            if not channel.pending:
                self._settle(demand, lane, channel)

    def _measure(self, lane: Lane, channel: Channel) -> None:
        now = time.monotonic()
        elapsed = now - lane.last_event.get(channel.peer, now)
        lane.last_event[channel.peer] = now
        function = channel.last_function
        if function is not None:
            seconds = elapsed / max(channel.taken, 1)
            known = function.seconds
            function.seconds = seconds if known is None else 0.7 * known + 0.3 * seconds

    def _settle(self, demand: Demand, lane: Lane, channel: Channel) -> None:
        """A leased worker with nothing to do: take over from a busy one, or give it back."""
        proc = channel.peer
        if channel.pending or proc not in lane.leased or proc in lane.stealing:
            return
        if channel.closed:  # it has died: ``_lost`` has what was pending, and ends the lease
            return
        others = () if proc in lane.recalled else lane.leased.values()
        for other in others:
            if len(other.pending) > 1:
                other.flush_batch()  # it can give back only what it has
                other.thieves += 1
                if self.node.tell(other.peer, STEAL, proc):
                    lane.stealing.add(proc)
                    other.arm()  # the answer comes there, maybe after the last result
                    return
                other.thieves -= 1
        del lane.leased[proc]
        del self._demands[proc]
        lane.recalled.discard(proc)
        lane.blocked.discard(proc)
        self._return(proc)

    def rescue(self) -> None:
        """A task takes long and has others behind it: ask for a worker to take these over.

        Short tasks are not always short. Without this they would wait for it, and for ever if it
        waits for what one of them does.
        """
        now = time.monotonic()
        with self._lock:
            for demand, lane in self._lanes.items():
                behind = [c.peer for c in lane.leased.values() if len(c.pending) > 1]
                if behind:
                    self.node.look_later(self._watch)
                if not lane.asked and any(
                    now - lane.last_event.get(proc, now) > _STUCK_SECONDS
                    and proc not in lane.blocked
                    for proc in behind
                ):
                    self._ask(demand, lane)

    def recall(self, proc: int) -> None:
        """The driver wants ``proc`` back: send it nothing more, return it when it is idle."""
        with self._lock:
            demand = self._demands.get(proc)
            if demand is not None:
                lane = self._lanes[demand]
                lane.recalled.add(proc)
                channel = lane.leased.get(proc)
                if channel is not None:  # else its death is just being noticed
                    self._settle(demand, lane, channel)

    def _kill(self, proc: int) -> None:
        self.node.ask(DRIVER, "kill_worker", (proc,), [], lambda *_: None)

    def _return(self, proc: int) -> None:
        self.node.ask(DRIVER, "return_worker", (proc,), [], lambda *_: None)

    def _stolen(self, channel: Channel, thief: int | None, ids: list[int]) -> None:
        """A worker gave back tasks it had not started; ``thief`` was waiting for them.

        Without a thief, the worker waits inside a task, perhaps for one of those behind it: it gets
        no more until it has finished, and what was sent meanwhile is asked back too.

        The answer comes among the results, so that a thread that reads there for one of these
        tasks notices that it has moved.
        """
        victim = channel.peer
        with self._lock:
            demand = self._demands.get(victim)
            if demand is not None:
                lane = self._lanes[demand]
                calls = [channel.pending.pop(id) for id in ids if id in channel.pending]
                for call in reversed(calls):
                    for entry in sink_entries(call.sink):
                        entry.channel = None
                    if call.cancelled:  # what the worker was told about it does not come along
                        call.fail_cancelled()
                    else:
                        lane.queue.appendleft(call)
                if thief is None:
                    lane.blocked.add(victim)
                    if len(channel.pending) > 1:
                        channel.flush_batch()
                        channel.thieves += 1
                        self.node.tell(victim, STEAL, victim)
            if thief is not None and thief in self._demands:
                demand = self._demands[thief]
                lane = self._lanes[demand]
                lane.stealing.discard(thief)
                self._dispatch(demand, lane)
                if thief in lane.leased:
                    self._settle(demand, lane, lane.leased[thief])
            elif demand is not None:
                self._dispatch(demand, self._lanes[demand])

    # -- failure and cancellation -----------------------------------------------------------------

    def _lost(self, channel: Channel, calls: list[Call]) -> None:
        proc = channel.peer
        with self._lock:
            self._channels.pop(proc, None)
            demand = self._demands.pop(proc, None)
            if demand is None:
                return
            lane = self._lanes[demand]
            lane.leased.pop(proc, None)
            lane.recalled.discard(proc)
            lane.blocked.discard(proc)
            lane.stealing.clear()
            for idle in list(lane.leased.values()):
                self._settle(demand, lane, idle)

        def then(ok: bool, _: Any, blobs: list[Blob]) -> None:
            with self._lock:
                for number, call in enumerate(calls):
                    running = number == 0
                    if call.cancelled:
                        call.fail_cancelled()
                    elif call.retries or not running:
                        # Only the first can have been running; the others lose no retry.
                        call.retries -= running and call.retries > 0
                        lane.queue.append(call)
                    else:
                        call.sink.resolve(FAILED, Failure(self.node, blobs[0]))
                self._dispatch(demand, lane)

        if channel.interrupted:
            # The worker still runs what nobody can hear about any more.
            self._kill(proc)
        self.node.ask(DRIVER, "worker_lost", proc, [], then)

    def cancel_started_by(self, id: int) -> None:
        """Cancel what the call ``id``, which runs in this process, has submitted."""
        with self._lock:
            calls = list(self._waiting.values())
            for lane in self._lanes.values():
                calls.extend(lane.queue)
            for channel in self._channels.values():
                calls.extend(list(channel.pending.values()))
        for call in calls:
            if call.parent == id:
                self.cancel(call.id, force=False, recursive=True)

    def cancel(self, id: int, force: bool, recursive: bool) -> None:
        """Cancel a task: not sent yet, it never is; running, it is interrupted or killed."""
        waiting = self._waiting.pop(id, None)
        if waiting is not None:
            waiting.fail_cancelled()
            return
        with self._lock:
            for lane in self._lanes.values():
                for call in lane.queue:
                    if call.id == id:
                        lane.queue.remove(call)
                        call.fail_cancelled()
                        return
            for proc, channel in self._channels.items():
                sent = channel.pending.get(id)
                if sent is not None:
                    sent.cancelled = True
                    channel.flush_batch()
                    if force:
                        self._kill(proc)
                    else:
                        self.node.tell(proc, CANCEL, (id, recursive))
                    return


class _Watch:
    """What the I/O thread looks at in a moment, like a channel (``IoThread.look_later``)."""

    def __init__(self, client: TaskClient) -> None:
        self._client = client
        self.pending = True

    def arm(self) -> None:
        self._client.rescue()
