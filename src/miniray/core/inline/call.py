"""One call on the inline engine: its arguments, where it runs, what came out of it.

Values make the same round trip through pickle as on the engines that have processes, so what works
here works there: a callee cannot change the caller's objects, arrays arrive read-only, and what
cannot travel is refused at the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from miniray.core import serialize
from miniray.core.inline import guard
from miniray.core.refs import say_unseen
from miniray.errors import (
    ActorDiedError,
    MinirayError,
    NotSerializableError,
    TaskCancelledError,
    TaskError,
    WorkerCrashedError,
)

#: What an iterator that is used up gives; StopIteration could not cross a coroutine.
_END = object()


class Stored:
    """A value in the store. Every ``load`` builds a new object, as ``get`` does elsewhere."""

    __slots__ = ("_buffers", "_data", "_refs")

    def __init__(self, value: Any, what: str) -> None:
        packed = serialize.pack(value, what)
        self._data = bytes(packed.data)
        # Immutable copies: the caller may change its arrays later, and receivers must not.
        self._buffers = [bytes(buffer) for buffer in packed.buffers]
        self._refs = packed.refs

    def load(self) -> Any:
        return serialize.unpack(self._data, self._buffers, self._refs)


@dataclasses.dataclass(eq=False)
class Failure:
    """An error in the store, with the exception it was made from, whose frames are the user's."""

    error: MinirayError
    original: BaseException | None = None
    #: The call was the actor's last: it left with ``sys.exit``.
    ends_actor: bool = False
    seen: bool = False

    def __del__(self) -> None:
        raised = isinstance(self.error, TaskError) or getattr(self.error, "in_init", False)
        if raised and not self.seen and not sys.is_finalizing():
            say_unseen(self.error)

    def load(self) -> NoReturn:
        self.seen = True
        # A new one each time, as raising adds to an exception's traceback. Copying also turns a
        # TaskError into the dual type that ``except ValueError`` catches.
        raise copy.copy(self.error) from self.original


Outcome = Stored | Failure


class Arguments:
    """Packed arguments. Top-level refs are kept aside: they become values when the call runs."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises ``NotSerializableError`` naming the argument that cannot travel."""
        self._args = [_packed(v, f"argument {i} of {name}") for i, v in enumerate(args)]
        self._kwargs = {k: _packed(v, f"argument {k!r} of {name}") for k, v in kwargs.items()}

    def failure(self) -> Failure | None:
        """The first argument that is the result of a failed call, which then fails this one."""
        for outcome in (*self._args, *self._kwargs.values()):
            if isinstance(outcome, Failure):
                return outcome
        return None

    def load(self) -> tuple[list[Any], dict[str, Any]]:
        return [v.load() for v in self._args], {k: v.load() for k, v in self._kwargs.items()}


def _packed(value: Any, what: str) -> Outcome:
    outcome = getattr(type(value), "inline_outcome", None) and value.inline_outcome
    return outcome if isinstance(outcome, (Stored, Failure)) else Stored(value, what)


@dataclasses.dataclass
class Frame:
    """A call that is running: who it is, and what it has."""

    engine: Any
    function: str
    worker: str
    worker_id: str
    task_id: str
    cpus: float
    gpus: tuple[int, ...]
    #: Inherited by the tasks and actors that the call starts, as in Ray.
    env_vars: dict[str, str]
    cuda_visible_devices: str | None = None
    #: Weak: tasks left on an actor's loop hold their frame and must not keep the actor.
    actor: weakref.ref[Any] | None = None
    _saved: dict[str, str | None] = dataclasses.field(default_factory=dict)

    def run(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        num_returns: int | str,
        loop: guard.PrivateLoop | None,
    ) -> list[Outcome]:
        """Run the function; an outcome for each return value, or for each item of a stream."""

        def invoke() -> Any:
            args, kwargs = arguments.load()
            return function(*args, **kwargs)

        guarded = guard.guarded if loop is None else loop.guarded
        with self._entered():
            error, value = guarded(invoke)
            if error is not None:
                return everywhere(self._failed(error), num_returns)
            if num_returns == 1:
                return [self._stored(value)]
            if num_returns == 0:
                return []
            # Both a stream and a tuple of returns: "yield" may be used to give either.
            outcomes: list[Outcome] = []
            advance = _stepper(value)
            while True:
                error, item = guarded(advance)
                if error is not None:
                    outcomes.append(self._failed(error))
                    break
                if item is _END:
                    break
                outcomes.append(self._stored(item))
            if num_returns == "streaming" or len(outcomes) == num_returns:
                return outcomes
            if outcomes and isinstance(outcomes[-1], Failure):
                return everywhere(outcomes[-1], num_returns)
            wrong = ValueError(
                f"{self.function} returned {len(outcomes)} values, but num_returns={num_returns}"
            )
            return everywhere(self._failed(wrong), num_returns)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Make this the running call: its environment variables replace those of the caller."""
        outer = current.get()
        if outer is not None:
            outer._restore_environment()
        self._apply_environment()
        token = current.set(self)
        try:
            yield
        finally:
            current.reset(token)
            self._restore_environment()
            if outer is not None:
                outer._apply_environment()

    def _apply_environment(self) -> None:
        variables = dict(self.env_vars)
        if self.cuda_visible_devices is not None:
            variables["CUDA_VISIBLE_DEVICES"] = self.cuda_visible_devices
        self._saved = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)

    def _restore_environment(self) -> None:
        for name, value in self._saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _stored(self, value: Any) -> Outcome:
        try:
            return Stored(value, f"return value of {self.function}")
        except NotSerializableError as error:
            return Failure(error, error.__cause__)

    def _failed(self, error: BaseException) -> Failure:
        """The outcome of a call that raised ``error``."""
        error.__traceback__ = guard.users_part(error.__traceback__)
        if isinstance(error, SystemExit):  # elsewhere this ends the worker's process
            text = f"{self.worker} exited in {self.function} with code {error.code!r}"
            kind = WorkerCrashedError if self.actor is None else ActorDiedError
            return Failure(kind(text), error, ends_actor=self.actor is not None)
        if isinstance(error, asyncio.CancelledError):
            return Failure(TaskCancelledError(f"{self.function} was cancelled"), error)
        captured = TaskError.capture(error, self.function, self.worker, os.getpid())
        return Failure(captured, error)


#: The call running in this thread or asyncio task; None in the driver's own code.
current: contextvars.ContextVar[Frame | None]
current = contextvars.ContextVar("miniray_inline_call", default=None)


def everywhere(failure: Failure, num_returns: int | str) -> list[Outcome]:
    """The outcomes of a call that failed as a whole: each of its refs says so."""
    return [failure] * (1 if isinstance(num_returns, str) else num_returns)


def _stepper(value: Any) -> Callable[[], Any]:
    """A function that gives the next item of what a call returned, and ``_END`` at last."""
    if hasattr(value, "__anext__"):

        async def advance() -> Any:
            return await anext(value, _END)

        return advance
    iterator: Iterator[Any] | None = None

    def step() -> Any:
        nonlocal iterator
        if iterator is None:
            iterator = iter(value)  # here, so that "not iterable" is the call's error
        return next(iterator, _END)

    return step
