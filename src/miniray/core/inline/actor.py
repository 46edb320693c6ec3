"""Actors of the inline engine: the state that handles hold, refs and streams, and who is alive."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

from miniray.core.engine import Engine
from miniray.core.inline.call import Arguments, Failure, Outcome
from miniray.core.inline.guard import PrivateLoop
from miniray.core.machine import Grant
from miniray.core.options import Options
from miniray.core.refs import ObjectRef, ObjectRefGenerator
from miniray.core.remote import ClassSpec


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
