"""The driver's control plane: places actors and task workers, names them, notices their end.

It is asked questions (``Node.answers``) by every process, its own included, from any thread; one
lock guards its state. Nothing that calls back into callers happens under that lock: such actions
are collected and run after it is released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from miniray.core.local.directory import ActorDirectory
from miniray.core.local.logs import LogReader
from miniray.core.local.node import Node
from miniray.core.local.objects import Blob
from miniray.core.local.peers import BLOCKED, DEAD, DRIVER, RECALL, Reply
from miniray.core.local.processes import Processes, Worker, describe, exit_fields, omp_threads
from miniray.core.local.spawner import Zygote
from miniray.core.local.tasks import Demand
from miniray.core.machine import Grant, Resources
from miniray.errors import WorkerCrashedError


class Control:
    """See the module's docstring. ``node`` is the driver's."""

    def __init__(self, node: Node, logs: LogReader, num_workers: int, zygote: Zygote) -> None:
        self.node = node
        self.lock = threading.RLock()
        totals = node.info.resources
        self.resources = Resources(totals["CPU"], int(totals.get("GPU", 0)))
        self._do: list[Callable[[], object]] = []
        self.processes = Processes(node, logs, self.lock, self._exited)
        self.actors = ActorDirectory(self)
        self.pool = Pool(self, num_workers)
        node.released_actors = self.actors.released  # type: ignore[method-assign]
        node.answers["available"] = lambda _, __, ___, reply: reply(self.available(), ())
        self.processes.use(zygote)

    @contextlib.contextmanager
    def locked(self) -> Any:
        """Hold the lock; afterwards run the actions that this caller has collected under it.

        All of them run, even if the caller or one of the actions raises: each tells a process of a
        change that has been made, and that process may be waiting for it.
        """
        with contextlib.ExitStack() as actions, self.lock:
            try:
                yield
            finally:
                while self._do:
                    actions.callback(self._do.pop())  # the last callback runs first

    def later(self, action: Callable[[], object]) -> None:
        """Run ``action`` when the lock is released."""
        self._do.append(action)

    def place(self) -> None:
        """Launch what waits for resources, as far as they go: actors first, then tasks."""
        self.actors.place()
        self.pool.serve_asks()

    def free(self, worker: Worker) -> None:
        """Take back what a worker had. The CPUs of one that waits in ``get`` are free already."""
        grant, worker.grant = worker.grant, None
        if grant is not None:
            self.resources.give_back(
                dataclasses.replace(grant, cpus=0.0) if worker.blocked else grant
            )
        worker.blocked = False

    def available(self) -> dict[str, float]:
        with self.lock:
            return self.resources.available()

    # -- the end of processes ---------------------------------------------------------------------

    def _exited(self, worker: Worker, status: int, why: str) -> None:
        """A process ended: tell everybody, free what it had, restart or fail its work."""
        lines, log_path = self.processes.logs.tail(worker.proc)
        self.processes.logs.forget(worker.proc)
        with self.locked():
            self.processes.remove(worker)
            self.free(worker)
            actor = worker.actor
            by_us = actor is not None and bool(actor.leaving)
            text = why or describe(worker.name, worker.pid, status, lines, log_path, by_us)
            fields = {} if why else exit_fields(worker.pid, status)
            if actor is not None:
                self.actors.exited(actor, text, fields, for_good=bool(why))
            else:
                self.pool.exited(worker, text, fields)
            self.pool.drop_submitter(worker.proc)
            others = self.processes.running()
            self.later(lambda: self.announce(worker.proc, others))
            self._do.extend(worker.at_exit)
            self.place()

    def announce(self, proc: int, others: list[int]) -> None:
        """Tell all processes that ``proc`` is gone: what it held is void."""
        self.node.declare_dead(proc)
        for other in others:
            self.node.tell(other, DEAD, proc)

    def peer_lost(self, proc: int) -> None:
        """A worker closed its control connection. If it still runs it is of no use: end it."""
        with self.lock:
            worker = self.processes.workers.get(proc)
            if worker is not None:
                self.processes.kill(worker)

    def close(self) -> None:
        """End every process and wait until they are gone."""
        self.actors.close()
        self.processes.close()


def _plain(action: Callable[..., None]) -> Callable[[int, Any, list[Blob], Reply], None]:
    """An answer to a question that only wants something done."""

    def answer(_: int, meta: Any, __: list[Blob], reply: Reply) -> None:
        action(*meta)
        reply(None, ())

    return answer


class Pool:
    """Task workers: leased to submitters in the order they asked, as far as resources go.

    At most ``size`` tasks run at once, not counting waiting ones. Of the workers that have nothing
    to run, ``size`` stay; the others are stopped as soon as no other process depends on them.
    """

    def __init__(self, control: Control, size: int) -> None:
        self._control = control
        self._processes = control.processes
        self.node = control.node
        self.num_workers = size
        self._idle: list[Worker] = []  # the longest idle first
        self._asks: deque[tuple[int, Demand, Reply]] = deque()
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
            worker.leases += 1
            self._control.later(partial(reply, worker.proc, ()))

    def _pool_worker(self, demand: Demand, grant: Grant) -> Worker:
        env = dict(demand.env)
        # The number of threads is fixed when a process starts. GPUs are, too, and their memory is
        # free only when it ends: those workers serve once.
        threads = omp_threads(demand.cpus)
        for worker in () if demand.gpus else reversed(self._idle):
            if worker.env == env and worker.threads == threads and not worker.single_use:
                self._idle.remove(worker)
                worker.grant = grant
                return worker
        worker = self._processes.reserve("worker")
        worker.env = env
        worker.threads = threads
        worker.single_use = bool(demand.gpus)
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
            self._idle.append(worker)
            for surplus in self._surplus():
                self._stop_when_idle(surplus)
            self._control.place()

    def _surplus(self) -> list[Worker]:
        """Return the idle workers to stop."""
        reusable = [worker for worker in self._idle if not worker.single_use]
        return [worker for worker in self._idle if worker not in reusable[-self.num_workers :]]

    def _stop_when_idle(self, worker: Worker) -> None:
        """Stop a surplus worker when no other process depends on it.

        It may get another lease before it answers. Then the answer may be out of date.
        """
        if worker.stopping:
            return
        worker.stopping = True
        leases = worker.leases

        def then(ok: bool, _: Any, __: list[Blob]) -> None:
            with self._control.locked():
                worker.stopping = False
                if not ok or worker not in self._surplus():
                    return
                if worker.leases == leases:
                    self._idle.remove(worker)
                    self._processes.kill(worker)
                else:
                    self._stop_when_idle(worker)

        self._control.later(
            partial(self.node.ask, worker.proc, "when_idle", None, [], then),
        )

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

    def exited(self, worker: Worker, text: str, fields: dict[str, Any]) -> None:
        """Keep the error for the submitter of a worker that ended, which asks for it."""
        if worker in self._idle:
            self._idle.remove(worker)
        self._crashes[worker.proc] = Blob.of(self.node, WorkerCrashedError(text, **fields))
        if len(self._crashes) > 1000:
            del self._crashes[next(iter(self._crashes))]

    def _answer_worker_lost(self, proc: int, reply: Reply) -> None:
        with self._control.locked():
            worker = self._processes.workers.get(proc)
            if worker is not None:  # it is dying: asked again when it is gone
                worker.at_exit.append(partial(self._answer_worker_lost, proc, reply))
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
