"""The local engine as programs see it: the same object in the driver and in every worker."""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from miniray.core import machine, session
from miniray.core.engine import (
    Capabilities,
    Engine,
    ObjectStoreUsage,
    RuntimeContext,
    bytes_of,
)
from miniray.core.local import waiting
from miniray.core.local.actors import ActorEntry
from miniray.core.local.calls import Call, LocalGenerator, fill_arguments
from miniray.core.local.dispatch import Dispatcher
from miniray.core.local.executors import current_call
from miniray.core.local.mapped import Stored
from miniray.core.local.node import Node, owner_of
from miniray.core.local.objects import BLOB, FAILED, PENDING, PLAIN, Blob, Entry, LocalRef
from miniray.core.local.peers import DRIVER, RECALL
from miniray.core.local.shared_memory import SharedMemory
from miniray.core.local.tasks import TaskClient
from miniray.core.machine import Resources
from miniray.core.options import Options
from miniray.core.refs import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.core.serialize import pack
from miniray.core.specs import ClassSpec, FunctionSpec
from miniray.errors import (
    GetTimeoutError,
    NotSerializableError,
    ObjectLostError,
    SessionEndedError,
    TaskError,
)


class LocalEngine(Engine):
    """Runs code in processes of this machine. ``close`` is set by the driver's ``start``."""

    name = "local"
    capabilities = Capabilities(
        processes=True,
        concurrent=True,
        zero_copy=True,
        object_store_limit=True,
        shared_memory=True,
        multi_node=False,
    )

    def __init__(
        self, node: Node, gpu_ids: Sequence[int], env: dict[str, str] | None = None
    ) -> None:
        self.node = node
        self.close: Callable[[], None] = node.close
        #: Entered around waits inside a task.
        self.on_block: Callable[[], Any] = contextlib.nullcontext
        self._gpu_ids = list(gpu_ids)
        totals = node.info.resources
        self._totals = Resources(totals["CPU"], int(totals.get("GPU", 0)))
        dispatcher = Dispatcher(node, max(1, int(totals["CPU"])))
        self._tasks = TaskClient(node, dispatcher, env or {})
        self._actor: tuple[int, str | None, int] | None = None
        node.messages[RECALL] = lambda _, proc, __: dispatcher.recall(proc)
        self.cancel_started_by = self._tasks.cancel_started_by

    def _check(self) -> None:
        waiting.check_open(self.node)

    # -- running code -----------------------------------------------------------------------------

    def submit(
        self, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> Any:
        self._check()
        self._totals.check(spec.name, options.task_cpus, options.num_gpus or 0.0)
        return self._tasks.submit(spec, args, kwargs, options)

    def create_actor(
        self, spec: ClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> ActorHandle[Any]:
        self._check()
        node = self.node
        self._totals.check(spec.name, options.num_cpus or 0.0, options.num_gpus or 0.0)
        cached = spec.cache.get(node)
        if cached is None:
            spec.cache.clear()  # what an earlier session left
            info_bytes = pickle.dumps(spec.info, 5)
            cached = spec.cache[node] = (_pack_class(node, spec), info_bytes)
        blob, info_bytes = cached
        call = Call(0, None, f"{spec.name}.__init__", 1)
        fill_arguments(node, call, args, kwargs)
        if call.args is None:
            call.args = Blob(data=pickle.dumps((args, kwargs), 5))
        options = options.inheriting(self._tasks.env)
        meta = (spec.info.class_name, info_bytes, spec.is_async, options)
        new, blobs = node.ask_and_wait(DRIVER, "create_actor", meta, [blob])
        handle: ActorHandle[Any] = blobs[0].load(node)
        if new:
            self._start_actor(handle._actor, call)
        return handle

    def _start_actor(self, actor: ActorEntry, call: Call) -> None:
        """Send the arguments once those that are refs have values."""
        started: list[bool] = []
        id, node = actor.id, self.node

        def check() -> None:
            if started or call.pending_deps():
                return
            started.append(True)
            failed = call.failed_dep()
            reason = ""
            if failed is not None:
                reason = f"an argument of {call.label} failed:\n{failed.value.load(node)}"
            assert call.args is not None
            blobs = [] if failed else [call.args, *(entry.blob() for _, entry in call.deps)]
            meta = (id, [place for place, _ in call.deps], reason)
            node.ask(DRIVER, "start_actor", meta, blobs, lambda *_: None)

        for entry in call.pending_deps():
            node.fetch(entry)
            entry.add_waiter(check)
        check()

    def call(
        self,
        actor: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_returns: int | str,
    ) -> Any:
        if self.node.closing:
            self._check()
        return actor.client.call(actor, method, args, kwargs, num_returns)

    # -- objects ----------------------------------------------------------------------------------

    def put(self, value: Any) -> LocalRef:
        self._check()
        return self._store(Blob.of(self.node, value))

    def put_filled(
        self, value: Any, holes: Sequence[Any], fill: Callable[[list[Any]], None]
    ) -> LocalRef:
        self._check()
        memory = [bytes_of(hole) for hole in holes]
        return self._store(Blob.of(self.node, value, holes=memory, fill=fill))

    def allocate_shared(self, size: int) -> SharedMemory:
        self._check()
        return SharedMemory.allocate(self.node, next(self.node.ids), size)

    def _store(self, blob: Blob) -> LocalRef:
        entry = Entry(self.node, next(self.node.ids))
        entry.resolve(BLOB, blob)
        return LocalRef(entry)

    def peek(self, ref: ObjectRef[Any]) -> Any:
        entry = self._entry(ref)
        if entry.state != BLOB:
            self.wait([ref], 1, None)
        if entry.state != BLOB:
            return self.get([ref], None)[0]
        return entry.value.load(self.node, writable=False)

    def stored(self, ref: ObjectRef[Any]) -> Stored | None:
        entry = self._entry(ref)
        blob = entry.value if entry.state == BLOB else None
        if blob is None or blob.lease is None or blob.refs:
            return None
        return Stored(blob, blob.lease, self._store)

    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        if self.node.closing:
            self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        entries = [self._entry(ref) for ref in refs]
        if len(entries) == 1:
            if entries[0].state == PENDING:
                waiting.wait_for_one(self.node, entries[0], deadline, self.on_block)
        else:
            waiting.wait_for_many(
                self.node, entries, len(entries), deadline, self.on_block, stop_on_failure=True
            )
        for entry in entries:
            if entry.state == FAILED:
                for other in entries:  # the first error stands for all, also for those to come
                    if other.looked_at not in (other.waiters or ()):
                        other.add_waiter(other.looked_at)
                self._raise(entry)
        for i, entry in enumerate(entries):
            if entry.state == PENDING:
                raise GetTimeoutError(
                    f"get() had no result after {timeout:g} s for {refs[i]!r}"
                    + (f" ({i + 1} of {len(refs)})" if len(refs) > 1 else "")
                    + "; the call goes on and get() may be tried again"
                )
        return [e.value if e.state == PLAIN else e.value.load(self.node) for e in entries]

    def _entry(self, ref: ObjectRef[Any] | ObjectRefGenerator) -> Entry:
        if isinstance(ref, LocalRef) and ref._entry.sharing is self.node:
            return ref._entry
        raise SessionEndedError(f"{ref!r} belongs to another session, which has ended")

    def _raise(self, entry: Entry) -> NoReturn:
        error = entry.value.load(self.node)
        if isinstance(error, TaskError):
            # Shown as part of the message; the local cause would repeat it.
            raise error.as_cause_type() from None
        raise error

    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool = True,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        self._check()
        deadline = None if timeout is None else time.monotonic() + timeout
        entries = [self._entry(ref) for ref in refs]
        waiting.wait_for_many(
            self.node, entries, num_returns, deadline, self.on_block, stop_on_failure=False
        )
        ready: list[ObjectRef[Any]] = []
        rest: list[ObjectRef[Any]] = []
        for ref, entry in zip(refs, entries, strict=True):
            done = entry.state != PENDING and len(ready) < num_returns
            (ready if done else rest).append(ref)
        return ready, rest

    def on_ready(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        self._check()
        entry = self._entry(ref)
        self.node.flush_calls()
        self.node.fetch(entry)
        entry.add_waiter(callback)

    # -- control ----------------------------------------------------------------------------------

    def kill(self, actor: Any, no_restart: bool) -> None:
        self._check()
        if actor.sharing is not self.node:
            raise SessionEndedError("this actor belongs to another session, which has ended")
        self.node.flush_calls()
        self.node.ask_and_wait(DRIVER, "kill", (actor.id, no_restart))

    def cancel(
        self, ref: ObjectRef[Any] | ObjectRefGenerator, force: bool, recursive: bool
    ) -> None:
        self._check()
        if isinstance(ref, LocalGenerator):
            self._cancel_call(ref.state.origin, force, recursive)
            return
        entry = self._entry(ref)
        if entry.parent is None:
            self.cancel_owned(entry, force, recursive)
        elif entry.state == PENDING:
            with contextlib.suppress(ObjectLostError):  # the owner is gone, and the call with it
                meta = (entry.id, force, recursive)
                self.node.ask_and_wait(owner_of(entry.id), "cancel", meta)

    def cancel_owned(self, entry: Entry, force: bool, recursive: bool) -> None:
        """Cancel the call of this process that resolves ``entry``, unless it has ended."""
        self._cancel_call(entry.origin if entry.state == PENDING else None, force, recursive)

    def _cancel_call(self, origin: tuple[Any, Any] | None, force: bool, recursive: bool) -> None:
        if origin is None:
            return
        client, call = origin
        if isinstance(client, TaskClient):
            client.cancel(call, force, recursive)
        elif force:
            raise ValueError("cancel(force=True) is for tasks; end an actor with miniray.kill()")
        else:
            client.cancel(call, recursive)

    def get_actor(self, name: str, namespace: str | None) -> ActorHandle[Any]:
        self._check()
        return self._ask_handle("get_actor", (name, namespace))

    def handle(self, actor: ActorEntry) -> ActorHandle[Any]:
        return ActorHandle(self, actor, f"{actor.id:x}", actor.info)

    def nodes(self) -> list[dict[str, Any]]:
        self._check()
        return [machine.node(self.cluster_resources())]

    def cluster_resources(self) -> dict[str, float]:
        self._check()
        return dict(self.node.info.resources)

    def measure_object_store(self) -> ObjectStoreUsage:
        usage = self.node.usage
        return ObjectStoreUsage(usage.total(), usage.limit, usage.total_on_disk())

    def available_resources(self) -> dict[str, float]:
        self._check()
        answer, _ = self.node.ask_and_wait(DRIVER, "available", None)
        available: dict[str, float] = answer
        return available

    # -- who am I ---------------------------------------------------------------------------------

    def set_actor(self, id: int, name: str | None, restarts: int) -> None:
        self._actor = (id, name, restarts)

    def runtime_context(self) -> RuntimeContext:
        self._check()
        call = current_call.get()
        actor_id, actor_name, restarts = self._actor or (None, None, 0)
        return RuntimeContext(
            node_id=machine.node_id(),
            worker_id=f"{self.node.info.session_id}{self.node.proc:08x}",
            job_id=self.node.info.session_id,
            namespace=self.node.info.namespace,
            actor_id=None if actor_id is None else f"{actor_id:x}",
            actor_name=actor_name,
            task_id=None if call is None else f"{call:x}",
            was_current_actor_reconstructed=restarts > 0,
            make_handle=None
            if actor_id is None
            else partial(self._ask_handle, "current_actor", actor_id),
        )

    def _ask_handle(self, question: str, meta: Any) -> ActorHandle[Any]:
        _, blobs = self.node.ask_and_wait(DRIVER, question, meta)
        handle: ActorHandle[Any] = blobs[0].load(self.node)
        return handle

    def gpu_ids(self) -> list[int]:
        return list(self._gpu_ids)

    def shutdown(self) -> None:
        self.close()


def _pack_class(node: Node, spec: ClassSpec) -> Blob:
    name = f"class {spec.name}"
    try:
        return Blob.of(node, (spec.cls, spec.wrapper), name)
    except NotSerializableError:
        pack(spec.cls, name)  # its error names the attribute
        raise


def _after_fork_in_child() -> None:
    """A forked child has the driver's memory but not its threads: it must not act as the driver."""
    engine = session._engine
    if isinstance(engine, LocalEngine):
        engine.node.closing = True
        session.install(None)


os.register_at_fork(after_in_child=_after_fork_in_child)
