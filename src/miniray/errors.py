"""Every exception a miniray user can meet, in one hierarchy.

``except MinirayError`` catches all of them. Those with a counterpart in the standard library are
also instances of it (``GetTimeoutError`` is a ``TimeoutError``), and an exception raised by remote
code is, at ``get``, also an instance of the user's own exception type.
"""

from __future__ import annotations

import traceback
from functools import lru_cache
from typing import Any

from miniray.carried import Carried, arriving, assembled, parts

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
    "SessionEndedError",
    "SyncError",
    "TaskCancelledError",
    "TaskError",
    "WeightsMismatchError",
    "WorkerCrashedError",
    "WorkerLostError",
    "WorkerTimeoutError",
]


class MinirayError(Exception):
    """Base of every error miniray raises on its own account."""


class EngineStartError(MinirayError, RuntimeError):
    """The engine could not be started; nothing was left running."""


class SessionEndedError(MinirayError, RuntimeError):
    """The session of this ref, handle or engine was shut down, or belongs to the forking parent."""


class CapabilityError(MinirayError, NotImplementedError):
    """The chosen engine cannot do what was asked. The message names engines that can."""


class NotSerializableError(MinirayError, TypeError):
    """A value cannot travel to another process.

    Raised at the call, before anything is sent. ``path`` leads to the offending attribute.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class GetTimeoutError(MinirayError, TimeoutError):
    """``get`` ran out of its time limit. The call itself goes on; ``get`` may be tried again."""


class ObjectStoreFullError(MinirayError, MemoryError):
    """Neither memory within ``object_store_memory`` nor disk for spilling is left."""


class ObjectLostError(MinirayError):
    """The process that owned the object is gone, and the value with it."""


class TaskCancelledError(MinirayError):
    """The call was cancelled with ``miniray.cancel`` before it produced a result."""


class ActorUnschedulableError(MinirayError):
    """The request exceeds what the machine (or cluster) has in total; waiting cannot help."""


class WorkerCrashedError(MinirayError):
    """The process running a task ended (exit code or signal named) and retries are used up."""


class ActorDiedError(MinirayError):
    """The actor's process is gone: it was killed, crashed, exited, or its ``__init__`` raised.

    The message names the exit code or signal and shows the last lines the process printed. Calls
    in flight at that moment may or may not have run. ``in_init``: it never came to be, for its
    ``__init__``, or what that was to be called with, raised.
    """

    def __init__(self, message: str, in_init: bool = False) -> None:
        super().__init__(message)
        self.in_init = in_init


class WorkerTimeoutError(MinirayError, TimeoutError):
    """A training worker gave no result within ``worker_timeout`` and was ended."""


class BarrierTimeoutError(MinirayError, TimeoutError):
    """A named barrier did not complete: ranks are missing, ended, or at another barrier.

    Raised on every rank that is at the barrier, and on one that comes late. ``missing`` are the
    ranks that did not come; the message shows where each of them is and what it did last.
    """

    def __init__(self, message: str, name: str = "", missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.name = name
        self.missing = missing


class BoxError(MinirayError):
    """A rank's black box is not there, damaged, or of another version. The message names it."""


class CheckpointError(MinirayError):
    """A checkpoint could not be written, or none can be read.

    A failed write leaves every earlier checkpoint as it was; ``__cause__`` is the system's error.
    The message names the file or the entry.
    """


class DataError(MinirayError, ValueError):
    """Data cannot be read or shared out as asked. The message names file and row group.

    Raised where the dataset is made if a look at the files' metadata can tell, else at the row.
    """


class RowError(DataError):
    """One row could not be read, filtered or transformed; ``__cause__`` is what was raised.

    ``file`` and ``row`` (within the file, from 0) say which.
    """

    def __init__(self, message: str, file: str = "", row: int = -1) -> None:
        super().__init__(message)
        self.file = file
        self.row = row


class GroupError(MinirayError, RuntimeError):
    """A process group could not be formed. The message names the ranks that are missing."""


class PeerLostError(MinirayError, RuntimeError):
    """A rank could not reach the others any more. A consequence: the cause is elsewhere."""


class HandlesError(MinirayError, ValueError):
    """A dataset holds something that a loader's worker process must not inherit. It is named."""


class RewardError(MinirayError):
    """The reward function raised, or gave no finite number. The message names row and worker."""


