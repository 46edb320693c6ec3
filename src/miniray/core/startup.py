"""Prepare an actor's process before the user's object is created.

Both parts are environment variables, so they work the same on every engine:

- A seed for ``random``, NumPy and torch, even if the worker imports these late.
- A set-up function (``"module:function"``), called before the object is created. If it returns a
  function, that is called with the object. Packages above the core use it to record their workers.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miniray.core.specs import get_methods
from miniray.import_hooks import when_imported

SEED = "MINIRAY_SEED"
#: Not the workers' own but one for the whole run; every process of it has it in its environment.
RUN_SEED = "MINIRAY_RUN_SEED"
SET_UP = "MINIRAY_SET_UP"
#: Starts each line of the process's output in the driver, in place of name and process id. The
#: process may have written it already.
LABEL = "MINIRAY_OUTPUT_LABEL"
#: Modules, space between them, that the local engine loads once for all workers, before it forks.
PRELOAD = "MINIRAY_PRELOAD"
#: A static method of a wrapper, called with the user's object before that object's ``__init__``.
BEFORE_INIT = "__before_init__"

_own_run_seed = False  # whether the run's seed in the environment is this session's
_env: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("env", default=None)
_wrapper: contextvars.ContextVar[type | None] = contextvars.ContextVar("wrapper", default=None)


@contextlib.contextmanager
def actors_with(
    seed: int | None = None,
    env: Mapping[str, str] | None = None,
    wrapper: type | None = None,
) -> Iterator[None]:
    """Create actors inside with this seed, these environment variables and this wrapper.

    The wrapper is used as by ``ActorClass.wrap_with``. Actors whose class has one keep it.
    """
    own = dict(env or {})
    if seed is not None:
        own[SEED] = str(seed)
    env_token, wrapper_token = _env.set(own or None), _wrapper.set(wrapper)
    try:
        yield
    finally:
        _env.reset(env_token)
        _wrapper.reset(wrapper_token)


def environment() -> dict[str, str] | None:
    """What an actor created here and now gets on top of its own environment variables."""
    return _env.get()


def current_wrapper() -> type | None:
    """Return the wrapper for actors that are created here and now."""
    return _wrapper.get()


def set_run_seed() -> None:
    """One random number that all processes of the session know, unless there is one already.

    Whatever must be random and yet the same everywhere (which rows a run takes) goes by it.
    """
    global _own_run_seed
    if RUN_SEED not in os.environ:
        os.environ[RUN_SEED] = str(secrets.randbits(63))
        _own_run_seed = True


def unset_run_seed() -> None:
    global _own_run_seed
    if _own_run_seed:
        os.environ.pop(RUN_SEED, None)
        _own_run_seed = False


class WrappedObject:
    """An actor's instance if its class has a wrapper: the wrapper's methods, then the user's.

    The wrapper's class decides, because its object may have an attribute of a user method's name.
    """

    __slots__ = ("__names", "__user_object", "__wrapper")

    def __init__(self, wrapper: Any, user_object: Any) -> None:
        self.__wrapper = wrapper
        self.__user_object = user_object
        self.__names = frozenset(get_methods(type(wrapper)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapper if name in self.__names else self.__user_object, name)

    def __repr__(self) -> str:
        return repr(self.__user_object)


def construct(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], wrapper: type | None
) -> Any:
    """Seed the process, set it up and create the actor's instance. An error fails the actor."""
    _seed()
    where = os.environ.get(SET_UP)
    after: Callable[[Any], None] | None = None
    if where is not None:
        module, _, function = where.partition(":")
        after = getattr(importlib.import_module(module), function)()
    instance = _create(cls, args, kwargs, getattr(wrapper, BEFORE_INIT, None))
    if after is not None:
        after(instance)
    return instance if wrapper is None else WrappedObject(wrapper(instance), instance)


def _create(
    cls: type, args: tuple[Any, ...], kwargs: dict[str, Any], before: Callable[[Any], None] | None
) -> Any:
    """Return ``cls(*args, **kwargs)``, after ``before(instance)`` was called with a bare one."""
    if before is None or type(cls).__call__ is not type.__call__:  # a metaclass creates instances
        return cls(*args, **kwargs)
    instance: Any = cls.__new__(cls, *args, **kwargs)
    if isinstance(instance, cls):
        before(instance)
        instance.__init__(*args, **kwargs)  # type: ignore[misc]
    return instance


def _seed() -> None:
    """Seed ``random``, and NumPy and torch now or when the worker imports them."""
    text = os.environ.get(SEED)
    if text is None:
        return
    seed = int(text)
    random.seed(seed)
    when_imported("numpy.random", lambda numpy_random: numpy_random.seed(seed % 2**32))
    when_imported("torch", lambda torch: torch.manual_seed(seed))
