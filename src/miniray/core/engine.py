"""The Engine contract: what an implementation must provide to run miniray programs.

There are three: ``inline`` (the calling process), ``local`` (processes of this machine) and ``ray``
(a Ray cluster). Everything above this file talks to an ``Engine`` and to nothing below it.

To write another one: subclass ``Engine``, ``ObjectRef`` and pass your own state object to
``ActorHandle``; declare honestly what you cannot do in ``capabilities``; run
``tests/conformance``. Semantics are Ray's wherever Ray has a word for it. Do not emulate a missing
capability half-way: raise ``CapabilityError``.

numpy, torch and asyncio are imported where used: most processes never need all of them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from miniray.core.options import Options
    from miniray.core.refs import ActorHandle, ObjectRef, ObjectRefGenerator
    from miniray.core.shared_buffer import SharedMemory
from miniray.core.specs import ClassSpec, FunctionSpec

#: Part of the memory that objects may use by default.
STORE_SHARE = 0.3


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """What an engine can do. The conformance suite skips a behaviour only by one of these."""

    #: Remote code runs in other processes: it can be killed, can crash, has its own pid and output.
    processes: bool
    #: Several calls make progress at once; a call returns before the remote code has run.
    concurrent: bool
    #: Arrays of 100 KB and more arrive without a copy.
    zero_copy: bool
    #: ``object_store_memory`` is enforced, with spilling to disk.
    object_store_limit: bool
    #: ``SharedBuffer`` works: memory that the driver and all actors map read-write.
    shared_memory: bool
    #: The engine may span several machines.
    multi_node: bool


class ObjectStoreUsage(NamedTuple):
    """What the objects of all processes of a session use."""

    memory_bytes: int
    limit_bytes: int
    disk_bytes: int  #: of objects for which the memory had no room


@dataclasses.dataclass(frozen=True)
class InitConfig:
    """Arguments of ``miniray.init`` after validation; ``None`` means "engine's default"."""

    num_workers: int | None = None
    address: str | None = None
    num_cpus: float | None = None
    num_gpus: float | None = None
    object_store_memory: int | None = None
    namespace: str | None = None
    log_to_driver: bool = True


@dataclasses.dataclass(frozen=True)
class RuntimeContext:
    """Who and where the running code is. Ids are hex strings; None where there is no such thing."""

    node_id: str
    worker_id: str
    job_id: str
    namespace: str
    actor_id: str | None = None
    actor_name: str | None = None
    task_id: str | None = None
    was_current_actor_reconstructed: bool = False
    #: Makes a handle of the running actor. Not the handle itself: it would keep the actor alive.
    make_handle: Callable[[], ActorHandle[Any]] | None = None

    @property
    def current_actor(self) -> ActorHandle[Any] | None:
        """A handle to the actor whose method is running; None outside of one."""
        return None if self.make_handle is None else self.make_handle()

    def get_node_id(self) -> str:
        """The machine's."""
        return self.node_id

    def get_worker_id(self) -> str:
        """The process's; the driver has one too."""
        return self.worker_id

    def get_job_id(self) -> str:
        """The run's, from ``init`` to ``shutdown``: the same in all its processes."""
        return self.job_id

    def get_actor_id(self) -> str | None:
        """The running actor's; None outside of one."""
        return self.actor_id

    def get_actor_name(self) -> str | None:
        """The name the actor was given; None without one, and outside of an actor."""
        return self.actor_name

    def get_task_id(self) -> str | None:
        """The running task's or call's; None in the driver's own code."""
        return self.task_id


def bytes_of(array: Any) -> Any:
    """The memory of a contiguous array or CPU tensor, as a flat array of bytes."""
    import numpy as np

    if not isinstance(array, np.ndarray):
        import torch

        return array.detach().reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)


