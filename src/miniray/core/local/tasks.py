"""Tasks: submitting them, what they need, what is known of their functions, and who runs them.

The workers that do are found by ``dispatch``.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import Call, fill_arguments, make_sink, set_origin
from miniray.core.local.channel import Channel
from miniray.core.local.executors import current_call
from miniray.core.local.objects import Blob, Entry

if TYPE_CHECKING:
    from miniray.core.local.dispatch import Dispatcher
    from miniray.core.local.node import Node
    from miniray.core.options import Options
    from miniray.core.specs import FunctionSpec

DEFAULT_RETRIES = 3
#: Tasks shorter than this are sent several at a time.
_SHORT_SECONDS = 0.002
_DEPTH = 32


class TaskClient:
    """Submits this process's tasks."""

    def __init__(self, node: Node, dispatcher: Dispatcher, env: dict[str, str]) -> None:
        self.node = node
        self.env = env  # what this worker was given: its tasks inherit it
        self._waiting: dict[int, Call] = {}  # for arguments that are still being computed
        self._dispatcher = dispatcher

    def submit(
        self, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        node = self.node
        function: Function | None = spec.cache.get(node)
        if function is None:
            spec.cache.clear()  # what an earlier session left
            function = spec.cache[node] = Function(node, spec)
        chosen = function.chosen
        if chosen is None or chosen[0] is not options:
            chosen = function.chosen = (options, self._lane(options))
        num_returns = spec.num_returns(options)
        id = next(node.ids)
        sink, result = make_sink(node, id, num_returns)
        call = Call(id, sink, function.id, num_returns)
        call.spec = function
        call.parent = current_call.get()
        call.retries = DEFAULT_RETRIES if options.max_retries is None else options.max_retries
        fill_arguments(node, call, args, kwargs)
        set_origin(sink, self, call)
        waiting = call.pending_deps()
        if waiting:
            self._when_ready(call, chosen[1], waiting)
        else:
            self._ready(call, chosen[1])
        return result

    def _lane(self, options: Options) -> Lane:
        env = tuple(sorted({**self.env, **options.env_vars}.items()))
        return self._dispatcher.lane(Demand(options.task_cpus, float(options.num_gpus or 0), env))

    def _when_ready(self, call: Call, lane: Lane, waiting: list[Entry]) -> None:
        def check() -> None:
            # Whoever removes it goes on with it: several arguments may become ready at once.
            if not call.pending_deps() and self._waiting.pop(call.id, None) is not None:
                self._ready(call, lane)

        self._waiting[call.id] = call
        for entry in waiting:
            self.node.fetch(entry)
            entry.add_waiter(check)

    def _ready(self, call: Call, lane: Lane) -> None:
        failed = call.failed_dep()
        if failed is not None:
            call.fail(self.node, failed.value)
        else:
            self._dispatcher.enqueue(call, lane)

    def cancel(self, call: Call, force: bool, recursive: bool) -> None:
        """Cancel a task: not sent yet, it never is; running, it is interrupted or killed."""
        call.cancelled = True  # first: wherever it is on its way to, it is looked at there
        if self._waiting.pop(call.id, None) is not None:
            call.fail_cancelled(self.node)
        else:
            self._dispatcher.cancel(call, force, recursive)

    def cancel_started_by(self, id: int) -> None:
        """Cancel what the call ``id``, which runs in this process, has submitted."""
        for call in [*self._waiting.copy().values(), *self._dispatcher.calls()]:
            if call.parent == id:
                self.cancel(call, force=False, recursive=True)


@dataclasses.dataclass(frozen=True)
class Demand:
    """What a task needs of its worker; tasks that need the same share workers."""

    cpus: float
    gpus: float
    env: tuple[tuple[str, str], ...]


class Function:
    """A user's function as this session ships it: pickled once, sent once to each worker."""

    def __init__(self, node: Node, spec: FunctionSpec) -> None:
        self.id = next(node.ids)
        self.name = spec.name
        self.blob = Blob.of(node, spec.function, f"function {spec.name}")
        self.seconds: float | None = None  # running mean of how long it takes
        #: Where its last call went, and the options that said so: mostly the next one's, too.
        self.chosen: tuple[Options, Lane] | None = None

    @property
    def short(self) -> bool:
        return self.seconds is not None and self.seconds < _SHORT_SECONDS


class Lane:
    """The queue and the leased workers of one kind of demand."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.queue: deque[Call] = deque()
        self.leased: dict[int, Leased] = {}
        self.asked = 0
        self.stillborn = 0  # workers that died before they got a task, since the last result


class Leased(Channel):
    """A worker of the pool; the connection is kept from one lease to the next."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lane: Lane | None = None  # None while it is not leased
        self.functions: set[int] = set()  # those it knows
        self.last_event = 0.0  # when it got its first task, or gave a result
        self.stealing = False  # idle, it waits for tasks of a busy one
        self.recalled = False  # the driver wants it back for somebody else
        self.blocked = False  # its task waits for others

    def measure(self) -> None:
        """Results came: how long did each take?"""
        now = time.monotonic()
        elapsed, self.last_event = now - self.last_event, now
        function = self.last_function
        if function is not None:
            seconds = elapsed / max(self.taken, 1)
            known = function.seconds
            function.seconds = seconds if known is None else 0.7 * known + 0.3 * seconds

    def has_room(self, call: Call) -> bool:
        """Whether to send ``call`` here now: idle, or behind tasks as short as it is."""
        pending = self.pending
        if not pending:
            return True
        if len(pending) >= _DEPTH or not call.spec.short:
            return False
        # Only the first can be a long one: nothing else is sent to a worker that is busy.
        try:
            first = next(iter(pending.values()), None)
        except RuntimeError:  # it was answered in this very moment, by another thread
            return True
        return first is None or first.spec.short
