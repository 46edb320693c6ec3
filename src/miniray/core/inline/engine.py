"""Engine 1: everything in the calling process, in the calling thread, one thing after another.

For debugging and for tests: ``.remote()`` runs the code right away, so ``breakpoint()`` in a worker
stops in the user's terminal with the caller a few ``up`` away, prints come in order, and a run
gives the same result each time. An error is raised at ``get`` as everywhere, with the user's own
exception (and its live frames, for a post-mortem debugger) as its cause.

What follows from that, and is no bug: a call never waits, so resources that are merely taken are
refused like those that do not exist; a generator runs to its end at the call, so an endless one
never returns; an actor may call itself; a second thread that calls a busy actor waits its turn;
``os._exit`` in a worker ends the program; environment variables of a ``runtime_env`` are seen by
other threads during the call.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from miniray.core import machine, startup
from miniray.core.engine import Capabilities, Engine, InitConfig, RuntimeContext
from miniray.core.inline.actor import Directory, InlineActor, InlineRef, InlineStream, Ledger
from miniray.core.inline.call import Arguments, Failure, Frame, Outcome, Stored, current, everywhere
from miniray.core.inline.guard import PrivateLoop
from miniray.core.options import Options
from miniray.core.refs import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.core.specs import ClassSpec, FunctionSpec
from miniray.errors import ActorDiedError, SessionEndedError

Returned = ObjectRef[Any] | list[ObjectRef[Any]] | ObjectRefGenerator | None


@dataclasses.dataclass(frozen=True)
class PlainMemory:
    """The memory of a ``SharedBuffer``: its processes are all this one."""

    mapping: mmap.mmap

    def map(self) -> mmap.mmap:
        return self.mapping


class InlineEngine(Engine):
    name = "inline"
    capabilities = Capabilities(
        processes=False,
        concurrent=False,
        zero_copy=False,
        object_store_limit=False,
        shared_memory=True,
        multi_node=False,
    )

    def __init__(self, config: InitConfig) -> None:
        self._ledger = Ledger(config)
        self._namespace = config.namespace or str(uuid.uuid4())
        self._directory = Directory()
        self._lock = threading.RLock()
        self._closed = False
        self._prefix = uuid.uuid4().bytes
        self._counter = itertools.count()
        self._job_id, self._driver_id, self._pool_id = (self._new_id().hex() for _ in range(3))

    def _new_id(self) -> bytes:
        return self._prefix + next(self._counter).to_bytes(12, "big")

    # -- running code ---------------------------------------------------------------------------

    def submit(
        self, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Returned:
        num_returns = spec.num_returns(options)
        cpus = options.task_cpus
        arguments = Arguments(spec.name, args, kwargs)
        self._check_open()
        caller = self._frame()
        grant = self._ledger.for_task(spec.name, cpus, options.num_gpus or 0, caller)
        frame = Frame(
            engine=self,
            function=spec.name,
            worker="a task",
            worker_id=self._pool_id,
            task_id=self._new_id().hex(),
            cpus=cpus,
            gpus=grant.gpus,
            env_vars=self._inherited(options),
            cuda_visible_devices=self._ledger.cuda_visible_devices(grant),
        )
        loop = PrivateLoop() if spec.call.is_async else None
        try:
            outcomes = self._execute(frame, spec.function, arguments, num_returns, loop)
            return self._refs(outcomes, num_returns)
        finally:
            self._ledger.given_back.append(grant)
            if loop is not None:
                loop.close()

    def create_actor(
        self, spec: ClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> ActorHandle[Any]:
        ids = (self._new_id().hex(), self._new_id().hex())
        arguments = Arguments(spec.name, args, kwargs)
        actor = InlineActor(
            spec, options, self._namespace, ids, arguments, self._inherited(options)
        )
        with self._lock:
            self._check_open()
            existing = self._directory.taken_by(actor)
            if existing is not None:
                return self.handle(existing)
            grant = self._ledger.for_actor(spec.name, options.num_cpus or 0, options.num_gpus or 0)
            actor.hold(grant, self._ledger.given_back)
            self._directory.add(actor)
        self._construct(actor)
        return self.handle(actor)

    def call(
        self,
        actor: InlineActor,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_returns: int | str,
    ) -> Returned:
        self._check_open()
        spec = actor.spec.info.methods[method]
        arguments = Arguments(spec.name, args, kwargs)
        with actor.turn:
            death = actor.death
            if death is not None:
                return self._refs(everywhere(death, num_returns), num_returns)
            frame = self._actor_frame(actor, spec.name)
            bound = getattr(actor.instance, method)
            outcomes = self._execute(frame, bound, arguments, num_returns, actor.loop)
            last = outcomes[-1] if outcomes else None
            if isinstance(last, Failure) and last.ends_actor:
                self._bury(actor, last)
            death = actor.death
            if death is not None:
                # It exited or killed itself: what it returned is lost, as with its process.
                outcomes = everywhere(death, num_returns)
                if actor.loop is not None:
                    actor.loop.close()
            return self._refs(outcomes, num_returns)

    def _construct(self, actor: InlineActor) -> None:
        """Make the user's object. What ``__init__`` raises is the actor's death, met at calls."""
        assert actor.init_args is not None
        spec = actor.spec
        made: list[Any] = []

        def construct(*args: Any, **kwargs: Any) -> None:
            made.append(startup.construct(spec.cls, args, kwargs, spec.wrapper))

        frame = self._actor_frame(actor, f"{spec.cls.__name__}.__init__")
        (outcome,) = self._execute(frame, construct, actor.init_args, 1, actor.loop)
        if isinstance(outcome, Failure):
            outcome.seen = True
            reason = f"actor {actor.name} died in its __init__:\n\n{outcome.error}"
            self._bury(actor, Failure(ActorDiedError(reason, in_init=True), outcome.original))
        elif actor.death is None:
            actor.instance = made[0]
            if actor.options.max_restarts == 0:
                actor.init_args = None  # never needed again, and maybe large

    def _execute(
        self,
        frame: Frame,
        function: Callable[..., Any],
        arguments: Arguments,
        num_returns: int | str,
        loop: PrivateLoop | None,
    ) -> list[Outcome]:
        """Run a function or method, unless one of its arguments is a failed call's result."""
        failed = arguments.failure()
        if failed is not None:
            passed_on = dataclasses.replace(failed, ends_actor=False)
            failed.seen = True
            return everywhere(passed_on, num_returns)
        return frame.run(function, arguments, num_returns, loop)

    def _refs(self, outcomes: list[Outcome], num_returns: int | str) -> Returned:
        refs: list[ObjectRef[Any]] = [InlineRef(self, self._new_id(), o) for o in outcomes]
        if num_returns == "streaming":
            return InlineStream(refs)
        if num_returns == 0:
            return None
        return refs[0] if num_returns == 1 else refs

    def _actor_frame(self, actor: InlineActor, function: str) -> Frame:
        return Frame(
            engine=self,
            function=function,
            worker=f"actor {actor.name}",
            worker_id=actor.worker_id,
            task_id=self._new_id().hex(),
            cpus=actor.grant.cpus,
            gpus=actor.grant.gpus,
            env_vars=actor.env_vars,
            cuda_visible_devices=self._ledger.cuda_visible_devices(actor.grant),
            actor=weakref.ref(actor),
        )

    # -- objects --------------------------------------------------------------------------------

    def put(self, value: Any) -> ObjectRef[Any]:
        self._check_open()
        return InlineRef(self, self._new_id(), Stored(value, "value"))

    def allocate_shared(self, size: int) -> PlainMemory:
        self._check_open()
        return PlainMemory(mmap.mmap(-1, size))

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        self._check_open()
        outcomes = [self._own(ref).inline_outcome for ref in refs]
        for outcome in outcomes:
            if isinstance(outcome, Failure):  # the first one stands for all
                outcome.seen = True
        return [outcome.load() for outcome in outcomes]

    def _own(self, ref: ObjectRef[Any]) -> InlineRef:
        if not isinstance(ref, InlineRef) or ref._engine is not self:
            raise SessionEndedError(f"{ref!r} belongs to another session, which has ended")
        return ref

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool = True,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        self._check_open()
        return list(refs[:num_returns]), list(refs[num_returns:])

    def on_ready(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        callback()

    # -- control --------------------------------------------------------------------------------

    def kill(self, actor: InlineActor, no_restart: bool) -> None:
        allowed = actor.options.max_restarts
        if actor.death is not None:
            return
        if no_restart or (allowed != -1 and actor.restarts >= allowed):
            self._bury(actor, Failure(ActorDiedError(f"actor {actor.name} was killed by kill()")))
            return
        actor.restarts += 1
        self._construct(actor)

    def cancel(
        self, ref: ObjectRef[Any] | ObjectRefGenerator, force: bool, recursive: bool
    ) -> None:
        """Nothing to do: whatever has a ref has finished."""

    def get_actor(self, name: str, namespace: str | None) -> ActorHandle[Any]:
        self._check_open()
        with self._lock:
            return self.handle(self._directory.find(namespace or self._namespace, name))

    def handle(self, actor: InlineActor) -> ActorHandle[Any]:
        return ActorHandle(self, actor, actor.id, actor.spec.info)

    def _bury(self, actor: InlineActor, failure: Failure) -> None:
        actor.die(failure)
        with self._lock:
            self._directory.remove(actor)

    # -- context and end ------------------------------------------------------------------------

    @property
    def in_worker(self) -> bool:  # type: ignore[override]
        return self._frame() is not None

    def _frame(self) -> Frame | None:
        """The running call, None in the driver's own code or under an earlier engine."""
        frame = current.get()
        return frame if frame is not None and frame.engine is self else None

    def _inherited(self, options: Options) -> dict[str, str]:
        frame = self._frame()
        return {**(frame.env_vars if frame else {}), **options.env_vars}

    def nodes(self) -> list[dict[str, Any]]:
        return [machine.node(self.cluster_resources())]

    def cluster_resources(self) -> dict[str, float]:
        return self._ledger.total()

    def available_resources(self) -> dict[str, float]:
        return self._ledger.available(self._frame())

    def runtime_context(self) -> RuntimeContext:
        frame = self._frame()
        actor: InlineActor | None = frame.actor() if frame and frame.actor else None
        return RuntimeContext(
            node_id=machine.node_id(),
            worker_id=frame.worker_id if frame else self._driver_id,
            job_id=self._job_id,
            namespace=self._namespace,
            actor_id=actor.id if actor else None,
            actor_name=actor.options.name if actor else None,
            task_id=frame.task_id if frame else None,
            was_current_actor_reconstructed=bool(actor and actor.restarts),
            make_handle=(lambda: self.handle(actor)) if actor else None,
        )

    def gpu_ids(self) -> list[int]:
        return self._ledger.gpu_ids(self._frame())

    def shutdown(self) -> None:
        self._closed = True
        for actor in self._directory.living():
            self._bury(actor, Failure(ActorDiedError(f"actor {actor.name} ended with its session")))

    def _check_open(self) -> None:
        if self._closed:
            raise SessionEndedError(
                "this miniray session was shut down; its refs and actors are gone"
            )


start = InlineEngine  # there is nothing to start but the counting of resources
