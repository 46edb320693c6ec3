"""All exceptions that miniray raises.

``except MinirayError`` catches all of them. Errors with a counterpart in the standard library also
derive from it (``GetTimeoutError`` is a ``TimeoutError``). An exception raised by remote code is
re-raised by ``get`` as an instance of both ``TaskError`` and the original type.
"""

from __future__ import annotations

import re
import traceback
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, ClassVar

from miniray import tracebacks
from miniray.exception_pickling import PickledException, get_parts, rebuild_exception, to_picklable

__all__ = [
    "ActorDiedError",
    "ActorUnschedulableError",
    "BarrierTimeoutError",
    "BoxError",
    "CapabilityError",
    "CheckpointError",
    "DataError",
    "EngineStartError",
    "GetTimeoutError",
    "GroupError",
    "HandlesError",
    "MinirayError",
    "NoTokensError",
    "NonFiniteError",
    "NonFiniteWeightsError",
    "NotSerializableError",
    "ObjectLostError",
    "ObjectStoreFullError",
    "PeerLostError",
    "RewardError",
    "RewardTimeoutError",
    "RowError",
    "RunLockedError",
    "SessionEndedError",
    "StrategyError",
    "SyncError",
    "TaskCancelledError",
    "TaskError",
    "WeightsMismatchError",
    "WorkerCrashedError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class MinirayError(Exception):
    """Base class of all miniray errors.

    The attributes contain the facts in the message, so that programs don't have to parse it.
    Attributes that don't apply are None. Pickling preserves all of them.

    Attributes:
        code: Stable identifier of the kind of error, such as ``"actor-died"``. Messages may change
            in any release, codes don't.
        worker: Index of the trainer's worker that failed.
        rank: Rank that failed.
        host: Host name of the process that failed, or its address on a Ray cluster.
        epoch: Epoch in which it failed, from 0.
        step: Number of completed optimizer steps.
        entry: Name of the weight, metric or file entry.
        exit_code: Exit status of the process.
        signal: Name of the signal that ended the process, such as ``"SIGKILL"``.
        pid: Process id.
        in_init: True if ``__init__`` of an actor raised, or its arguments couldn't be computed.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "code", "worker", "rank", "host", "epoch", "step", "entry", "exit_code", "signal", "pid",
        "in_init",
    )  # fmt: skip

    # Only annotations: a class attribute would hide one of the same name in the user's exception,
    # from which the class that ``get`` raises also derives.
    code: str
    worker: Any
    rank: int | None
    host: str | None
    epoch: int | None
    step: int | None
    entry: str | None
    exit_code: int | None
    signal: str | None
    pid: int | None
    in_init: bool | None

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.add_fields(**fields)

    def __getattr__(self, name: str) -> Any:
        # Called only if normal lookup fails.
        if name == "code":
            return _get_code(type(self))
        if name in MinirayError.FIELDS:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_fields(self, **fields: Any) -> None:
        """Set the fields that aren't None. Raise ``TypeError`` for unknown names."""
        for name, value in fields.items():
            if name not in self.FIELDS:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            if value is not None:
                setattr(self, name, value)


def _get_code(cls: type[MinirayError]) -> str:
    """Derive the code from the name of the first miniray class: ``ActorDiedError``, actor-died."""
    name = next(
        c.__name__ for c in cls.__mro__ if c.__module__ == __name__ and "(" not in c.__name__
    )
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removesuffix("Error")).lower()


