"""The session's actors: created, placed, found by name, restarted, buried.

Part of the control plane: state is guarded by its lock, and what calls back into callers is put off
with ``Control.later`` until the lock is released.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from miniray.core.local.actors import ActorEntry
from miniray.core.local.objects import Blob
from miniray.core.local.peers import DRIVER, EXIT, INIT, Reply
from miniray.core.local.processes import Worker
from miniray.core.machine import Grant
from miniray.core.options import Options
from miniray.core.refs import later, say_unseen
from miniray.errors import ActorDiedError

if TYPE_CHECKING:
    from miniray.core.local.control import Control


@dataclasses.dataclass(eq=False)
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


class ActorDirectory:
    """See the module's docstring."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._processes = control.processes
        self.node = control.node
        self.actors: dict[int, Actor] = {}
        self._names: dict[tuple[str, str], Actor] = {}
        self._unplaced: deque[Actor] = deque()
        self._detached: list[ActorEntry] = []
        self.node.answers.update(
            create_actor=self.create,
            start_actor=self.start,
            actor_failed=self.failed,
            actor_leaves=self.leaves,
            actor_lost=lambda _, meta, __, reply: self.lost(meta[0], meta[1], reply),
            get_actor=lambda _, meta, __, reply: reply(None, [self._handle(self.find(*meta))]),
            current_actor=lambda _, id, __, reply: reply(None, [self._handle(self.by_id(id))]),
            kill=lambda _, meta, __, reply: self.kill(meta[0], meta[1], reply),
        )

    def create(self, _: int, meta: Any, blobs: list[Blob], reply: Reply) -> None:
        """Register an actor, or find the one that has its name. ``ValueError`` for a taken one."""
        class_name, info_bytes, is_async, options = meta
        entry, new = self._create(class_name, info_bytes, is_async, options, blobs[0])
        reply(new, [self._handle(entry)])

    def _create(
        self, class_name: str, info_bytes: bytes, is_async: bool, options: Options, spec: Blob
    ) -> tuple[ActorEntry, bool]:
        key = None
        with self._control.locked():
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
            worker = self._processes.reserve(options.name or class_name)
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

    def _handle(self, actor: ActorEntry) -> Blob:
        """A value that unpickles to a handle of ``actor``."""
        return Blob.of(self.node, self.node.engine.handle(actor))

    def start(self, _: int, meta: Any, blobs: list[Blob], reply: Reply) -> None:
        """The arguments of ``__init__`` are there: place it. With a failed one it is dead."""
        id, places, failure = meta
        with self._control.locked():
            actor = self.actors.get(id)
            if actor is not None and not actor.dead:
                if failure:
                    actor.failure = failure
                    self._bury(actor, failure, in_init=True)
                else:
                    actor.arguments = (places, blobs)
                    self._unplaced.append(actor)
                    self._control.place()
        reply(None, ())

    def place(self) -> None:
        """Launch what waits for resources, as far as they go. Actors first, oldest first."""
        for actor in list(self._unplaced):
            options = actor.options
            grant = self._control.resources.take(options.num_cpus or 0.0, options.num_gpus or 0.0)
            if grant is not None:
                self._unplaced.remove(actor)
                self._launch_actor(actor, grant)

    def _launch_actor(self, actor: Actor, grant: Grant) -> None:
        worker = actor.worker
        worker.grant = grant
        actor.launched = True
        self._processes.launch(worker)
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
        self._control.later(partial(self._send_init, worker, meta, [actor.spec, *blobs]))

    def _send_init(self, worker: Worker, meta: Any, blobs: list[Blob]) -> None:
        if not self.node.tell(worker.proc, INIT, meta, blobs):
            self._processes.kill(worker)  # nobody will ever tell it what it is

    def failed(self, _: int, meta: Any, __: list[Blob], reply: Reply) -> None:
        """Its ``__init__`` raised; the end of its process is still to come."""
        with self._control.locked():
            actor = self.actors.get(meta[0])
            if actor is not None:
                actor.failure = meta[1]
            else:  # there is no handle of it any more
                self._unseen(meta[1])
        reply(None, ())

    def _unseen(self, failure: str) -> None:
        """Nobody called the actor that could not be made, so nobody would know."""
        if failure:
            later(lambda: say_unseen(ActorDiedError(failure)))

    def leaves(self, proc: int, _: Any, __: list[Blob], reply: Reply) -> None:
        """Its code called ``sys.exit(0)``: it does not come back."""
        with self._control.locked():
            worker = self._processes.workers.get(proc)
            if worker is not None and worker.actor is not None:
                worker.actor.leaving = "It ended itself with sys.exit()."
        reply(None, ())

    def exited(self, actor: Actor, text: str, fields: dict[str, Any], for_good: bool) -> None:
        if actor.failure:
            self._bury(actor, actor.failure, in_init=True)
        elif actor.leaving or for_good or not actor.restarts_left:
            text = f"{text}\n{actor.leaving}" if actor.leaving else text
            self._bury(actor, text, **fields)
        else:
            actor.restarts_left -= actor.restarts_left > 0
            actor.restarts += 1
            actor.cause = self._died(text, restarting=True, **fields)
            actor.launched = False
            env = actor.worker.env
            try:
                actor.worker = self._processes.reserve(actor.name)
            except OSError as error:  # no descriptor left
                self._bury(actor, f"{text}\nIt could not be restarted: {error}", **fields)
                return
            actor.worker.env = env
            actor.worker.actor = actor
            self._unplaced.append(actor)
            self._answer_waiting(actor)

    def _bury(self, actor: Actor, text: str, **fields: Any) -> None:
        """The actor is dead for good."""
        actor.dead = True
        actor.arguments = None
        actor.cause = self._died(text, **fields)
        if actor in self._unplaced:
            self._unplaced.remove(actor)
        if actor.worker.listener is not None:  # never launched
            self._processes.remove(actor.worker)
            self._control.later(partial(self._control.announce, actor.worker.proc, []))
        self._free_name(actor)
        self._detached = [entry for entry in self._detached if entry.id != actor.id]
        self._answer_waiting(actor)
        if actor.entry() is None:
            self.actors.pop(actor.id, None)
            self._unseen(actor.failure)

    def _died(self, text: str, restarting: bool = False, **fields: Any) -> Blob:
        """Create the error that callers get."""
        if restarting:
            text += (
                "\nIt is being restarted; this call was not retried (max_task_retries is used up)."
            )
        return Blob.of(self.node, ActorDiedError(text, **{"in_init": False, **fields}))

    def _free_name(self, actor: Actor) -> None:
        if actor.key is not None and self._names.get(actor.key) is actor:
            del self._names[actor.key]

    def _answer_waiting(self, actor: Actor) -> None:
        waiting, actor.waiting = actor.waiting, []
        for reply in waiting:
            self._control.later(self._lost_answer(actor, reply))

    def _lost_answer(self, actor: Actor, reply: Reply) -> Callable[[], object]:
        answer = (not actor.dead, actor.worker.proc, bool(actor.leaving))
        cause = actor.cause
        assert cause is not None
        if actor.dead:
            actor.failure = ""  # somebody knows of it
        return lambda: reply(answer, [cause])

    def lost(self, id: int, proc: int, reply: Reply) -> None:
        """A caller lost its connection to ``proc``: where is the actor now, or why is it dead?"""
        with self._control.locked():
            actor = self.actors.get(id)
            if actor is None:
                cause = self._died("the actor has ended")
                self._control.later(lambda: reply((False, proc, True), [cause]))
            elif actor.dead or actor.worker.proc != proc:
                self._control.later(self._lost_answer(actor, reply))
            else:
                actor.waiting.append(reply)

    def kill(self, id: int, no_restart: bool, reply: Reply) -> None:
        """End an actor's process; answered when it is gone, so that no later call reaches it."""
        with self._control.locked():
            actor = self.actors.get(id)
            if actor is None or actor.dead:
                self._control.later(partial(reply, None, ()))
                return
            if no_restart:
                actor.leaving = "It was ended with miniray.kill()."
                self._free_name(actor)
            if actor.launched:
                actor.worker.at_exit.append(partial(reply, None, ()))
                self._processes.kill(actor.worker)
                return
            if no_restart:
                self._bury(actor, f"{actor.name} was ended with miniray.kill() before it started")
            self._control.later(partial(reply, None, ()))

    def released(self, ids: list[int]) -> None:
        """The last handle of these actors anywhere is gone, and so are their pending calls."""
        with self._control.locked():
            for id in ids:
                actor = self.actors.pop(id, None)
                if actor is None or actor.dead:
                    self._unseen("" if actor is None else actor.failure)
                    continue
                self._free_name(actor)
                actor.leaving = "Its last handle was gone."
                if actor.launched:
                    proc = actor.worker.proc
                    self._control.later(partial(self.node.tell, proc, EXIT, None))
                else:
                    self._bury(actor, "its last handle was gone before it started")

    def find(self, name: str, namespace: str | None) -> ActorEntry:
        """The actor with this name. Raises ``ValueError``."""
        where = namespace or self.node.info.namespace
        with self._control.lock:
            actor = self._names.get((where, name))
            entry = actor.entry() if actor is not None else None
            if entry is None:
                known = ", ".join(sorted(repr(n) for ns, n in self._names if ns == where))
                raise ValueError(
                    f"there is no actor named {name!r} in namespace {where!r} "
                    f"(it has: {known or 'none'})"
                )
            return entry

    def by_id(self, id: int) -> ActorEntry:
        with self._control.lock:
            actor = self.actors.get(id)
            entry = actor.entry() if actor is not None else None
            if entry is None:
                raise ValueError("the actor is ending: no new handle of it can be made")
            return entry

    def close(self) -> None:
        self._detached.clear()
        for actor in self.actors.values():
            self._unseen(actor.failure)
