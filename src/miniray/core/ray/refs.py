"""miniray's refs, generators, handles and errors over Ray's.

Pickling one of the first three pickles the Ray object inside, so Ray's reference counting sees it;
unpickling attaches the process to the running Ray, so that what arrives can be used at once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import re
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import ray

from miniray import errors
from miniray.core.engine import Engine
from miniray.core.ray.host import INIT_FAILED
from miniray.core.refs import ActorHandle, ObjectRef, ObjectRefGenerator
from miniray.core.specs import ActorInfo, CallSpec

T = TypeVar("T")


#: First match wins, so subclasses stand before their bases.
_TABLE: tuple[tuple[type[Exception], type[errors.MinirayError]], ...] = (
    (ray.exceptions.GetTimeoutError, errors.GetTimeoutError),
    (ray.exceptions.TaskCancelledError, errors.TaskCancelledError),
    (ray.exceptions.ActorUnschedulableError, errors.ActorUnschedulableError),
    (ray.exceptions.TaskUnschedulableError, errors.ActorUnschedulableError),
    (ray.exceptions.WorkerCrashedError, errors.WorkerCrashedError),
    (ray.exceptions.OutOfMemoryError, errors.WorkerCrashedError),
    (ray.exceptions.NodeDiedError, errors.WorkerCrashedError),
    (ray.exceptions.LocalRayletDiedError, errors.WorkerCrashedError),
    (ray.exceptions.ObjectStoreFullError, errors.ObjectStoreFullError),
    (ray.exceptions.OutOfDiskError, errors.ObjectStoreFullError),
    (ray.exceptions.ObjectLostError, errors.ObjectLostError),
)
_PROCESS = re.compile(r"ray::([\w.<>]+)")
# Ray's exceptions have no attributes for these. An error in user code shows "(pid=1, ip=192.0.2.1",
# the end of an actor has them on separate lines.
_PID = re.compile(r"(?:\(pid=|^\tpid: )(\d+)", re.MULTILINE)
_ADDRESS = re.compile(r"(?:, ip=|^\tip: )([^\s,)]+)", re.MULTILINE)
_EXIT_CODE = re.compile(r"Worker exits with an exit code (\d+)")


class RayRef(ObjectRef[T]):
    """An ObjectRef around ``ray.ObjectRef``."""

    __slots__ = ("_ray_engine", "ray_ref")

    def __init__(self, engine: Engine, ray_ref: Any) -> None:
        self._ray_engine = engine
        self.ray_ref = ray_ref

    @property
    def _engine(self) -> Engine:
        return self._ray_engine

    @property
    def _id(self) -> bytes:
        return self.ray_ref.binary()  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        from miniray.core.ray.engine import load_ref

        return load_ref, (self.ray_ref,)

    def future(self) -> concurrent.futures.Future[T]:
        # Not the inherited way, a ``get`` in the callback: that runs in Ray's I/O thread, which
        # the ``get`` would wait for.
        own: concurrent.futures.Future[T] = concurrent.futures.Future()

        def finish(ray_future: concurrent.futures.Future[Any]) -> None:
            if not own.set_running_or_notify_cancel():
                return
            error = ray_future.exception()
            if error is None:
                own.set_result(ray_future.result())
            else:
                own.set_exception(translate(error) if isinstance(error, Exception) else error)

        self.ray_ref.future().add_done_callback(finish)
        return own

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self.future()).__await__()


class RayStream(ObjectRefGenerator):
    """The refs of a streaming call, around ``ray.ObjectRefGenerator``."""

    def __init__(self, engine: Engine, ray_generator: Any) -> None:
        self._engine = engine
        self.ray_generator = ray_generator

    def __next__(self) -> ObjectRef[Any]:
        try:
            return RayRef(self._engine, next(self.ray_generator))
        except ray.exceptions.RayError as error:
            raise translate(error) from None

    async def __anext__(self) -> ObjectRef[Any]:
        try:
            return RayRef(self._engine, await anext(self.ray_generator))
        except ray.exceptions.RayError as error:
            raise translate(error) from None


def wrap(engine: Engine, result: Any) -> Any:
    """What a Ray call returned, as what the Engine contract promises."""
    if result is None:
        return None
    if isinstance(result, list):
        return [RayRef(engine, ref) for ref in result]
    if hasattr(result, "__next__"):
        return RayStream(engine, result)
    return RayRef(engine, result)


def unwrap_refs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with top-level refs as Ray's, which it replaces by their values; nested stay."""
    return (
        [value.ray_ref if isinstance(value, RayRef) else value for value in args],
        {
            key: value.ray_ref if isinstance(value, RayRef) else value
            for key, value in kwargs.items()
        },
    )


def ray_refs_of(engine: Engine, refs: Sequence[ObjectRef[Any]]) -> list[Any]:
    """The Ray refs inside; ``SessionEndedError`` for one that is not of ``engine``."""
    for ref in refs:
        if not isinstance(ref, RayRef) or ref._engine is not engine:
            raise errors.SessionEndedError(f"{ref!r} belongs to another session, which has ended")
    return [ref.ray_ref for ref in refs]  # type: ignore[attr-defined]


