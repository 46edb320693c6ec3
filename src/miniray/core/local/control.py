"""The driver's control plane: places actors and task workers, names them, notices their end.

It is asked questions (``Node.answers``) by every process, its own included, from any thread; one
lock guards its state. Nothing that calls back into callers happens under that lock: such actions
are collected and run after it is released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from miniray.core.local.directory import ActorDirectory
from miniray.core.local.logs import LogReader
from miniray.core.local.node import Node
from miniray.core.local.peers import DEAD
from miniray.core.local.pool import Pool
from miniray.core.local.processes import Processes, Worker, describe
from miniray.core.local.spawner import Zygote
from miniray.core.machine import Resources


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
        """Hold the lock; run the actions collected under it afterwards."""
        with self.lock:
            yield
            actions, self._do = self._do, []
        for action in actions:
            action()

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
            free = {**self.node.info.resources, "CPU": max(0.0, self.resources.free_cpus)}
            if "GPU" in free:
                free["GPU"] = self.resources.free_gpus
            return free

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
            if actor is not None:
                self.actors.exited(actor, text, for_good=bool(why))
            else:
                self.pool.exited(worker, text)
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
