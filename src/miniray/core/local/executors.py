"""Running calls in a worker: one at a time, or in threads. In an event loop: ``async_executor``."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from miniray.core.engine import drain
from miniray.core.local.calls import R_END, R_ITEM, R_MANY, R_ONE, R_PLAIN
from miniray.core.local.objects import BLOB, FAILED, Blob, is_plain
from miniray.core.local.peers import DRIVER
from miniray.core.local.wire import Closed, Stream, frame
from miniray.errors import MinirayError, TaskCancelledError, TaskError

if TYPE_CHECKING:
    from miniray.core.local.node import Node

#: A keyword argument of miniray's own beside the user's: what is called with the method, instead of
#: the method itself.
AROUND = "__miniray_around__"

#: The id of the call being run, for ``get_runtime_context``.
current_call: contextvars.ContextVar[int | None] = contextvars.ContextVar("call", default=None)


@dataclasses.dataclass(slots=True, eq=False)
class Job:
    """One call to run. Arguments with more than plain values are in ``blobs`` until it starts."""

    stream: Stream
    id: int
    method: str | int
    num_returns: int | str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    blobs: list[Blob] | None = None
    places: Sequence[Any] = ()


class Executor:
    """Runs calls in the calling thread; the base of the others.

    Every outcome is sent back: the value, the user's exception with its traceback, or that the
    call was cancelled. Only ``SystemExit`` is let through: it ends the worker.
    """

    def __init__(self, node: Node, name: str) -> None:
        self.node = node
        self.name = name
        self.instance: Any = None
        self.class_name = ""
        #: By id: (name, pickled, loaded on first use).
        self.functions: dict[int, tuple[str, Blob, Any]] = {}
        #: Calls to cancel that run or have not started yet.
        self.cancelled: set[int] = set()
        self.running: int | None = None  # the call, where there is one at a time

    # -- running ----------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        id = job.id
        token = current_call.set(id)
        try:
            self.running = id  # before the look: whoever cancels it now sees that it runs
            if self.cancelled and id in self.cancelled:
                raise KeyboardInterrupt
            function, args, kwargs = self.prepare(job)
            value = function(*args, **kwargs)
            if inspect.iscoroutine(value):
                import asyncio  # most workers never need it

                value = asyncio.run(value)
            if job.num_returns not in (0, 1):
                if isinstance(value, AsyncIterator):
                    value = drain(value)
                value = self.several(job, value)
            self.running = None
        except SystemExit:
            raise
        except BaseException as error:
            self.running = None
            self.reply_error(job, error)
        else:
            self.reply(job, value)
        finally:
            current_call.reset(token)
            self.cancelled.discard(id)
            del job
            flush_output()

    def prepare(self, job: Job) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """(function, args, kwargs), unpickled."""
        if isinstance(job.method, str):
            function = getattr(self.instance, job.method)
        else:
            name, blob, function = self.functions[job.method]
            if function is None:
                function = blob.load(self.node)
                self.functions[job.method] = (name, blob, function)
        if job.blobs is None:
            return function, job.args, job.kwargs
        args, kwargs = arguments(self.node, job.blobs, job.places)
        job.blobs = None  # the arguments live as long as the user's code keeps them, not longer
        if AROUND in kwargs:
            function = functools.partial(kwargs.pop(AROUND), function)
        return function, args, kwargs

    def label(self, job: Job) -> str:
        if isinstance(job.method, str):
            return f"{self.class_name}.{job.method}"
        return self.functions[job.method][0]

    def finish(self) -> None:
        """Wait for what is still running; nothing new will come."""

    def exit_status(self, error: SystemExit) -> int:
        """What a program would end with, having printed what it would print."""
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        flush_output()
        # With 0 an actor means to end. Its status alone does not say so: os._exit(0) is a crash.
        if not code and not self.node.closing:  # closing: in a child that the user's code forked
            self.node.ask_and_wait(DRIVER, "actor_leaves", None)
        return code or 0

    # -- results ----------------------------------------------------------------------------------

    def reply(self, job: Job, value: Any) -> None:
        """Send what a call gave: the value, a list of them, or None at the end of a stream."""
        num_returns = job.num_returns
        if num_returns == 0:
            value = None
        if num_returns in (1, 0) and is_plain(value):
            with contextlib.suppress(Closed):  # the caller is gone, and so is its interest
                job.stream.send(frame(R_PLAIN, pickle.dumps((job.id, value), 5)))
            return
        if num_returns == "streaming":
            self.send(job, R_END, BLOB, [])
            return
        what = f"return value of {self.label(job)}"
        try:
            values = [value] if num_returns == 1 else value
            blobs = [Blob.of(self.node, v, what) for v in values]
        except MinirayError as error:
            self.reply_error(job, error)
            return
        del value, values
        self.send(job, R_ONE if num_returns == 1 else R_MANY, BLOB, blobs)

    def reply_error(self, job: Job, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and job.id in self.cancelled:
            failure: MinirayError = TaskCancelledError(f"{self.label(job)} was cancelled")
        else:
            failure = TaskError.capture(error, self.label(job), self.name, os.getpid())
        del error
        self.fail(job, failure)

    def fail(self, job: Job, failure: MinirayError) -> None:
        kind = R_END if job.num_returns == "streaming" else R_ONE
        self.send(job, kind, FAILED, [Blob.of(self.node, failure)])

    def send(self, job: Job, kind: int, state: int, blobs: list[Blob]) -> None:
        fds: list[int] = []
        with contextlib.suppress(Closed):
            wires = self.node.encode(blobs, job.stream.peer, fds)
            body = pickle.dumps((job.id, state, wires), 5)
            job.stream.send(frame(kind, body, len(fds)), fds)

    def several(self, job: Job, value: Any) -> list[Any] | None:
        """What a call with several returns gave, as a list; a stream is sent item by item."""
        if job.num_returns == "streaming":
            for item in value:
                self.send_item(job, item)
            return None
        return _split(value, job.num_returns, f"return value of {self.label(job)}")

    def send_item(self, job: Job, item: Any) -> None:
        if job.id in self.cancelled:
            raise KeyboardInterrupt  # not for a method itself, which may be in the midst of things
        self.send(job, R_ITEM, BLOB, [Blob.of(self.node, item, f"item of {self.label(job)}")])

    # -- cancelling (called in the I/O thread) -----------------------------------------------------

    def cancel(self, id: int) -> None:
        """Drop a call that has not started; interrupt a task that runs."""
        self.cancelled.add(id)
        if self.running == id and self.instance is None:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

    def forget(self, id: int) -> None:
        """Forget the request to cancel a call that has ended, in case it arrived after the end."""
        self.cancelled.discard(id)

    def interrupted(self) -> bool:
        """Whether the running call, here and now, is one to interrupt."""
        return self.running is not None and self.running in self.cancelled


class ThreadExecutor(Executor):
    """Runs up to ``limit`` calls at once, each in a thread. They start in order."""

    def __init__(self, node: Node, name: str, limit: int) -> None:
        super().__init__(node, name)
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._limit = limit
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def run(self, job: Job) -> None:
        # One more thread while all may be busy; idle ones are reused.
        self._busy += 1
        if len(self._threads) < min(self._limit, self._busy):
            thread = threading.Thread(target=self._work, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                super().run(job)
                self.node.flush_calls()
            except SystemExit as error:
                os._exit(self.exit_status(error))
            finally:
                self._busy -= 1

    def finish(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError, OSError):
            continue  # the user's code closed or replaced it


def _split(value: Any, count: Any, what: str) -> list[Any]:
    try:
        items = iter(value)
    except TypeError:
        raise ValueError(f"num_returns={count}, but the {what} is {value!r}") from None
    values = list(items)
    if len(values) != count:
        raise ValueError(f"num_returns={count}, but the {what} has {len(values)} values")
    return values


def arguments(
    node: Node, blobs: list[Blob], places: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with the values of top-level refs put in their places."""
    args, kwargs = blobs[0].load(node)
    if places:
        args = list(args)
        for place, blob in zip(places, blobs[1:], strict=True):
            if isinstance(place, int):
                args[place] = blob.load(node)
            else:
                kwargs[place] = blob.load(node)
    return tuple(args), kwargs