async def cancel_rest() -> None:
    """Cancel the other tasks of the running loop, and wait until they have ended."""
    import asyncio

    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def drain(items: AsyncIterator[Any]) -> Iterator[Any]:
    """The items of an async generator, one turn of a private event loop each."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())  # one that was not read to its end
        loop.close()


def count_room(
    nodes: Iterable[Mapping[str, float]], num_cpus: float, num_gpus: float
) -> int | None:
    """Return how many actors with these resources fit on nodes with the available ``nodes``.

    None if they reserve nothing.
    """
    counts = []
    for node in nodes:
        rooms = [_divide(node.get("CPU", 0), num_cpus)] if num_cpus else []
        if num_gpus:
            whole, rest = divmod(node.get("GPU", 0), 1)
            # Shares of a GPU that an actor gets are of a single one.
            parts = [whole] if num_gpus >= 1 else [*[1.0] * int(whole), rest]
            rooms.append(sum(_divide(part, num_gpus) for part in parts))
        if not rooms:
            return None
        counts.append(min(rooms))
    return sum(counts)


def _divide(available: float, amount: float) -> int:
    return int(available / amount + 1e-6)  # decimal fractions: 0.3 / 0.1 is 3


class Engine(abc.ABC):
    """One running engine. All methods may be called from any thread and from inside remote code.

    A method that waits must stay interruptible by signals (Ctrl-C) in the main thread.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]
    #: Whether the calling code is remote code: the session is not its own to end.
    in_worker: bool = False

    # -- running code ---------------------------------------------------------------------------

    @abc.abstractmethod
    def submit(
        self, spec: FunctionSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> ObjectRef[Any] | list[ObjectRef[Any]] | ObjectRefGenerator | None:
        """Start a task and return at once.

        Returns one ref, a list for ``num_returns > 1``, a generator for ``"streaming"`` (also the
        default for generator functions) and None for ``num_returns=0``. Arguments are pickled
        before this returns, so later changes by the caller are not seen, and what cannot be pickled
        raises ``NotSerializableError`` here. A top-level ``ObjectRef`` argument is replaced by its
        value before the function runs; if that value is an error, the task fails with it.
        A request for more than the machine has raises ``ActorUnschedulableError`` here.
        """

    @abc.abstractmethod
    def create_actor(
        self, spec: ClassSpec, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options
    ) -> ActorHandle[Any]:
        """Start an actor and return its handle at once.

        An exception in ``__init__`` surfaces as ``ActorDiedError`` (showing the remote traceback)
        at every call. A taken name raises ``ValueError`` here, or gives the existing actor with
        ``get_if_exists``. The actor ends when the last handle anywhere is gone and its calls are
        done, unless ``lifetime="detached"``.
        """

    @abc.abstractmethod
    def call(
        self,
        actor: Any,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_returns: int | str,
    ) -> ObjectRef[Any] | list[ObjectRef[Any]] | ObjectRefGenerator | None:
        """Call a method on ``actor``, the engine's own state from an ``ActorHandle``.

        Calls from one caller to one actor run in submission order. On async and threaded actors,
        calls overtake those that wait for an argument. Arguments as in ``submit``. Raises only for
        bad arguments; a dead actor surfaces at ``get``.
        """

    # -- objects --------------------------------------------------------------------------------

    @abc.abstractmethod
    def put(self, value: Any) -> ObjectRef[Any]:
        """Store ``value`` and return a ref to it. Raises ``ObjectStoreFullError``."""

    def put_filled(
        self, value: Any, holes: Sequence[Any], fill: Callable[[list[Any]], None]
    ) -> ObjectRef[Any]:
        """Store ``value``, some of whose arrays are computed only now.

        ``holes`` are contiguous arrays or CPU tensors inside ``value`` whose contents do not matter
        yet. ``fill`` is called once with a flat writable array of bytes for each and writes them;
        what it raises is raised here, and nothing is stored. An engine whose store can be written
        to in place hands out that memory and saves a copy and the memory for it; this default
        hands out the memory of the holes.
        """
        fill([bytes_of(hole) for hole in holes])
        return self.put(value)

    def allocate_shared(self, size: int) -> SharedMemory:
        """Reserve zeroed memory for a ``SharedBuffer``, if ``capabilities.shared_memory``.

        Raises ``OSError`` if there isn't enough memory.
        """
        raise NotImplementedError(f"the {self.name} engine has no shared memory")

    def measure_object_store(self) -> ObjectStoreUsage | None:
        """Return what the object store uses, or None if the engine has none of its own."""
        return None

    @abc.abstractmethod
    def get(self, refs: Sequence[ObjectRef[Any]], timeout: float | None) -> list[Any]:
        """The values, in order. Raises the first error found, ``GetTimeoutError`` on time-out."""

    def peek(self, ref: ObjectRef[Any]) -> Any:
        """The value, as ``get`` gives it, for a caller that only reads: it must never write to it.

        An engine may hand out torch tensors over memory that others see too, or that is read-only,
        and so save what it costs to give each caller tensors of its own.
        """
        return self.get([ref], None)[0]

    def stored(self, ref: ObjectRef[Any]) -> Any:
        """A ready value as it lies in the engine's memory (see ``local/mapped.py``).

        None where it does not lie anywhere as a whole, or has refs inside: there is only ``peek``.
        """
        return None

    @abc.abstractmethod
    def wait(
        self,
        refs: Sequence[ObjectRef[Any]],
        num_returns: int,
        timeout: float | None,
        fetch_local: bool = True,
    ) -> tuple[list[ObjectRef[Any]], list[ObjectRef[Any]]]:
        """(ready, not ready), each in the order given; at most ``num_returns`` are ready."""

    @abc.abstractmethod
    def on_ready(self, ref: ObjectRef[Any], callback: Callable[[], None]) -> None:
        """Call ``callback`` once, from any thread, when ``get`` on ``ref`` would not block.

        Called at once if that is so already. The callback does not block and does not raise.
        """

    # -- control --------------------------------------------------------------------------------

    @abc.abstractmethod
    def kill(self, actor: Any, no_restart: bool) -> None:
        """End an actor's process now. Calls in flight fail with ``ActorDiedError``."""

    @abc.abstractmethod
    def cancel(
        self, ref: ObjectRef[Any] | ObjectRefGenerator, force: bool, recursive: bool
    ) -> None:
        """Cancel the call behind ``ref``; if it has finished already, do nothing.

        A queued call does not run. A running task gets ``KeyboardInterrupt``, an async method
        ``CancelledError``; ``force`` ends the process of a task and is refused for actor calls.
        With ``recursive``, tasks that the running call has submitted are cancelled too.
        A stream ends with the error as its last item.
        """

    @abc.abstractmethod
    def get_actor(self, name: str, namespace: str | None) -> ActorHandle[Any]:
        """The handle of a named actor. Raises ``ValueError`` when there is none alive."""

    @abc.abstractmethod
    def handle(self, actor: Any) -> ActorHandle[Any]:
        """A handle of ``actor``, the engine's own state from another one."""

    def reduce_handle(self, handle: ActorHandle[Any]) -> Any:
        """``__reduce__`` of a handle for a pickler that is not miniray's own."""
        raise TypeError(
            f"{handle!r} means nothing outside of this session: pass it to a call, put it or "
            "return it, but do not pickle it yourself"
        )

    @abc.abstractmethod
    def nodes(self) -> list[dict[str, Any]]:
        """A dict a machine: NodeID, Alive, NodeManagerHostname, Resources."""

    def lost_nodes(self) -> frozenset[str]:
        """Return the ids of nodes that were lost in this session.

        Waits until the engine has noticed all of them, so that nothing is placed on a lost node.
        """
        return frozenset()

    def node_address(self) -> str | None:
        """Return the address at which other nodes reach this one; None if it isn't known."""
        return None

    @abc.abstractmethod
    def cluster_resources(self) -> dict[str, float]:
        """What there is in total: CPU, GPU, memory."""

    @abc.abstractmethod
    def available_resources(self) -> dict[str, float]:
        """What is not taken now."""

    def count_room(self, num_cpus: float, num_gpus: float) -> int | None:
        """Return how many more actors with these resources could be placed now; None: any number.

        Each actor is placed on one node. Available resources may be reported with some delay.
        """
        return count_room([self.available_resources()], num_cpus, num_gpus)

    @abc.abstractmethod
    def runtime_context(self) -> RuntimeContext:
        """Who and where the calling code is."""

    @abc.abstractmethod
    def gpu_ids(self) -> list[int]:
        """GPUs assigned to the calling worker (all of them on the driver)."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End everything this engine started and free its memory. Safe to call twice.

        Pending ``get`` calls in other threads raise. Afterwards refs and handles are dead.
        """