class EngineStartError(MinirayError, RuntimeError):
    """The engine couldn't be started. No process was left running.

    Attributes:
        limit: Name of the limit that was reached, such as ``"RLIMIT_NOFILE"`` or ``"pids.max"``.
        limit_value: Value of that limit.
    """

    def __init__(
        self,
        message: str = "",
        limit: str | None = None,
        limit_value: int | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(message, **fields)
        self.limit = limit
        self.limit_value = limit_value


class SessionEndedError(MinirayError, RuntimeError):
    """The session of this ref, handle or engine was shut down, or belongs to the parent process."""


class CapabilityError(MinirayError, NotImplementedError):
    """The engine doesn't support the operation. The message names engines that do."""


class NotSerializableError(MinirayError, TypeError):
    """A value can't be pickled. Raised by the call, before anything is sent.

    Attributes:
        path: Path to the attribute that can't be pickled.
    """

    def __init__(self, message: str = "", path: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.path = path


class GetTimeoutError(MinirayError, TimeoutError):
    """``get`` timed out. The call is still running; call ``get`` again to keep waiting."""


class ObjectStoreFullError(MinirayError, MemoryError):
    """The object store reached ``object_store_memory``, and the disk is too full for spilling."""


class ObjectLostError(MinirayError):
    """The process that owned the object exited, so its value is lost."""


class TaskCancelledError(MinirayError):
    """The call was canceled with ``miniray.cancel`` before it returned."""


class ActorUnschedulableError(MinirayError):
    """The actor or task requests more resources than the machine or cluster has in total."""


class WorkerCrashedError(MinirayError):
    """The process that ran a task exited, and no retries are left.

    ``pid``, ``exit_code`` and ``signal`` describe the exit.
    """


class ActorDiedError(MinirayError):
    """The actor's process exited, was killed, or its ``__init__`` raised.

    The message ends with the last lines that the process printed. Calls that were running may
    or may not have completed. ``pid``, ``exit_code``, ``signal`` and ``in_init`` describe the exit.
    """


class WorkerTimeoutError(MinirayError, TimeoutError):
    """A worker returned no result within ``worker_timeout`` and was stopped."""


class BarrierTimeoutError(MinirayError, TimeoutError):
    """Not all ranks reached a named barrier in time.

    Raised on every rank at the barrier, and on ranks that arrive later. The message shows where
    each missing rank is and what it did last.

    Attributes:
        name: Name of the barrier.
        missing: Ranks that didn't arrive.
    """

    def __init__(
        self, message: str = "", name: str = "", missing: tuple[int, ...] = (), **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.name = name
        self.missing = missing


class BoxError(MinirayError):
    """A flight-recorder file is missing or damaged, or was written by a different version."""


class CheckpointError(MinirayError):
    """A checkpoint couldn't be written, or no intact checkpoint exists.

    A failed write leaves all earlier checkpoints intact. ``__cause__`` is the original error.
    ``entry`` names the file or the entry.
    """


class RunLockedError(MinirayError, RuntimeError):
    """A different process is writing to the run directory, or has continued the run.

    ``pid`` and ``host`` name it.
    """


class DataError(MinirayError, ValueError):
    """Data can't be read or sharded.

    Raised when the dataset is created if the file metadata reveals the problem, and otherwise when
    the row is read.

    Attributes:
        file: Path of the file, if one is the cause.
        row: Index of the row in the file, from 0, or -1 if unknown.
    """

    def __init__(self, message: str = "", file: str = "", row: int = -1, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.file = file
        self.row = row


class RowError(DataError):
    """A row couldn't be read, filtered or transformed. ``__cause__`` is the original error."""


class GroupError(MinirayError, RuntimeError):
    """The process group couldn't be formed. The message names the missing ranks."""


class PeerLostError(MinirayError, RuntimeError):
    """The connection to a different rank was lost. This is a consequence, not the cause."""


class HandlesError(MinirayError, ValueError):
    """A dataset holds an open handle that worker processes of a loader must not inherit."""


class RewardError(MinirayError):
    """The reward function raised, or returned a non-finite number. The message names the row."""


class RewardTimeoutError(RewardError, TimeoutError):
    """The reward function took longer than ``reward_timeout`` for one response."""


class NonFiniteError(MinirayError, ArithmeticError):
    """Log-probs, values or gradients contain NaN or Inf. The weights are unchanged.

    Raised on all workers if the sum of their gradients isn't finite.

    Attributes:
        workers: Indexes of the workers with NaN or Inf, empty if each loss is finite.
    """

    def __init__(self, message: str = "", workers: tuple[int, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.workers = workers


class NoTokensError(MinirayError, ValueError):
    """A step has no tokens to train on: all prompts were skipped or all responses are empty."""


class WeightsMismatchError(MinirayError, ValueError):
    """The weights of a worker differ from the others in structure, shape or dtype.

    ``worker`` and ``entry`` name the worker and the weight. No weights were combined.
    """


class NonFiniteWeightsError(MinirayError, ValueError):
    """The weights of a worker contain NaN or Inf. No weights were combined.

    Attributes:
        workers: Ids of the workers, as registered with the server.
    """

    def __init__(self, message: str = "", workers: tuple[Any, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.workers = workers


class StrategyError(MinirayError, RuntimeError):
    """The ``combine`` method of a strategy raised. The weights of the server are unchanged.

    ``__cause__`` is the original error. ``entry`` names the weight that was being combined, or the
    first one if several small weights are combined together.

    Attributes:
        strategy: Name of the strategy.
    """

    def __init__(self, message: str = "", strategy: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.strategy = strategy


class SyncError(MinirayError, RuntimeError):
    """A parameter sync failed because a worker raised or exited. Server weights are unchanged.

    ``worker``, ``host``, ``pid``, ``exit_code`` and ``signal`` describe the first worker that
    exited, or the first one that raised if none did. If ``get`` raises it as a ``TaskError``,
    ``pid`` is the process of the server, and ``cause.pid`` that of the worker.

    Attributes:
        workers: Indexes of the workers that failed.
        phase: ``"collect"`` if no worker was changed, or ``"distribute"`` if other workers may
            already have the new weights.
    """

    def __init__(
        self, message: str = "", workers: tuple[int, ...] = (), phase: str = "", **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.workers = workers
        self.phase = phase


class WorkerLostError(SyncError, ActorDiedError):
    """A parameter sync failed because the process of a worker exited."""


#: True while a TaskError is captured that may contain others: they keep all their frames.
_in_capture: ContextVar[bool] = ContextVar("miniray_in_capture", default=False)


class TaskError(MinirayError):
    """User code raised an exception in a different process.

    ``get`` raises it as an instance of the original type as well, so that ``except ValueError``
    works. The attributes of the original exception are available, and the message shows the remote
    traceback. In it, frames of miniray and of frameworks are hidden unless ``MINIRAY_DEBUG=1`` is
    set. Its last line names the rank or worker, and the file and line that raised.

    Attributes:
        cause: The original exception, or None if it couldn't be pickled.
        remote_traceback: Traceback of the remote process, as text.
        function: Name of the function or ``Class.method`` that was called.
        actor: Name of the actor or worker process.
        pid: Process id of the actor or worker process.
    """

    def __init__(
        self,
        function: str,
        actor: str,
        pid: int,
        remote_traceback: str,
        cause: BaseException | None = None,
    ) -> None:
        self.function = function
        self.actor = actor
        self.pid = pid
        self.remote_traceback = remote_traceback
        self.cause = cause
        Exception.__init__(self, function, actor, pid, remote_traceback, cause)

    def __str__(self) -> str:
        head = f"{self.function} failed in {self.actor} (pid {self.pid})"
        text = self.remote_traceback.rstrip()
        if _in_capture.get():
            return f"{head}\n\n{text}"
        shown = text if tracebacks.is_debug() else tracebacks.fold(text)
        location = tracebacks.find_location(text)
        last_line = f"\n{self._describe_place()}: {location}" if location else ""
        return f"{head}\n\n{shown}{last_line}"

    def _describe_place(self) -> str:
        """Return the rank or worker, or the process in which the original exception was raised."""
        names = (("rank", "Rank"), ("worker", "Worker"))
        fields = {name: vars(self).get(name) for name in ("rank", "worker", "epoch", "step")}
        place = next((f"{noun} {fields[n]}" for n, noun in names if fields[n] is not None), None)
        if place is None:
            inner = self
            while isinstance(inner.cause, TaskError):  # passed through a chain of calls
                inner = inner.cause
            return f"{inner.actor} (pid {inner.pid})"
        when = [f"{name} {fields[name]}" for name in ("epoch", "step") if fields[name] is not None]
        return ", ".join([place, *when])

    def __reduce__(self) -> tuple[Any, ...]:
        cause = None if self.cause is None else PickledException(self.cause)
        args = (self.function, self.actor, self.pid, self.remote_traceback, cause)
        fields = {name: vars(self)[name] for name in self.FIELDS if name in vars(self)}
        return _rebuild_task_error, (*args, fields)

    @classmethod
    def capture(cls, exc: BaseException, function: str, actor: str, pid: int) -> TaskError:
        """Create the error that reports ``exc``, the exception being handled, to the caller.

        If ``exc`` came from a third process, for example because an actor called another actor, its
        remote traceback comes first, so that the message shows the whole chain. Attributes that
        can't be pickled are dropped. If the type can't be pickled, ``cause`` is None, and the
        traceback still shows type and message.
        """
        token = _in_capture.set(True)
        try:
            text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        finally:
            _in_capture.reset(token)
        return cls(function, actor, pid, text, to_picklable(exc))

    def as_cause_type(self) -> TaskError:
        """Return this error as an instance of the original exception type too, if possible."""
        cause = self.cause
        while isinstance(cause, TaskError):  # passed through a chain of calls
            cause = cause.cause
        if cause is None:
            return self
        dual = _get_dual_type(type(cause))  # type: ignore[arg-type]  # classes are hashable
        if dual is None:
            return self
        try:
            error: TaskError = rebuild_exception(dual, *get_parts(cause))
        except Exception:  # unusual layout or descriptors; the text still shows everything
            return self
        error.__dict__.update(self.__dict__)
        return error


def _rebuild_task_error(
    function: str, actor: str, pid: int, text: str, cause: Any, fields: dict[str, Any]
) -> TaskError:
    if isinstance(cause, PickledException):  # copied in this process, not pickled
        cause = cause.error
    error = TaskError(function, actor, pid, text, cause).as_cause_type()
    error.add_fields(**fields)
    return error


@lru_cache(maxsize=256)
def _get_dual_type(cause_type: type[BaseException]) -> type[TaskError] | None:
    """Return a class derived from TaskError and ``cause_type``, or None if that isn't possible."""
    if issubclass(cause_type, TaskError):
        return None
    try:
        return type(
            f"TaskError({cause_type.__name__})",
            (TaskError, cause_type),
            {"__str__": TaskError.__str__, "__module__": TaskError.__module__},
        )
    except TypeError:
        return None
