"""``WorkerGroup``: create, check, call and replace independent workers.

An exception in a worker's code stops the run. It is raised with worker ID, epoch and remote
traceback. A worker that crashes, or whose call exceeds ``worker_timeout``, is replaced up to
``max_failures`` times per run. The replacement is set up like the lost worker and repeats its call.
The results of the other workers are kept. If a replacement is lost during its setup, it is also
replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import miniray
from miniray.core import session
from miniray.core.remote import ActorClass, ActorHandle, CallSpec
from miniray.counting import format_epoch
from miniray.errors import (
    GetTimeoutError,
    SessionEndedError,
    WorkerTimeoutError,
)
from miniray.train.workers.budget import Decision, FailureBudget, is_loss
from miniray.train.workers.errors import (
    ReplacementLostError,
    add_worker_context,
    report_replacement_loss,
)

#: Methods that every worker must have. Others, such as ``load_data_shard``, are optional.
REQUIRED_METHODS = ("train_epoch", "get_weights", "set_weights")

NO_WORKERS = "there are no workers before train(), and none after shutdown()"

#: Parameters of a worker's ``__init__`` that get its id.
_ID_NAMES = ("worker_id", "rank", "id")

_STOP_TIMEOUT_S = 5.0  # for calls of stopped actors to fail

Handle = ActorHandle[Any]


def filter_kwargs(
    parameters: inspect.Signature | None, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``kwargs`` that a function with this signature accepts."""
    if parameters is None:
        return dict(kwargs)
    kinds = {name: p.kind for name, p in parameters.parameters.items()}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return dict(kwargs)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {k: v for k, v in kwargs.items() if kinds.get(k) in named}


def create_worker_actor(cls: ActorClass[Any], worker_id: int, kwargs: Mapping[str, Any]) -> Handle:
    """Create a worker of this class with its id and the ``kwargs`` that its ``__init__`` accepts.

    The id is passed to the parameter named ``worker_id``, ``rank`` or ``id``, or else to the first
    parameter if that has no default. Parameters in ``kwargs`` keep the user's value.
    """
    signature = cls._spec.init.signature
    taken = filter_kwargs(signature, kwargs)
    if signature is None:  # written in C: it may accept anything
        return cls.remote(worker_id, **taken)
    parameters = signature.parameters.values()
    named = [p for p in parameters if p.name in _ID_NAMES and p.name not in kwargs]
    for p in named:
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            return cls.remote(**{p.name: worker_id}, **taken)
    first = next(iter(parameters), None)
    is_id = first is not None and (
        first.kind is first.VAR_POSITIONAL
        or (
            first.kind in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
            and first.default is first.empty
            and first.name not in kwargs
        )
    )
    return cls.remote(*((worker_id,) if is_id else ()), **taken)


def get_method_spec(worker: Handle, name: str) -> CallSpec | None:
    """Return the signature of a worker's method, or None if it has no method of that name."""
    return worker._info.methods.get(name)


def check_worker(worker: Any, worker_id: int, required: Sequence[str]) -> None:
    """Raise ``TypeError`` if ``worker`` isn't an actor with the required methods."""
    if not isinstance(worker, ActorHandle):
        raise TypeError(
            f"create_worker({worker_id}) must return an actor handle, such as "
            f"MyWorker.remote(...), not {worker!r}"
        )
    specs = {name: get_method_spec(worker, name) for name in required}
    missing = [name for name, spec in specs.items() if spec is None]
    if missing:
        raise TypeError(
            f"worker class {worker._info.class_name} lacks {', '.join(f'{m}()' for m in missing)}. "
            f"A worker needs {', '.join(f'{m}()' for m in required)}"
        )
    for name, spec in specs.items():
        if spec is not None and spec.is_generator:
            raise TypeError(f"{worker._info.class_name}.{name}() must return its result, not yield")