class RewardTimeoutError(RewardError, TimeoutError):
    """The reward function took longer than ``reward_timeout`` for one response."""


class NonFiniteError(MinirayError, ArithmeticError):
    """Log-probs, values or gradients hold NaN or infinity. The weights are those from before."""


class NoTokensError(MinirayError, ValueError):
    """A step has nothing to learn from: all prompts were left out, or all responses are empty."""


class WeightsMismatchError(MinirayError, ValueError):
    """Weights of one worker differ from the others' in structure, shape or type.

    The message names the worker and the entry. Nothing was combined.
    """


class NonFiniteWeightsError(MinirayError, ValueError):
    """A worker's weights hold NaN or infinity. The message names the worker and the entry.

    Nothing was combined. ``workers`` are the workers, as the server knows them.
    """

    def __init__(self, message: str, workers: tuple[Any, ...] = ()) -> None:
        super().__init__(message)
        self.workers = workers


class SyncError(MinirayError, RuntimeError):
    """A parameter sync did not complete: a worker raised, or its process is gone.

    The server's weights are those from before. ``workers`` are the indexes of the workers that
    failed; ``phase`` is "collect" (no worker was changed) or "distribute" (the workers that did not
    fail may have the new weights already).
    """

    def __init__(self, message: str, workers: tuple[int, ...] = (), phase: str = "") -> None:
        super().__init__(message)
        self.workers = workers
        self.phase = phase


class WorkerLostError(SyncError, ActorDiedError):
    """A parameter sync did not complete because the process of a worker is gone."""


class TaskError(MinirayError):
    """User code raised in another process.

    At ``get`` the exception is also an instance of the original type, so ``except ValueError``
    works; its attributes are reachable and the text shows the remote traceback.

    Attributes:
        cause: the original exception, or None where it could not be pickled.
        remote_traceback: the traceback as formatted where it was raised.
        function: what was called, as ``Class.method`` or a function's name.
        worker: name of the actor or pool worker; ``pid``: its process.
    """

    def __init__(
        self,
        function: str,
        worker: str,
        pid: int,
        remote_traceback: str,
        cause: BaseException | None = None,
    ) -> None:
        self.function = function
        self.worker = worker
        self.pid = pid
        self.remote_traceback = remote_traceback
        self.cause = cause
        super().__init__(function, worker, pid, remote_traceback, cause)

    def __str__(self) -> str:
        return (
            f"{self.function} failed in {self.worker} (pid {self.pid})\n\n"
            f"{self.remote_traceback.rstrip()}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        cause = None if self.cause is None else Carried(self.cause)
        plain = (self.function, self.worker, self.pid, self.remote_traceback, cause)
        return _rebuild_task_error, plain

    @classmethod
    def capture(cls, exc: BaseException, function: str, worker: str, pid: int) -> TaskError:
        """Make the error that travels back from ``exc``, which is being handled now.

        An error that already came from further away (an actor calling an actor) keeps its own
        traceback in front, so the reader sees the whole chain. Attributes of it that cannot be
        pickled are left out. Where its type cannot be either, there is no cause: the traceback text
        still carries type and message.
        """
        text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
        return cls(function, worker, pid, text, arriving(exc))

    def as_cause_type(self) -> TaskError:
        """This error as an instance of the user's exception type too, where that is possible."""
        cause = self.cause
        while isinstance(cause, TaskError):  # it came through a chain of calls
            cause = cause.cause
        if cause is None:
            return self
        dual = _dual_type(type(cause))  # type: ignore[arg-type]  # classes are hashable
        if dual is None:
            return self
        try:
            error: TaskError = assembled(dual, *parts(cause))
        except Exception:  # a type with an odd layout or descriptors: the text still says it all
            return self
        error.__dict__.update(self.__dict__)
        return error


def _rebuild_task_error(function: str, worker: str, pid: int, text: str, cause: Any) -> TaskError:
    if isinstance(cause, Carried):  # copied here, not pickled
        cause = cause.error
    return TaskError(function, worker, pid, text, cause).as_cause_type()


@lru_cache(maxsize=256)
def _dual_type(cause_type: type[BaseException]) -> type[TaskError] | None:
    """A class deriving from TaskError and ``cause_type``; None where Python cannot lay it out."""
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