def first_error(ray_refs: list[Any]) -> ray.exceptions.RayError | None:
    """The first error in list order among those known by now.

    Ray raises as soon as any of the refs has failed, which is right (the others may be waiting for
    the one that failed), but not the same one each time where several have.
    """
    if len(ray_refs) == 1:
        return None
    ready, _ = ray.wait(ray_refs, num_returns=len(ray_refs), timeout=0, fetch_local=False)
    for ray_ref in ready:
        try:
            ray.get(ray_ref, timeout=1)
        except ray.exceptions.RayError as error:
            return None if isinstance(error, ray.exceptions.GetTimeoutError) else error
    return None


def wrap_handle(engine: Engine, ray_handle: Any, info: ActorInfo | None = None) -> ActorHandle[Any]:
    """A handle around Ray's; what its actor can do is read off the Ray handle where not given."""
    return ActorHandle(engine, ray_handle, ray_handle._actor_id.hex(), info or _info_of(ray_handle))


_infos: dict[Any, ActorInfo] = {}  # by Ray's descriptor of the class: there are not many


def _info_of(handle: Any) -> ActorInfo:
    if not isinstance(handle, ray.actor.ActorHandle):  # a handle of Ray's client, for ray://
        return _make_info(
            "actor",
            {
                name: list(handle._method_signatures[name].parameters.values())
                for name in dir(handle)
            },
            handle._method_num_returns,
            {},
        )
    descriptor = handle._ray_actor_creation_function_descriptor
    info = _infos.get(descriptor)
    if info is None:
        info = _infos[descriptor] = _make_info(
            descriptor.class_name.rpartition(".")[2],
            handle._ray_method_signatures,
            handle._ray_method_num_returns,
            handle._ray_method_is_generator,
        )
    return info


def _make_info(
    class_name: str,
    signatures: dict[str, list[inspect.Parameter]],
    num_returns: dict[str, int | str | None],
    generators: dict[str, bool],
) -> ActorInfo:
    methods = {}
    for name, parameters in signatures.items():
        if name.startswith("__") and name != "__call__":
            continue
        methods[name] = CallSpec.made(
            f"{class_name}.{name}",
            inspect.Signature(parameters),
            bool(generators.get(name)),
            False,  # async or not matters only where the class itself is at hand
            num_returns.get(name),
        )
    return ActorInfo(class_name, methods)


def translate(error: Exception) -> Exception:
    """The miniray error for one that Ray raised; other exceptions unchanged."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return _task_error(error)
    if not isinstance(error, ray.exceptions.RayError):
        return error
    text = str(error).strip() or type(error).__name__
    if isinstance(error, ray.exceptions.RayActorError):
        return _create_death_error(error, text)
    if isinstance(error, ValueError):  # a name that is taken
        return ValueError(text)
    for ray_type, own_type in _TABLE:
        if isinstance(error, ray_type):
            return own_type(text)
    return errors.MinirayError(f"{type(error).__name__}: {text}")


def _create_death_error(error: ray.exceptions.RayActorError, text: str) -> errors.ActorDiedError:
    """Return the error for an actor that died or can't be reached.

    Ray doesn't know the signal that ended a process, and the exit code only if Python exited.
    """
    pid, address = _PID.search(text), _ADDRESS.search(text)
    in_init = bool(error.actor_init_failed)
    exit_code = None if in_init else _EXIT_CODE.search(text)
    if in_init and INIT_FAILED in text:
        # The traceback as the worker formatted it follows Ray's own preamble.
        text = f"the actor's __init__ raised: {text.partition(INIT_FAILED)[2].strip()}"
    return errors.ActorDiedError(
        text,
        pid=int(pid[1]) if pid else None,
        host=address[1] if address else None,
        exit_code=int(exit_code[1]) if exit_code else None,
        in_init=in_init,
    )


def _task_error(error: ray.exceptions.RayTaskError) -> Exception:
    """What user code raised, as ``host.guard`` captured it in the worker.

    A call that failed because a ref among its arguments failed carries that error as its cause.
    """
    cause = error.cause
    while isinstance(cause, ray.exceptions.RayTaskError):
        error, cause = cause, cause.cause
    if isinstance(cause, errors.TaskError):
        return cause.as_cause_type()
    if isinstance(cause, ray.exceptions.RayError) and type(cause) is not ray.exceptions.RayError:
        return translate(cause)
    # Raised around user code and not by it: a return value that cannot be pickled, or an actor
    # that plain Ray code created. What `ray.get` raises has kept only the text and the cause.
    text = str(error)
    function, pid = _PROCESS.search(text), _PID.search(text)
    return errors.TaskError(
        function=function[1] if function else "the call",
        actor="a Ray worker",
        pid=int(pid[1]) if pid else 0,
        remote_traceback=text,
        cause=cause if type(cause) is not ray.exceptions.RayError else None,
    ).as_cause_type()