class WorkerSetup(Protocol):
    """Prepares workers for training: loads their data, sets their weights.

    A group calls its setups in order.
    """

    def start(self, group: WorkerGroup) -> None:
        """Prepare all workers of a new group, at the same time."""

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Prepare a replacement to continue in the place of the worker before it.

        It is also called if a worker is lost while ``start`` runs, of this setup or a different
        one. Call the replacement with ``group.set_up_call``.
        """


@dataclasses.dataclass(eq=False)
class WorkerGroup:
    """Workers that train independently of each other; see the module.

    Attributes:
        count: Number of workers.
        create: Creates the worker with the given id.
        setups: Prepare the workers, in this order.
        required: Methods that workers must have.
        budget: Decides whether a lost worker may be replaced.
        timeout: Limit in seconds for one call. None: no limit.
        on_event: Called with a dict for each failure and replacement.
        unit: Unit of epochs in errors: an epoch or a step.
        get_epochs: Returns the number of epochs at the end of the run, for errors.
        get_kwargs: Returns the keyword arguments of ``train()``.
    """

    count: int
    create: Callable[[int], Any]
    setups: Sequence[WorkerSetup]
    required: Sequence[str]
    budget: FailureBudget
    timeout: float | None
    on_event: Callable[[dict[str, Any]], None]
    unit: str = "epoch"
    get_epochs: Callable[[], int | None] = lambda: None
    get_kwargs: Callable[[], Mapping[str, Any]] = dict
    handles: list[Handle] = dataclasses.field(default_factory=list)
    #: Workers that were replaced, and aren't at the position of the others yet.
    replaced: set[int] = dataclasses.field(default_factory=set)

    def start(self) -> None:
        """Create all workers. They start at the same time."""
        for worker_id in range(self.count):
            worker = self.create(worker_id)
            check_worker(worker, worker_id, self.required)
            self.handles.append(worker)

    def set_up_all(self) -> None:
        """Prepare all workers after ``start``."""
        for setup in self.setups:
            setup.start(self)

    def has(self, method: str) -> bool:
        return get_method_spec(self.handles[0], method) is not None

    def call(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        epoch: int | None = None,
    ) -> list[Any]:
        """Call ``method`` on all workers at the same time, and return the results by worker id.

        Worker i gets ``arguments(i)``, and the ``kwargs`` that its method accepts. The first error
        is raised. The calls of the other workers continue until the caller stops them.
        """

        def submit(worker_id: int) -> Any:
            return self.submit(worker_id, method, *arguments(worker_id), **kwargs)

        count = len(self.handles)
        results = self.call_some(range(count), submit, method, epoch)
        return [results[worker_id] for worker_id in range(count)]

    def call_some(
        self,
        worker_ids: Iterable[int],
        submit: Callable[[int], Any],
        method: str,
        epoch: int | None = None,
    ) -> dict[int, Any]:
        """Call some workers like ``call``. ``submit(i)`` starts the call of worker i."""
        pending = {submit(i): i for i in worker_ids}
        started = dict.fromkeys(pending.values(), time.monotonic())
        results: dict[int, Any] = {}
        while pending:
            for ref in self.some_ready({ref: started[i] for ref, i in pending.items()}):
                worker_id = pending.pop(ref)
                try:
                    results[worker_id] = self.outcome(ref)
                except Exception as error:
                    self.recover(error, worker_id, method, epoch)
                    started[worker_id] = time.monotonic()
                    pending[submit(worker_id)] = worker_id
        return results

    def map(self, method: str, values: Mapping[int, Any]) -> dict[int, Any]:
        """Call ``method(value)`` on the workers that have a value, by worker id."""
        return self.call_some(values, lambda i: self.submit(i, method, values[i]), method)

    def submit(self, worker_id: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a worker with the ``kwargs`` that its method accepts, and return the ref."""
        worker = self.handles[worker_id]
        spec = get_method_spec(worker, method)
        taken = filter_kwargs(spec.signature if spec else None, kwargs)
        return getattr(worker, method).remote(*args, **taken)

    def ref_of(self, worker_id: int, method: str) -> Any:
        """Call a worker, wait, and return the ref. The worker is replaced like in ``call``."""
        while True:
            ref = self.submit(worker_id, method)
            try:
                miniray.get(ref, timeout=self.timeout)
                return ref
            except Exception as error:
                self.recover(error, worker_id, method, None)

    def set_up_call(self, worker_id: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a replacement while it is set up, and return the result.

        Refs in ``args`` must be ready: the crash of the actor that computes one would be taken for
        a crash of the worker.

        Raises:
            ReplacementLostError: The replacement was also lost.
        """
        ref = self.submit(worker_id, method, *args, **kwargs)
        with report_replacement_loss(method, worker_id):
            return miniray.get(ref, timeout=self.timeout)

    def some_ready(self, started: Mapping[Any, float]) -> list[Any]:
        """Wait, and return the refs that are ready or timed out. ``started`` maps refs to times."""
        refs = list(started)
        if self.timeout is None:
            return miniray.wait(refs)[0]
        limits = {ref: begun + self.timeout for ref, begun in started.items()}
        left = max(0.0, min(limits.values()) - time.monotonic())
        ready = miniray.wait(refs, timeout=left)[0]
        return ready or [ref for ref in refs if limits[ref] <= time.monotonic()]

    def outcome(self, ref: Any) -> Any:
        """Return the value of a ref from ``some_ready``. Raise ``GetTimeoutError`` if timed out."""
        return miniray.get(ref, timeout=0 if self.timeout else None)

    # -- failure ----------------------------------------------------------------------------------

    def recover(self, error: Exception, worker_id: int, method: str, epoch: int | None) -> None:
        """Replace the worker that raised ``error``, or raise the error with its context."""
        is_repairing, start = False, time.monotonic()
        failed = method
        while True:
            if not is_loss(error):
                raise self._add_context(error, worker_id, method, epoch) from error.__cause__
            if isinstance(error, GetTimeoutError):
                error = WorkerTimeoutError(f"gave no result in {self.timeout:g} s")
            decision = self.budget.decide(error, is_repairing=is_repairing)
            what = {"worker": worker_id, "epoch": epoch, "reason": str(error)}
            self.on_event({"event": "worker_failed", **what})
            if decision is Decision.RAISE:
                raise self._add_context(error, worker_id, method, epoch) from None
            try:
                self.replace(worker_id)
                break
            except ReplacementLostError as lost:
                error, method, is_repairing = lost.error, lost.method, True
        self.report_replacement(worker_id, error, failed, epoch, time.monotonic() - start)

    def report_replacement(
        self, worker_id: int, error: Exception, method: str, epoch: int | None, seconds: float
    ) -> None:
        """Record that a worker was replaced after ``error`` in a call of ``method``."""
        del method, seconds
        what = {"worker": worker_id, "epoch": epoch, "reason": str(error)}
        self.on_event({"event": "worker_replaced", **what})

    def _add_context(
        self, error: Exception, worker_id: int, method: str, epoch: int | None
    ) -> Exception:
        return add_worker_context(error, worker_id, method, epoch, self.unit, self.get_epochs())

    def format_epoch(self, epoch: int) -> str:
        """Return the position of an epoch in the run, such as ``epoch 2 of 3``."""
        return format_epoch(epoch, self.get_epochs(), self.unit)

    def replace(self, worker_id: int) -> None:
        """Stop a worker, create a new one in its place and set it up."""
        miniray.kill(self.handles[worker_id])
        self.replaced.add(worker_id)
        self.budget.settle()
        self.handles[worker_id] = self.create(worker_id)
        check_worker(self.handles[worker_id], worker_id, self.required)
        for setup in self.setups:
            setup.set_up(self, worker_id)

    def request_stop(self) -> None:
        """Do nothing: workers complete the calls that are running."""

    def stop(self) -> None:
        """Stop all workers."""
        for worker in self.handles:
            end(worker)
        self.handles.clear()


def end(actor: Handle) -> None:
    """Stop an actor, unless its engine was shut down."""
    if session.is_initialized() and session.engine() is actor._engine:
        with contextlib.suppress(SessionEndedError):  # in this moment, by another thread
            miniray.kill(actor)


def read_unanswered(refs: Iterable[Any]) -> None:
    """Read the results of calls of stopped actors.

    The engine would log the errors of calls whose results are dropped unread.
    """
    for ref in refs if miniray.is_initialized() else ():
        with contextlib.suppress(Exception):
            miniray.get(ref, timeout=_STOP_TIMEOUT_S)
