"""What runs in Ray's workers around the user's code.

A task runs as its function wrapped in ``guard``; an actor as a host class with one guarded method
for each of the user's. The host *has* the user's object and is not derived from its class: methods
that call each other do not pass through the guard, and exceptions between them stay the user's.

The host's methods carry the user's names and signatures, so Ray's logs and dashboard show them,
and every Ray handle, however it was come by, can say which methods its actor has.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from miniray.core import startup
from miniray.core.engine import drain
from miniray.core.specs import CallSpec, ClassSpec, FunctionSpec
from miniray.errors import TaskError

#: Stands in the text of Ray's error in front of the traceback when an actor's __init__ raised.
INIT_FAILED = "ActorInitError: "

_OWN = (__file__, startup.__file__)  # whose frames are none of the user's business
_USER_OBJECT = "the user's object"  # a key no attribute or method name can collide with


class ActorInitError(Exception):
    """Carries the formatted traceback only: Ray fails badly on one that cannot be unpickled."""


def guard(
    target: Callable[..., Any], call: CallSpec, enter: Callable[[], Any], *, in_actor: bool
) -> Callable[..., Any]:
    """``target`` with what it raises captured as ``TaskError`` where it is raised.

    ``enter`` runs first; it makes miniray's verbs work in the worker. The kind of function (async,
    generator) stays, as Ray goes by it, except that Ray has no async tasks: those get a loop here.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with _capturing(call, enter):
            result = target(*args, **kwargs)
            return asyncio.run(result) if call.is_async else result

    def run_generator(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _capturing(call, enter):
            items = target(*args, **kwargs)
            # Not "yield from": Ray sends values into the generator, which are not for the user's.
            for item in drain(items) if call.is_async else items:  # noqa: UP028
                yield item

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with _capturing(call, enter):
            return await target(*args, **kwargs)

    async def run_async_generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        with _capturing(call, enter):
            async for item in target(*args, **kwargs):
                yield item

    if call.is_async and in_actor:
        return run_async_generator if call.is_generator else run_async
    return run_generator if call.is_generator else run


@contextlib.contextmanager
def _capturing(call: CallSpec, enter: Callable[[], Any]) -> Iterator[None]:
    enter()
    try:
        yield
    except RayError:  # Ray's own control flow, such as an async actor's exit
        raise
    except Exception as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        raise TaskError.capture(error, call.name, worker_name(), os.getpid()) from None


def guard_function(spec: FunctionSpec, enter: Callable[[], Any]) -> Callable[..., Any]:
    """The body of a task, under the function's own name for Ray's logs and dashboard."""
    body = guard(spec.function, spec.call, enter, in_actor=False)
    functools.update_wrapper(body, spec.function, updated=())
    # Ray would look through to the function itself and take its kind (async) for the body's.
    del body.__wrapped__  # type: ignore[attr-defined]
    if spec.call.signature is not None:
        body.__signature__ = spec.call.signature  # type: ignore[attr-defined]
    return body


def _without_own_frames(tb: TracebackType | None) -> TracebackType | None:
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename in _OWN:
        tb = tb.tb_next
    return tb


def worker_name() -> str:
    """The actor's name, else its class; for a task the worker's id, shortened."""
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return f"worker-{context.get_worker_id()[:8]}"
    return context.get_actor_name() or str(_host_class_name or "actor")


_host_class_name: str | None = None  # of the one actor in this process


def host_class(spec: ClassSpec, enter: Callable[[], Any]) -> type:
    """A class for ``ray.remote`` whose instances hold one of the user's objects."""
    user_class, wrapper, name = spec.cls, spec.wrapper, spec.cls.__name__
    has_own_repr = inspect.getattr_static(user_class, "__repr__") is not object.__repr__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        enter()
        _start_actor(self, user_class, wrapper, args, kwargs)

    def __repr__(self: Any) -> str:  # noqa: N807
        # Ray puts this in front of every line the actor prints.
        if has_own_repr:
            return repr(self.__dict__.get(_USER_OBJECT, name))
        return worker_name()

    members: dict[str, Any] = {
        method: _host_method(method, call, enter) for method, call in spec.info.methods.items()
    }
    members.update(
        __init__=__init__,
        __repr__=__repr__,
        # Every actor of Ray has one, but Ray's client knows only what the class has.
        __ray_ready__=lambda self: True,
        __doc__=user_class.__doc__,
        __module__=user_class.__module__,
        __qualname__=user_class.__qualname__,
    )
    return type(name, (), members)


def _start_actor(host: Any, cls: type, wrapper: type | None, args: Any, kwargs: Any) -> None:
    global _host_class_name
    _host_class_name = cls.__name__
    try:
        host.__dict__[_USER_OBJECT] = startup.construct(cls, args, kwargs, wrapper)
    except Exception as error:
        error.__traceback__ = _without_own_frames(error.__traceback__)
        raise ActorInitError("".join(traceback.format_exception(error))) from None


def _host_method(name: str, call: CallSpec, enter: Callable[[], Any]) -> Callable[..., Any]:
    def forward(host: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(host.__dict__[_USER_OBJECT], name)(*args, **kwargs)

    method = guard(forward, call, enter, in_actor=True)
    method.__name__ = name
    method.__qualname__ = call.name
    if call.signature is not None:
        host = inspect.Parameter("_miniray_host", inspect.Parameter.POSITIONAL_ONLY)
        parameters = [host, *call.signature.parameters.values()]
        method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return ray.method(num_returns=call.num_returns)(method)  # type: ignore[no-any-return]
