"""Tasks: the submitting side. What runs them is found by ``dispatch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import Call, fill_arguments
from miniray.core.local.dispatch import Dispatcher
from miniray.core.local.executors import current_call
from miniray.core.local.lanes import Demand, Function, Lane
from miniray.core.local.objects import Entry
from miniray.core.local.sinks import make_sink, set_origin

if TYPE_CHECKING:
    from miniray.core.local.node import Node
    from miniray.core.options import Options
    from miniray.core.remote import FunctionSpec

DEFAULT_RETRIES = 3


class TaskClient:
    """Submits this process's tasks."""

    def __init__(self, node: Node, max_parallel: int, env: dict[str, str]) -> None:
        self.node = node
        self.env = env  # what this worker was given: its tasks inherit it
        self._waiting: dict[int, Call] = {}  # for arguments that are still being computed
        self._dispatcher = Dispatcher(node, max_parallel)
        self.recall = self._dispatcher.recall

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
