"""Ray's exceptions as miniray's."""

from __future__ import annotations

import re

from ray import exceptions as ray_errors

from miniray import errors
from miniray.core.ray.host import INIT_FAILED

#: First match wins, so subclasses stand before their bases.
_TABLE: tuple[tuple[type[Exception], type[errors.MinirayError]], ...] = (
    (ray_errors.GetTimeoutError, errors.GetTimeoutError),
    (ray_errors.TaskCancelledError, errors.TaskCancelledError),
    (ray_errors.RayActorError, errors.ActorDiedError),
    (ray_errors.ActorUnschedulableError, errors.ActorUnschedulableError),
    (ray_errors.TaskUnschedulableError, errors.ActorUnschedulableError),
    (ray_errors.WorkerCrashedError, errors.WorkerCrashedError),
    (ray_errors.OutOfMemoryError, errors.WorkerCrashedError),
    (ray_errors.NodeDiedError, errors.WorkerCrashedError),
    (ray_errors.LocalRayletDiedError, errors.WorkerCrashedError),
    (ray_errors.ObjectStoreFullError, errors.ObjectStoreFullError),
    (ray_errors.OutOfDiskError, errors.ObjectStoreFullError),
    (ray_errors.ObjectLostError, errors.ObjectLostError),
)


def translate(error: Exception) -> Exception:
    """The miniray error for one that Ray raised; other exceptions unchanged."""
    if isinstance(error, ray_errors.RayTaskError):
        return _task_error(error)
    if not isinstance(error, ray_errors.RayError):
        return error
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ray_errors.RayActorError) and INIT_FAILED in text:
        # Between Ray's own preamble and the end is the traceback as the worker formatted it.
        raised = text.partition(INIT_FAILED)[2].strip()
        return errors.ActorDiedError(f"the actor's __init__ raised: {raised}", in_init=True)
    if isinstance(error, ValueError):  # a name that is taken
        return ValueError(text)
    for ray_type, own_type in _TABLE:
        if isinstance(error, ray_type):
            return own_type(text)
    return errors.MinirayError(f"{type(error).__name__}: {text}")


def _task_error(error: ray_errors.RayTaskError) -> Exception:
    """What user code raised, as ``host.guard`` captured it in the worker.

    A call that failed because a ref among its arguments failed carries that error as its cause.
    """
    cause = error.cause
    while isinstance(cause, ray_errors.RayTaskError):
        error, cause = cause, cause.cause
    if isinstance(cause, errors.TaskError):
        return cause.as_cause_type()
    if isinstance(cause, ray_errors.RayError) and type(cause) is not ray_errors.RayError:
        return translate(cause)
    # Raised around user code and not by it: a return value that cannot be pickled, or an actor
    # that plain Ray code created. What `ray.get` raises has kept only the text and the cause.
    text = str(error)
    function, pid = _PROCESS.search(text), _PID.search(text)
    return errors.TaskError(
        function=function[1] if function else "the call",
        worker="a Ray worker",
        pid=int(pid[1]) if pid else 0,
        remote_traceback=text,
        cause=cause if type(cause) is not ray_errors.RayError else None,
    ).as_cause_type()


_PROCESS = re.compile(r"ray::([\w.<>]+)")
_PID = re.compile(r"\(pid=(\d+)")
