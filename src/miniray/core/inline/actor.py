"""Actors of the inline engine: what handles and refs hold, who is alive, and who has which CPUs."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from miniray import limits
from miniray.core import machine
from miniray.core.engine import Engine, InitConfig
from miniray.core.inline.call import Arguments, Failure, Frame, Outcome
from miniray.core.inline.guard import PrivateLoop
from miniray.core.machine import Grant, Resources
from miniray.core.options import Options
from miniray.core.refs import ObjectRef, ObjectRefGenerator
from miniray.core.specs import ClassSpec
from miniray.errors import ActorUnschedulableError


class InlineRef(ObjectRef[Any]):
    """A ref that holds its value: what it refers to is done, and is freed with its last ref."""

    __slots__ = ("_engine", "_id", "inline_outcome")

    def __init__(self, engine: Engine, ref_id: bytes, outcome: Outcome) -> None:
        self._engine: Engine = engine
        self._id: bytes = ref_id
        self.inline_outcome = outcome


class InlineStream(ObjectRefGenerator):
    """The refs of a generator that has run already."""

    def __init__(self, refs: list[ObjectRef[Any]]) -> None:
        self._refs = iter(refs)

    def __next__(self) -> ObjectRef[Any]:
        return next(self._refs)

    async def __anext__(self) -> ObjectRef[Any]:
        for ref in self._refs:
            return ref
        raise StopAsyncIteration


class InlineActor:
    """The user's object, or why there is none any more.

    Handles hold this strongly and the engine weakly, so an actor ends with its last handle; the
    engine holds detached ones too.
    """

    def __init__(
        self,
        spec: ClassSpec,
        options: Options,
        namespace: str,
        ids: tuple[str, str],
        init_args: Arguments,
        env_vars: dict[str, str],
    ) -> None:
        self.spec = spec
        self.options = options
        self.key = None if options.name is None else (options.namespace or namespace, options.name)
        self.id, self.worker_id = ids
        self.init_args: Arguments | None = init_args
        self.env_vars = env_vars
        self.grant = Grant()
        self.instance: Any = None
        self.death: Failure | None = None
        self.restarts = 0
        self.loop = PrivateLoop() if spec.is_async else None
        # Threads of the driver take turns, unless the class says it can bear them all at once.
        self.turn: contextlib.AbstractContextManager[Any] = threading.RLock()
        if not spec.is_async and (options.max_concurrency or 1) > 1:
            self.turn = contextlib.nullcontext()
        self._release: Callable[[], Any] | None = None

    @property
    def name(self) -> str:
        return self.options.name or self.spec.cls.__name__

    def hold(self, grant: Grant, given_back: collections.deque[Grant]) -> None:
        """Keep ``grant`` until the actor ends, however that comes; then append it to the deque."""
        self.grant = grant
        # A finalizer may run inside any statement of any thread, so it must not take a lock:
        # appending to a deque needs none.
        finalizer = weakref.finalize(self, _end, given_back, grant, self.loop)
        finalizer.atexit = False  # at exit nobody counts any more
        self._release = finalizer

    def die(self, failure: Failure) -> None:
        """End for good: later calls give ``failure``."""
        self.death = failure
        self.instance = None
        self.init_args = None
        if self._release is not None:
            self._release()


def _end(given_back: collections.deque[Grant], grant: Grant, loop: PrivateLoop | None) -> None:
    given_back.append(grant)
    if loop is not None:
        loop.close()


class Directory:
    """Who exists. Holds actors weakly, so a name is free again when the last handle is gone.

    Detached ones are held for the session. Not thread-safe: the engine locks.
    """

    def __init__(self) -> None:
        self._all: weakref.WeakSet[InlineActor] = weakref.WeakSet()
        self._named: weakref.WeakValueDictionary[tuple[str, str], InlineActor]
        self._named = weakref.WeakValueDictionary()
        self._detached: set[InlineActor] = set()

    def taken_by(self, actor: InlineActor) -> InlineActor | None:
        """Who has the name that ``actor`` wants; ``ValueError`` unless it asks for that one."""
        existing = None if actor.key is None else self._named.get(actor.key)
        if existing is None or actor.options.get_if_exists:
            return existing
        namespace, name = existing.key or ("", "")
        raise ValueError(
            f"an actor named {name!r} exists already in namespace {namespace!r}: use get_actor(), "
            "or get_if_exists=True"
        )

    def add(self, actor: InlineActor) -> None:
        self._all.add(actor)
        if actor.key is not None:
            self._named[actor.key] = actor
        if actor.options.lifetime == "detached":
            self._detached.add(actor)

    def find(self, namespace: str, name: str) -> InlineActor:
        """Raises ``ValueError`` when there is none."""
        actor = self._named.get((namespace, name))
        if actor is not None:
            return actor
        known = sorted(other for space, other in self._named if space == namespace)
        raise ValueError(
            f"there is no actor named {name!r} in namespace {namespace!r}; "
            f"names there: {', '.join(known) or 'none'}"
        )

    def remove(self, actor: InlineActor) -> None:
        self._all.discard(actor)
        self._detached.discard(actor)
        if actor.key is not None and self._named.get(actor.key) is actor:
            del self._named[actor.key]

    def living(self) -> list[InlineActor]:
        return list(self._all)


class Ledger:
    """CPUs and GPUs of this machine. Requests that do not fit now are refused, not queued."""

    def __init__(self, config: InitConfig) -> None:
        found = machine.gpu_ids()
        gpus = len(found) if config.num_gpus is None else int(config.num_gpus)
        self._gpu_names = found[:gpus] if gpus <= len(found) else [str(i) for i in range(gpus)]
        self._resources = Resources(config.num_cpus or limits.cpu_count(), gpus)
        self._lock = threading.Lock()
        #: Grants of what has ended. Filled by finalizers, which must not take a lock.
        self.given_back: collections.deque[Grant] = collections.deque()

    def for_actor(self, what: str, cpus: float, gpus: float) -> Grant:
        with self._lock:
            return self._take(what, cpus, gpus, lent=0.0)

    def for_task(self, what: str, cpus: float, gpus: float, caller: Frame | None) -> Grant:
        """GPUs for a task. Its CPUs must be free but are not taken.

        A caller waiting for a call lends its CPUs, as in Ray, or tasks would need as many CPUs as
        they are nested deep. Since only the innermost call runs, tasks never hold any here; an
        actor's method lends what its actor holds.
        """
        lent = caller.cpus if caller is not None and caller.actor is not None else 0.0
        with self._lock:
            grant = self._take(what, cpus, gpus, lent)
            self._resources.give_back(Grant(cpus=grant.cpus))
        return Grant(0.0, grant.gpus, grant.share)

    def _take(self, what: str, cpus: float, gpus: float, lent: float) -> Grant:
        self._settle()
        self._resources.check(what, cpus, gpus)
        grant = self._resources.take(max(0.0, cpus - lent), gpus)
        if grant is None:
            raise ActorUnschedulableError(
                f"{what} asks for {cpus:g} CPUs and {gpus:g} GPUs, but only "
                f"{self._resources.free_cpus:g} and {self._resources.free_gpus:g} are not held by "
                "actors. The inline engine runs a call at once and cannot wait for them to end; "
                "the other engines can"
            )
        return grant

    def _settle(self) -> None:
        while self.given_back:
            self._resources.give_back(self.given_back.popleft())

    def total(self) -> dict[str, float]:
        return self._resources.total()

    def available(self, running: Frame | None) -> dict[str, float]:
        """What is free while ``running``, if it is a task, uses its CPUs."""
        used = running.cpus if running is not None and running.actor is None else 0.0
        with self._lock:
            self._settle()
            return self._resources.available(used)

    def cuda_visible_devices(self, grant: Grant) -> str | None:
        return ",".join(self._gpu_names[i] for i in grant.gpus) if grant.gpus else None

    def gpu_ids(self, running: Frame | None) -> list[int]:
        """GPUs of the running call (all of them for the driver), by number where they have one."""
        mine: Iterable[int] = range(self._resources.gpus) if running is None else running.gpus
        names = [(i, self._gpu_names[i]) for i in mine]
        return [int(name) if name.isdigit() else i for i, name in names]
