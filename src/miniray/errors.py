"""All exceptions that miniray raises.

``except MinirayError`` catches all of them. If the standard library has a similar exception, the
error also derives from that class. For example, ``GetTimeoutError`` is also a ``TimeoutError``.
When remote code raises an exception, ``get`` raises an error that is an instance of both
``TaskError`` and the original type.
"""

from __future__ import annotations

import re
import traceback
from contextvars import ContextVar
from functools import lru_cache
from types import FrameType
from typing import Any, ClassVar

from miniray import tracebacks
from miniray.counting import format_epoch
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
    "WeightsDivergedError",
    "WeightsMismatchError",
    "WorkerCrashedError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class MinirayError(Exception):
    """Base class of all miniray errors.

    The attributes contain the same facts as the message, so programs don't have to parse the
    message. An attribute that doesn't apply to an error is None. Pickling preserves all attributes.

    Attributes:
        code: Stable identifier of the type of error, such as ``"actor-died"``. The wording of
            messages may change in any release, but codes don't change.
        worker: Index of the worker that failed.
        rank: Rank of the process that failed.
        host: Host name of the process that failed, or its address on a Ray cluster.
        epoch: Epoch in which the error occurred. The first epoch is 0.
        step: Number of optimizer steps that were completed before the error.
        entry: Name of the weight, metric or file entry that caused the error.
        exit_code: Exit status of the process.
        signal: Name of the signal that terminated the process, such as ``"SIGKILL"``.
        pid: Process ID.
        in_init: True if the ``__init__`` method of an actor raised, or if its arguments couldn't be
            computed.
    """

    FIELDS: ClassVar[tuple[str, ...]] = (
        "code", "worker", "rank", "host", "epoch", "step", "entry", "exit_code", "signal", "pid",
        "in_init",
    )  # fmt: skip

    # These are annotations without values. The class that ``get`` raises also derives from the type
    # of the user's exception, and a class attribute here would hide an attribute of the same name
    # there.
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
        # Python calls this method only if the normal attribute lookup fails.
        if name == "code":
            return _get_code(type(self))
        if name in MinirayError.FIELDS:
            return None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_fields(self, **fields: Any) -> None:
        """Set all fields whose value isn't None. Raise ``TypeError`` if a field is unknown."""
        for name, value in fields.items():
            if name not in self.FIELDS:
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            if value is not None:
                setattr(self, name, value)


def _get_code(cls: type[MinirayError]) -> str:
    """Derive the code from the class name: ``ActorDiedError`` has the code ``actor-died``.

    A class that is defined elsewhere has the code of its closest base class in this module.
    """
    name = next(
        c.__name__ for c in cls.__mro__ if c.__module__ == __name__ and "(" not in c.__name__
    )
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removesuffix("Error")).lower()


class EngineStartError(MinirayError, RuntimeError):
    """The engine couldn't be started, and all of its processes were stopped.

    Attributes:
        limit: Name of the limit that was reached, such as ``"RLIMIT_NOFILE"`` or ``"pids.max"``.
        limit_value: Value of the limit.
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
    """The session of a ref, a handle or an engine has ended or belongs to the parent process."""


class CapabilityError(MinirayError, NotImplementedError):
    """The engine doesn't support the operation. The message lists the engines that support it."""


