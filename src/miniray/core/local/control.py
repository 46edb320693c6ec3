"""The driver's control plane: places actors and task workers, names them, notices their end.

It is asked questions (``Node.answers``) by every process, its own included, from any thread; one
lock guards its state. Nothing that calls back into callers happens under that lock: such actions
are collected and run after it is released.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from miniray.core import machine
from miniray.core.local import death
from miniray.core.local.actors import ActorEntry
from miniray.core.local.logs import LogReader
from miniray.core.local.node import BLOCKED, DEAD, DRIVER, EXIT, INIT, RECALL, Node, Reply
from miniray.core.local.objects import Blob
from miniray.core.local.spawner import Zygote
from miniray.core.local.store import Usage
from miniray.core.local.tasks import Demand
from miniray.core.options import Options
from miniray.core.resources import Grant, Resources
from miniray.core.serialize import take_ref
from miniray.errors import WorkerCrashedError

Action = Callable[[], object]


def _plain(action: Callable[..., None]) -> Callable[[int, Any, list[Blob], Reply], None]:
    """An answer to a question that only wants something done."""

    def answer(_: int, meta: Any, __: list[Blob], reply: Reply) -> None:
        action(*meta)
        reply(None, ())

    return answer


class _FirstRef:
    def __reduce__(self) -> Any:
        return take_ref, (0,)


_HANDLE_STREAM = pickle.dumps(_FirstRef(), 5)


def handle_blob(actor: ActorEntry) -> Blob:
    """A value that unpickles to a handle of ``actor``."""
    return Blob(data=_HANDLE_STREAM, refs=[actor])


@dataclasses.dataclass
class Worker:
    """One process: an actor's, or one of the pool's."""

    proc: int
    slot: int
    name: str
    listener: socket.socket | None  # until it is launched
    actor: Actor | None = None
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    pid: int = 0
    grant: Grant | None = None
    demand: Demand | None = None
    holder: int | None = None  # the submitter that leases it
    blocked: bool = False
    recalled: bool = False
    reused: bool = True
    cancelled: list[int] = dataclasses.field(default_factory=list)
    at_exit: list[Action] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Actor:
    """One actor over all its lives."""

    id: int
    name: str
    key: tuple[str, str] | None  # (namespace, name) if it is a named one
    options: Options
    is_async: bool
    restarts_left: int
    worker: Worker
    entry: Callable[[], ActorEntry | None]
    spec: Blob
    arguments: tuple[list[Any], list[Blob]] | None = None  # places of deps, blobs
    launched: bool = False
    restarts: int = 0
    dead: bool = False
    leaving: str = ""  # why it is being ended on purpose
    failure: str = ""  # what __init__ raised
    cause: Blob | None = None
    waiting: list[Reply] = dataclasses.field(default_factory=list)


class Control:
    """See the module's docstring. ``node`` is the driver's."""

    def __init__(self, node: Node, logs: LogReader, num_workers: int, zygote: Zygote) -> None:
        self.node = node
        self.logs = logs
        self.num_workers = num_workers
        totals = node.info.resources
        self.resources = Resources(totals["CPU"], int(totals.get("GPU", 0)))
        self.actors: dict[int, Actor] = {}
        self._names: dict[tuple[str, str], Actor] = {}
        self._lock = threading.RLock()
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []
        self._asks: deque[tuple[int, Demand, Reply]] = deque()
        self._unplaced: deque[Actor] = deque()
        self._lost_waiting: dict[int, list[Reply]] = {}
        self._crashes: dict[int, tuple[list[int], Blob]] = {}
        self._detached: list[ActorEntry] = []
        self._next_proc = DRIVER
        self._free_slots = list(range(Usage.SLOTS - 1, 1, -1))
        self._zygote: Zygote | None = None
        self._closing = False
        self._do: list[Action] = []
        node.released_actors = self._released  # type: ignore[method-assign]
        node.messages[BLOCKED] = lambda proc, blocked, _: self._blocked(proc, blocked)
        node.answers.update(
            create_actor=self._answer_create,
            start_actor=lambda _, meta, blobs, reply: self._answer_start(meta, blobs, reply),
            actor_failed=self._answer_failed,
            actor_lost=lambda _, meta, __, reply: self._answer_lost(meta[0], meta[1], reply),
            get_actor=lambda _, meta, __, reply: reply(None, [handle_blob(self.find(*meta))]),
            current_actor=lambda _, id, __, reply: reply(None, [handle_blob(self._by_id(id))]),
            kill=lambda _, meta, __, reply: self.kill(meta[0], meta[1], reply),
            lease=lambda proc, demand, _, reply: self._lease(proc, demand, reply),
            return_worker=_plain(self._return),
            worker_lost=lambda _, proc, __, reply: self._answer_worker_lost(proc, reply),
            kill_worker=_plain(self._kill_worker),
            available=lambda _, __, ___, reply: reply(self.available(), ()),
        )
        self._use(zygote)

    @contextlib.contextmanager
    def _locked(self) -> Any:
        """Hold the lock; run the actions collected under it afterwards."""
        with self._lock:
            yield
            actions, self._do = self._do, []
        for action in actions:
            action()

    # -- processes --------------------------------------------------------------------------------

    def _use(self, zygote: Zygote) -> Zygote:
        zygote.begin(self.node.info)
        self.node.watch(zygote.sock.fileno(), lambda _: self._on_zygote())
        self._zygote = zygote
        return zygote

    def _reserve(self, name: str) -> Worker:
        """A new process's number and socket; callers can connect before it runs."""
        self._next_proc += 1
        proc = self._next_proc
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.node.info.path(proc))
        listener.listen(1024)
        worker = Worker(proc, self._free_slots.pop(), name, listener)
        self._workers[proc] = worker
        return worker

    def _launch(self, worker: Worker) -> None:
        assert worker.listener is not None
        zygote = self._zygote or self._use(Zygote())
        out_fd, err_fd = self.logs.add(worker.proc, worker.name)
        env = dict(worker.env)
        if worker.grant is not None and worker.grant.gpus:
            names = machine.gpu_ids()
            env["CUDA_VISIBLE_DEVICES"] = ",".join(
                names[i] if i < len(names) else str(i) for i in worker.grant.gpus
            )
        if worker.grant is not None and worker.grant.cpus > 1 and "OMP_NUM_THREADS" not in env:
            env["OMP_NUM_THREADS"] = str(int(worker.grant.cpus))
        request = {
            "proc": worker.proc,
            "slot": worker.slot,
            "name": worker.name,
            "env": env,
            "runtime_env": worker.env,
            "path": sys.path,
            "cwd": os.getcwd(),
            "gpu_ids": worker.grant.gpus if worker.grant else (),
            "is_actor": worker.actor is not None,
        }
        modules = ["asyncio"] if worker.actor is not None and worker.actor.is_async else []
        zygote.spawn(request, (worker.listener.fileno(), out_fd, err_fd), modules)
        os.close(out_fd)
        os.close(err_fd)
        worker.listener.close()
        worker.listener = None

    def _on_zygote(self) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        reports = zygote.receive()
        if reports is None:
            self._zygote_lost(zygote)
            return
        for kind, proc, value in reports:
            if kind == "spawned":
                self.logs.set_pid(proc, value)
                worker = self._workers.get(proc)
                if worker is not None:
                    worker.pid = value
            else:
                self._exited(proc, value)

    def _zygote_lost(self, zygote: Zygote) -> None:
        """Somebody killed the zygote: all workers die with it. The next one starts anew."""
        self.node.unwatch(zygote.sock.fileno())
        with self._lock:
            self._zygote = None
            running = [w for w in self._workers.values() if w.listener is None]
        if self._closing:
            return
        zygote.close()
        for worker in running:
            if worker.pid:  # the kernel killed the worker itself, not what it had started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
            self._exited(worker.proc, int(death.KILLED_WITH_ZYGOTE))

    def _exited(self, proc: int, status: int) -> None:
        """A process ended: tell everybody, free what it had, restart or fail its work."""
        lines, log_path = self.logs.tail(proc)
        self.logs.forget(proc)
        with self._locked():
            worker = self._workers.pop(proc, None)
            if worker is None or self._closing:
                return
            self.node.usage.clear(worker.slot)
            self._free_slots.append(worker.slot)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.node.info.path(proc))
            if worker in self._idle:
                self._idle.remove(worker)
            self._free(worker)
            text = death.describe(worker.name, worker.pid, status, lines, log_path)
            if worker.actor is not None:
                self._actor_exited(worker.actor, text, status)
            else:
                self._task_worker_exited(worker, text)
            self._drop_submitter(proc)
            others = [w.proc for w in self._workers.values() if w.listener is None]
            self._do.append(lambda: self._announce(proc, others))
            self._do.extend(worker.at_exit)
            self._place()

    def _free(self, worker: Worker) -> None:
        """Take back what a worker had. The CPUs of one that waits in ``get`` are free already."""
        grant, worker.grant = worker.grant, None
        if grant is not None:
            self.resources.give_back(
                dataclasses.replace(grant, cpus=0.0) if worker.blocked else grant
            )
        worker.blocked = False

    def _announce(self, proc: int, others: list[int]) -> None:
        self.node.declare_dead(proc)
        for other in others:
            self.node.tell(other, DEAD, proc)

    # -- actors -----------------------------------------------------------------------------------

    def create(
        self, class_name: str, info_bytes: bytes, is_async: bool, options: Options, spec: Blob
    ) -> tuple[ActorEntry, bool]:
        """Register an actor; (entry, whether it is new). Raises ``ValueError`` for a taken name."""
        key = None
        with self._locked():
            if options.name is not None:
                key = (options.namespace or self.node.info.namespace, options.name)
                existing = self._names.get(key)
                entry = existing.entry() if existing is not None else None
                if entry is not None:
                    if options.get_if_exists:
                        return entry, False
                    raise ValueError(
                        f"an actor named {options.name!r} exists already in namespace {key[0]!r}; "
                        "choose another name, or pass get_if_exists=True to use it"
                    )
            worker = self._reserve(options.name or class_name)
            worker.env = options.env_vars
            id = next(self.node.ids)
            sequential = not is_async and (options.max_concurrency or 1) == 1
            entry = ActorEntry(
                self.node, id, DRIVER, worker.proc, info_bytes, options.max_task_retries, sequential
            )
            actor = Actor(
                id=id,
                name=worker.name,
                key=key,
                options=options,
                is_async=is_async,
                restarts_left=options.max_restarts,
                worker=worker,
                entry=weakref.ref(entry),
                spec=spec,
            )
            worker.actor = actor
            self.actors[id] = actor
            if key is not None:
                self._names[key] = actor
            if options.lifetime == "detached":
                self._detached.append(entry)
            return entry, True

    def _answer_create(self, _: int, meta: Any, blobs: list[Blob], reply: Reply) -> None:
        class_name, info_bytes, is_async, options = meta
        entry, new = self.create(class_name, info_bytes, is_async, options, blobs[0])
        reply(new, [handle_blob(entry)])

    def start(self, id: int, places: list[Any], blobs: list[Blob]) -> None:
        """The arguments of ``__init__`` are there: place the actor."""
        with self._locked():
            actor = self.actors.get(id)
            if actor is not None and not actor.dead:
                actor.arguments = (places, blobs)
                self._unplaced.append(actor)
                self._place()

    def fail(self, id: int, reason: str) -> None:
        """An argument of ``__init__`` failed: the actor never starts."""
        with self._locked():
            actor = self.actors.get(id)
            if actor is not None and not actor.dead:
                self._bury(actor, reason)

    def _answer_start(self, meta: Any, blobs: list[Blob], reply: Reply) -> None:
        id, places, failure = meta
        if failure:
            self.fail(id, failure)
        else:
            self.start(id, places, blobs)
        reply(None, ())

    def _place(self) -> None:
        """Launch what waits for resources, as far as they go. Actors first, oldest first."""
        for actor in list(self._unplaced):
            options = actor.options
            grant = self.resources.take(options.num_cpus or 0.0, options.num_gpus or 0.0)
            if grant is not None:
                self._unplaced.remove(actor)
                self._launch_actor(actor, grant)
        self._serve_asks()

    def _launch_actor(self, actor: Actor, grant: Grant) -> None:
        worker = actor.worker
        worker.grant = grant
        actor.launched = True
        self._launch(worker)
        assert actor.arguments is not None
        places, blobs = actor.arguments
        options = actor.options
        meta = {
            "actor_id": actor.id,
            "name": options.name,
            "places": places,
            "is_async": actor.is_async,
            "max_concurrency": options.max_concurrency,
            "restarts": actor.restarts,
        }
        if actor.restarts_left == 0:
            actor.arguments = None  # not needed again: let the values go
        spec = actor.spec
        self._do.append(lambda: self._send_init(worker.proc, meta, [spec, *blobs]))

    def _send_init(self, proc: int, meta: Any, blobs: list[Blob]) -> None:
        self.node.tell(proc, INIT, meta, blobs)

    def _answer_failed(self, proc: int, meta: Any, _: list[Blob], reply: Reply) -> None:
        with self._locked():
            actor = self.actors.get(meta[0])
            if actor is not None:
                actor.failure = meta[1]
        reply(None, ())

    def _actor_exited(self, actor: Actor, text: str, status: int) -> None:
        if actor.failure:
            self._bury(actor, actor.failure)
        elif actor.leaving or status == death.EXIT_ON_PURPOSE or not actor.restarts_left:
            self._bury(actor, f"{text}\n{actor.leaving}" if actor.leaving else text)
        else:
            actor.restarts_left -= actor.restarts_left > 0
            actor.restarts += 1
            actor.cause = death.actor_died(self.node, text, restarting=True)
            actor.launched = False
            env = actor.worker.env
            actor.worker = self._reserve(actor.name)
            actor.worker.env = env
            actor.worker.actor = actor
            self._unplaced.append(actor)
            self._answer_waiting(actor)

    def _bury(self, actor: Actor, text: str) -> None:
        """The actor is dead for good."""
        actor.dead = True
        actor.arguments = None
        actor.cause = death.actor_died(self.node, text)
        if actor in self._unplaced:
            self._unplaced.remove(actor)
        if actor.worker.listener is not None:  # never launched
            actor.worker.listener.close()
            self._workers.pop(actor.worker.proc, None)
            self._free_slots.append(actor.worker.slot)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.node.info.path(actor.worker.proc))
            proc = actor.worker.proc
            self._do.append(lambda: self._announce(proc, []))
        self._free_name(actor)
        self._detached = [entry for entry in self._detached if entry.id != actor.id]
        self._answer_waiting(actor)
        if actor.entry() is None:
            self.actors.pop(actor.id, None)

    def _free_name(self, actor: Actor) -> None:
        if actor.key is not None and self._names.get(actor.key) is actor:
            del self._names[actor.key]

    def _answer_waiting(self, actor: Actor) -> None:
        waiting, actor.waiting = actor.waiting, []
        for reply in waiting:
            self._do.append(self._lost_answer(actor, reply))

    def _lost_answer(self, actor: Actor, reply: Reply) -> Action:
        answer = (not actor.dead, actor.worker.proc, actor.restarts)
        cause = actor.cause
        return lambda: reply(answer, [cause] if cause is not None else ())

    def _answer_lost(self, id: int, proc: int, reply: Reply) -> None:
        """A caller lost its connection to ``proc``: where is the actor now, or why is it dead?"""
        with self._locked():
            actor = self.actors.get(id)
            if actor is None:
                cause = death.actor_died(self.node, "the actor has ended")
                self._do.append(lambda: reply((False, proc, 0), [cause]))
            elif actor.dead or actor.worker.proc != proc:
                self._do.append(self._lost_answer(actor, reply))
            else:
                actor.waiting.append(reply)

    def kill(self, id: int, no_restart: bool, reply: Reply) -> None:
        """End an actor's process; answered when it is gone, so that no later call reaches it."""
        with self._locked():
            actor = self.actors.get(id)
            if actor is None or actor.dead:
                self._do.append(partial(reply, None, ()))
                return
            if no_restart:
                actor.leaving = "It was ended with miniray.kill()."
                self._free_name(actor)
            if actor.launched and self._zygote is not None:
                actor.worker.at_exit.append(partial(reply, None, ()))
                self._zygote.kill(actor.worker.proc)
                return
            if no_restart:
                self._bury(actor, f"{actor.name} was ended with miniray.kill() before it started")
            self._do.append(partial(reply, None, ()))

    def _released(self, ids: list[int]) -> None:
        """The last handle of these actors anywhere is gone, and so are their pending calls."""
        with self._locked():
            for id in ids:
                actor = self.actors.pop(id, None)
                if actor is None or actor.dead:
                    continue
                self._free_name(actor)
                actor.leaving = "Its last handle was gone."
                if actor.launched:
                    proc = actor.worker.proc
                    self._do.append(partial(self.node.tell, proc, EXIT, None))
                else:
                    self._bury(actor, "its last handle was gone before it started")

    def find(self, name: str, namespace: str | None) -> ActorEntry:
        """The actor with this name. Raises ``ValueError``."""
        where = namespace or self.node.info.namespace
        with self._lock:
            actor = self._names.get((where, name))
            entry = actor.entry() if actor is not None else None
            if entry is None:
                known = ", ".join(sorted(repr(n) for ns, n in self._names if ns == where))
                raise ValueError(
                    f"there is no actor named {name!r} in namespace {where!r} "
                    f"(it has: {known or 'none'})"
                )
            return entry

    def _by_id(self, id: int) -> ActorEntry:
        with self._lock:
            actor = self.actors.get(id)
            entry = actor.entry() if actor is not None else None
            if entry is None:
                raise ValueError("the actor is ending: no new handle of it can be made")
            return entry

    # -- task workers -----------------------------------------------------------------------------

    def _lease(self, proc: int, demand: Demand, reply: Reply) -> None:
        with self._locked():
            self._asks.append((proc, demand, reply))
            self._serve_asks()
            if self._asks and self._asks[-1][2] is reply:
                self._recall_for(proc)

    def _recall_for(self, proc: int) -> None:
        """Ask a submitter with workers for one of them back, so that all get their turn."""
        for worker in self._workers.values():
            if worker.holder not in (None, proc) and not (worker.recalled or worker.blocked):
                worker.recalled = True
                assert worker.holder is not None
                self._do.append(partial(self._recall, worker.holder, worker.proc))
                return

    def _recall(self, holder: int, proc: int) -> None:
        if holder == DRIVER:
            self.node.post(lambda: self.node.messages[RECALL](DRIVER, proc, []))
        else:
            self.node.tell(holder, RECALL, proc)

    def _serve_asks(self) -> None:
        """Lease workers to those who asked, in order, as far as resources and the pool go."""
        for ask in list(self._asks):
            proc, demand, reply = ask
            running = sum(w.holder is not None and not w.blocked for w in self._workers.values())
            if running >= self.num_workers:
                return
            grant = self.resources.take(demand.cpus, demand.gpus)
            if grant is None:
                continue
            self._asks.remove(ask)
            worker = self._pool_worker(demand, grant)
            worker.holder = proc
            worker.demand = demand
            number = worker.proc
            self._do.append(partial(reply, number, ()))

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
        worker = self._reserve("worker")
        worker.reused = reused
        worker.env = env
        worker.grant = grant
        self._launch(worker)
        return worker

    def _return(self, proc: int) -> None:
        with self._locked():
            worker = self._workers.get(proc)
            if worker is None or worker.holder is None:
                return
            worker.holder = None
            worker.recalled = False
            self._free(worker)
            surplus: Worker | None = worker
            if worker.reused:
                self._idle.append(worker)
                surplus = self._idle.pop(0) if len(self._idle) > self.num_workers else None
            if surplus is not None and self._zygote is not None:
                self._zygote.kill(surplus.proc)
            self._place()

    def _blocked(self, proc: int, blocked: bool) -> None:
        """A task waits in ``get``: its CPU may serve others meanwhile, or nested tasks deadlock."""
        with self._locked():
            worker = self._workers.get(proc)
            if worker is None or worker.grant is None or worker.blocked == blocked:
                return
            worker.blocked = blocked
            change = worker.grant.cpus if blocked else -worker.grant.cpus
            self.resources.free_cpus += change
            if blocked:
                self._place()

    def _task_worker_exited(self, worker: Worker, text: str) -> None:
        cause = Blob.of(self.node, WorkerCrashedError(text))
        self._crashes[worker.proc] = (worker.cancelled, cause)
        while len(self._crashes) > 1000:
            del self._crashes[next(iter(self._crashes))]
        for reply in self._lost_waiting.pop(worker.proc, []):
            self._do.append(partial(reply, worker.cancelled, [cause]))

    def _answer_worker_lost(self, proc: int, reply: Reply) -> None:
        with self._locked():
            if proc in self._workers:
                self._lost_waiting.setdefault(proc, []).append(reply)
                return
            unknown = Blob.of(self.node, WorkerCrashedError("the worker ended long ago"))
            cancelled, cause = self._crashes.get(proc, ([], unknown))
            self._do.append(lambda: reply(cancelled, [cause]))

    def _kill_worker(self, proc: int, call_id: int) -> None:
        with self._lock:
            worker = self._workers.get(proc)
            if worker is not None and self._zygote is not None:
                worker.cancelled.append(call_id)
                self._zygote.kill(proc)

    def _drop_submitter(self, proc: int) -> None:
        """A submitter is gone: nobody wants the results of its tasks."""
        self._asks = deque(ask for ask in self._asks if ask[0] != proc)
        for worker in self._workers.values():
            if worker.holder == proc and self._zygote is not None:
                self._zygote.kill(worker.proc)

    # -- the rest ---------------------------------------------------------------------------------

    def available(self) -> dict[str, float]:
        with self._lock:
            free = {**self.node.info.resources, "CPU": max(0.0, self.resources.free_cpus)}
            if "GPU" in free:
                free["GPU"] = self.resources.free_gpus
            return free

    def peer_lost(self, proc: int) -> None:
        """A worker closed its control connection. If it still runs it is of no use: end it."""
        with self._lock:
            if proc in self._workers and self._zygote is not None:
                self._zygote.kill(proc)

    def pids(self) -> Sequence[int]:
        """All processes of the session but the driver."""
        with self._lock:
            zygote = [self._zygote.pid] if self._zygote is not None else []
            return [*zygote, *(w.pid for w in self._workers.values() if w.pid)]

    def close(self) -> None:
        """End every process and wait until they are gone."""
        with self._lock:
            self._closing = True
            zygote, self._zygote = self._zygote, None
            listeners = [w.listener for w in self._workers.values() if w.listener is not None]
            self._detached.clear()
        if zygote is not None:
            self.node.unwatch(zygote.sock.fileno())
            zygote.close()
        for listener in listeners:
            listener.close()
        self.logs.close()
