"""Task workers: leased to submitters in the order they asked, as far as resources and the pool go.

Part of the control plane, like ``directory``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from miniray.core.local.lanes import Demand
from miniray.core.local.objects import Blob
from miniray.core.local.peers import BLOCKED, DRIVER, RECALL, Reply
from miniray.core.local.processes import Worker
from miniray.core.machine import Grant
from miniray.errors import WorkerCrashedError

if TYPE_CHECKING:
    from miniray.core.local.control import Control


def _plain(action: Callable[..., None]) -> Callable[[int, Any, list[Blob], Reply], None]:
    """An answer to a question that only wants something done."""

    def answer(_: int, meta: Any, __: list[Blob], reply: Reply) -> None:
        action(*meta)
        reply(None, ())

    return answer


class Pool:
    """See the module's docstring. At most ``size`` tasks run at once, not counting waiting ones."""

    def __init__(self, control: Control, size: int) -> None:
        self._control = control
        self._processes = control.processes
        self.node = control.node
        self.num_workers = size
        self._idle: list[Worker] = []
        self._asks: deque[tuple[int, Demand, Reply]] = deque()
        self._lost_waiting: dict[int, list[Reply]] = {}
        self._crashes: dict[int, Blob] = {}
        self.node.messages[BLOCKED] = lambda proc, blocked, _: self._blocked(proc, blocked)
        self.node.answers.update(
            lease=lambda proc, demand, _, reply: self._lease(proc, demand, reply),
            return_worker=_plain(self._return),
            worker_lost=lambda _, proc, __, reply: self._answer_worker_lost(proc, reply),
            kill_worker=_plain(self._kill_worker),
        )

    def _lease(self, proc: int, demand: Demand, reply: Reply) -> None:
        with self._control.locked():
            self._asks.append((proc, demand, reply))
            self.serve_asks()
            if self._asks and self._asks[-1][2] is reply:
                self._recall_for(proc)

    def _recall_for(self, proc: int) -> None:
        """Ask a submitter with workers for one of them back, so that all get their turn."""
        for worker in self._processes.workers.values():
            if worker.holder not in (None, proc) and not (worker.recalled or worker.blocked):
                worker.recalled = True
                assert worker.holder is not None
                self._control.later(partial(self._recall, worker.holder, worker.proc))
                return

    def _recall(self, holder: int, proc: int) -> None:
        if holder == DRIVER:
            self.node.post(lambda: self.node.messages[RECALL](DRIVER, proc, []))
        else:
            self.node.tell(holder, RECALL, proc)

    def serve_asks(self) -> None:
        """Lease workers to those who asked, in order, as far as resources and the pool go."""
        for ask in list(self._asks):
            proc, demand, reply = ask
            running = sum(
                w.holder is not None and not w.blocked for w in self._processes.workers.values()
            )
            if running >= self.num_workers:
                return
            grant = self._control.resources.take(demand.cpus, demand.gpus)
            if grant is None:
                continue
            self._asks.remove(ask)
            try:
                worker = self._pool_worker(demand, grant)
            except OSError as error:  # no descriptor left
                self._control.resources.give_back(grant)
                refusal = WorkerCrashedError(f"no process for a task can be started: {error}")
                self._control.later(partial(reply, refusal, ()))
                continue
            worker.holder = proc
            self._control.later(partial(reply, worker.proc, ()))

    def _pool_worker(self, demand: Demand, grant: Grant) -> Worker:
        env = dict(demand.env)
        # GPUs and threads are fixed when a process starts: those workers serve once.
        reused = not demand.gpus and demand.cpus <= 1
        if reused:
            for worker in reversed(self._idle):
                if worker.env == env:
                    self._idle.remove(worker)
                    worker.grant = grant
                    return worker
        worker = self._processes.reserve("worker")
        worker.reused = reused
        worker.env = env
        worker.grant = grant
        self._processes.launch(worker)
        return worker

    def _return(self, proc: int) -> None:
        with self._control.locked():
            worker = self._processes.workers.get(proc)
            if worker is None or worker.holder is None:
                return
            worker.holder = None
            worker.recalled = False
            self._control.free(worker)
            surplus: Worker | None = worker
            if worker.reused:
                self._idle.append(worker)
                surplus = self._idle.pop(0) if len(self._idle) > self.num_workers else None
            if surplus is not None:
                self._processes.kill(surplus)
            self._control.place()

    def _blocked(self, proc: int, blocked: bool) -> None:
        """A task waits in ``get``: its CPU may serve others meanwhile, or nested tasks deadlock."""
        with self._control.locked():
            worker = self._processes.workers.get(proc)
            if worker is None or worker.grant is None or worker.blocked == blocked:
                return
            worker.blocked = blocked
            change = worker.grant.cpus if blocked else -worker.grant.cpus
            self._control.resources.free_cpus += change
            if blocked:
                self._control.place()

    def exited(self, worker: Worker, text: str) -> None:
        """A worker ended: tell its submitter, now or when it asks."""
        if worker in self._idle:
            self._idle.remove(worker)
        cause = Blob.of(self.node, WorkerCrashedError(text))
        self._crashes[worker.proc] = cause
        while len(self._crashes) > 1000:
            del self._crashes[next(iter(self._crashes))]
        for reply in self._lost_waiting.pop(worker.proc, []):
            self._control.later(partial(reply, None, [cause]))

    def _answer_worker_lost(self, proc: int, reply: Reply) -> None:
        with self._control.locked():
            if proc in self._processes.workers:
                self._lost_waiting.setdefault(proc, []).append(reply)
                return
            unknown = Blob.of(self.node, WorkerCrashedError("the worker ended long ago"))
            cause = self._crashes.get(proc, unknown)
            self._control.later(partial(reply, None, [cause]))

    def _kill_worker(self, proc: int) -> None:
        with self._control.lock:
            worker = self._processes.workers.get(proc)
            if worker is not None:
                self._processes.kill(worker)

    def drop_submitter(self, proc: int) -> None:
        """A submitter is gone: nobody wants the results of its tasks."""
        self._asks = deque(ask for ask in self._asks if ask[0] != proc)
        for worker in self._processes.workers.values():
            if worker.holder == proc:
                self._processes.kill(worker)