class NotSerializableError(MinirayError, TypeError):
    """A value can't be pickled. The call raises this error before it sends any data.

    Attributes:
        path: Path to the attribute that can't be pickled.
    """

    def __init__(self, message: str = "", path: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.path = path


class GetTimeoutError(MinirayError, TimeoutError):
    """``get`` timed out, but the remote call is still running.

    To continue waiting for the result, call ``get`` again.
    """


class ObjectStoreFullError(MinirayError, MemoryError):
    """The object store is full, and there isn't enough disk space to spill objects to disk.

    ``object_store_memory`` limits the size of the object store.
    """


class ObjectLostError(MinirayError):
    """The value of an object was lost because the process that owned the object exited."""


class TaskCancelledError(MinirayError):
    """The call was canceled with ``miniray.cancel`` before it returned."""


class ActorUnschedulableError(MinirayError):
    """The actor or task requests more resources than the machine or cluster has in total."""


class WorkerCrashedError(MinirayError):
    """The process that was running a task exited, and the task has no retries left.

    ``pid``, ``exit_code`` and ``signal`` describe how the process exited.
    """


class ActorDiedError(MinirayError):
    """An actor's process exited or was killed, or its ``__init__`` method raised an exception.

    The message ends with the last lines that the process printed. Calls that were running at that
    time may or may not have completed. ``pid``, ``exit_code``, ``signal`` and ``in_init`` describe
    how the process exited.
    """


class WorkerTimeoutError(MinirayError, TimeoutError):
    """A worker was stopped because it didn't return a result within ``worker_timeout``."""


class BarrierTimeoutError(MinirayError, TimeoutError):
    """Not all ranks reached a named barrier in time.

    The error is raised on every rank that waits at the barrier, and on ranks that arrive later. For
    each missing rank, the message shows its current location and its last operation.

    Attributes:
        name: Name of the barrier.
        missing: Ranks that didn't reach the barrier.
    """

    def __init__(
        self, message: str = "", name: str = "", missing: tuple[int, ...] = (), **fields: Any
    ) -> None:
        super().__init__(message, **fields)
        self.name = name
        self.missing = missing


class BoxError(MinirayError):
    """A flight-recorder file is missing, is damaged, or was written by a different version."""


class CheckpointError(MinirayError):
    """A checkpoint couldn't be written, or no intact checkpoint exists.

    If a checkpoint can't be written, all earlier checkpoints remain intact. ``__cause__`` is the
    original error, and ``entry`` is the name of the file or of the entry in the file.
    """


class RunLockedError(MinirayError, RuntimeError):
    """A different process is writing to the run directory, or has already resumed the run.

    ``pid`` and ``host`` identify that process.
    """


class DataError(MinirayError, ValueError):
    """Data can't be read or sharded.

    If the file metadata reveals the problem, the error is raised when the dataset is created.
    Otherwise, the error is raised when the affected row is read.

    Attributes:
        file: Path of the file that caused the error, or ``""`` if no single file caused it.
        row: Index of the row in the file, starting at 0, or -1 if the row is unknown.
    """

    def __init__(self, message: str = "", file: str = "", row: int = -1, **fields: Any) -> None:
        super().__init__(message, **fields)
        self.file = file
        self.row = row


class RowError(DataError):
    """A row couldn't be read, filtered or transformed. ``__cause__`` is the original error."""


class GroupError(MinirayError, RuntimeError):
    """The process group couldn't be created. The message lists the missing ranks."""


class PeerLostError(MinirayError, RuntimeError):
    """The connection to a different rank was lost.

    This error is a consequence of a failure on the other rank, and not the original cause.
    """


class HandlesError(MinirayError, ValueError):
    """A dataset has an open handle that the worker processes of a data loader must not inherit."""


class RewardError(MinirayError):
    """The reward function raised an exception or returned a number that isn't finite.

    The message identifies the row.
    """


class RewardTimeoutError(RewardError, TimeoutError):
    """The reward function took longer than ``reward_timeout`` to score a response."""


class NonFiniteError(MinirayError, ArithmeticError):
    """Log probabilities, values or gradients contain NaN or Inf. The weights weren't changed.

    If the sum of the workers' gradients isn't finite, all workers raise this error.

    Attributes:
        workers: Indices of the workers whose loss is NaN or Inf. The tuple is empty if the loss of
            every worker is finite.
    """

    def __init__(self, message: str = "", workers: tuple[int, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.workers = workers


class NoTokensError(MinirayError, ValueError):
    """A training step has no tokens to train on.

    Either all prompts were skipped, or all responses are empty.
    """


class WeightsMismatchError(MinirayError, ValueError):
    """The weights of a worker differ in structure, shape or dtype from those of other workers.

    ``worker`` is the index of the worker, and ``entry`` is the name of the weight. No weights were
    combined.
    """


class WeightsDivergedError(MinirayError, RuntimeError):
    """Ranks that hold the same weights have different ones. No checkpoint was written.

    ``rank`` differs from most other ranks, or from rank 0 if there are two. ``entry`` is the name
    of its first parameter that differs, and ``step`` is the number of completed steps.
    """


class NonFiniteWeightsError(MinirayError, ValueError):
    """The weights of a worker contain NaN or Inf. No weights were combined.

    Attributes:
        workers: IDs under which the workers are registered with the server.
    """

    def __init__(self, message: str = "", workers: tuple[Any, ...] = (), **fields: Any) -> None:
        super().__init__(message, **fields)
        self.workers = workers


class StrategyError(MinirayError, RuntimeError):
    """The ``combine`` method of a strategy raised. The weights on the server weren't changed.

    ``__cause__`` is the original error. ``entry`` is the name of the weight that was being
    combined. If several small weights are combined together, ``entry`` is the name of the first
    one.

    Attributes:
        strategy: Name of the strategy.
    """

    def __init__(self, message: str = "", strategy: str = "", **fields: Any) -> None:
        super().__init__(message, **fields)
        self.strategy = strategy


class SyncError(MinirayError, RuntimeError):
    """A parameter sync failed because a worker raised an exception or exited.

    The weights on the server weren't changed. ``worker``, ``host``, ``pid``, ``exit_code`` and
    ``signal`` describe the first worker that exited. If no worker exited, these attributes describe
    the first worker that raised an exception. If ``get`` raises this error as a ``TaskError``,
    ``pid`` is the process ID of the server and ``cause.pid`` is the process ID of the worker.

    Attributes:
        workers: Indices of the workers that failed.
        phase: ``"collect"`` if the weights of all workers are unchanged, or ``"distribute"`` if
            some workers may already have received the new weights.
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

    The error that ``get`` raises is also an instance of the original type, so statements such as
    ``except ValueError`` work. The error has the attributes of the original exception, and its
    message contains the remote traceback. In it, frames of miniray and of frameworks are hidden
    unless ``MINIRAY_DEBUG=1`` is set. The last line of the message names the rank or worker, and
    the file and line that raised the exception.

    Attributes:
        cause: The original exception, or None if the exception couldn't be pickled.
        remote_traceback: Traceback of the remote process, as text.
        function: Name of the function that was called, or ``Class.method`` for a method.
        actor: Name of the actor or worker process.
        pid: Process ID of the actor or worker process.
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
        epoch, step = fields["epoch"], fields["step"]
        parts = [place] if epoch is None else [place, format_epoch(epoch)]
        return ", ".join(parts if step is None else [*parts, f"step {step}"])

    def __reduce__(self) -> tuple[Any, ...]:
        cause = None if self.cause is None else PickledException(self.cause)
        args = (self.function, self.actor, self.pid, self.remote_traceback, cause)
        fields = {name: vars(self)[name] for name in self.FIELDS if name in vars(self)}
        return _rebuild_task_error, (*args, fields)

    @classmethod
    def capture(cls, exc: BaseException, function: str, actor: str, pid: int) -> TaskError:
        """Create an error that reports ``exc``, the exception being handled, to the caller.

        If ``exc`` was raised in a third process, for example because an actor called another actor,
        the remote traceback of ``exc`` comes first, so that the message shows the whole chain of
        calls. Attributes that can't be pickled are dropped. If the type of ``exc`` can't be
        pickled, ``cause`` is None, but the traceback still shows the type and the message.

        If ``function`` is a method of a wrapper around the user's object, the error names the
        innermost method of that object that was called.
        """
        token = _in_capture.set(True)
        try:
            text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        finally:
            _in_capture.reset(token)
        return cls(_name_user_method(function, exc), actor, pid, text, to_picklable(exc))

    def as_cause_type(self) -> TaskError:
        """Return an error that is also an instance of the type of the original exception.

        If such an error can't be created, return this error unchanged.
        """
        cause = self.cause
        while isinstance(cause, TaskError):  # the exception passed through a chain of calls
            cause = cause.cause
        if cause is None:
            return self
        dual = _get_dual_type(type(cause))  # type: ignore[arg-type]  # classes are hashable
        if dual is None:
            return self
        try:
            error: TaskError = rebuild_exception(dual, *get_parts(cause))
        except Exception:  # unusual memory layout or descriptors; the text still shows everything
            return self
        error.__dict__.update(self.__dict__)
        return error


def _name_user_method(function: str, exc: BaseException) -> str:
    """Return ``Class.method`` of the user's innermost method if a wrapper called it.

    Return ``function`` if the user's object, which is of the class in ``function``, was called
    directly, or not at all.
    """
    owner, _, called = function.rpartition(".")
    methods = [
        frame.f_code.co_name
        for frame, _ in traceback.walk_tb(exc.__traceback__)
        if _is_method_of(owner, frame)
    ]
    return f"{owner}.{methods[-1]}" if methods and methods[0] != called else function


def _is_method_of(class_name: str, frame: FrameType) -> bool:
    code = frame.f_code
    if not code.co_argcount or tracebacks.find_library(code.co_filename) == "miniray":
        return False
    return type(frame.f_locals.get(code.co_varnames[0])).__name__ == class_name


def _rebuild_task_error(
    function: str, actor: str, pid: int, text: str, cause: Any, fields: dict[str, Any]
) -> TaskError:
    if isinstance(cause, PickledException):  # the error was copied without being pickled
        cause = cause.error
    error = TaskError(function, actor, pid, text, cause).as_cause_type()
    error.add_fields(**fields)
    return error


@lru_cache(maxsize=256)
def _get_dual_type(cause_type: type[BaseException]) -> type[TaskError] | None:
    """Return a class that derives from both ``TaskError`` and ``cause_type``.

    Return None if Python can't create such a class.
    """
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
