"""Running calls in a worker: one at a time, in threads, or in an event loop."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from miniray.core.local.calls import R_END, R_ITEM, R_MANY, R_ONE, R_PLAIN
from miniray.core.local.objects import BLOB, FAILED, Blob, is_plain
from miniray.core.local.wire import Closed, Stream, frame
from miniray.errors import MinirayError, TaskCancelledError, TaskError

if TYPE_CHECKING:
    import asyncio

    from miniray.core.local.node import Node

#: A keyword argument of miniray's own beside the user's: what is called with the method, instead of
#: the method itself.
AROUND = "__miniray_around__"

#: The id of the call being run, for ``get_runtime_context``.
current_call: contextvars.ContextVar[int | None] = contextvars.ContextVar("call", default=None)


class Job:
    """One call to run. Arguments with more than plain values are in ``blobs`` until it starts."""

    __slots__ = ("args", "blobs", "id", "kwargs", "method", "num_returns", "places", "stream")

    def __init__(
        self,
        stream: Stream,
        id: int,
        method: str | int,
        num_returns: int | str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        blobs: list[Blob] | None = None,
        places: list[Any] | None = None,
    ) -> None:
        self.stream = stream
        self.id = id
        self.method = method
        self.num_returns = num_returns
        self.args = args
        self.kwargs = kwargs
        self.blobs = blobs
        self.places = places


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
        self._cancelled: set[int] = set()
        self._running: int | None = None

    # -- running ----------------------------------------------------------------------------------

    def run(self, job: Job) -> None:
        id = job.id
        if self._cancelled and self._drop_cancelled(job):
            return
        token = current_call.set(id)
        self._running = id
        try:
            function, args, kwargs = self.prepare(job)
            value = function(*args, **kwargs)
            if inspect.iscoroutine(value):
                value = _run_coroutine(value)
            if job.num_returns == "streaming":
                self._stream(job, iter(value))
            self._running = None
        except SystemExit:
            raise
        except BaseException as error:
            self._running = None
            self.reply_error(job, error)
        else:
            if job.num_returns != "streaming":
                self.reply(job, value)
        finally:
            current_call.reset(token)
            del job
            sys.stdout.flush()
            sys.stderr.flush()

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
        from miniray.core.local.worker import _arguments

        args, kwargs = _arguments(self.node, job.blobs, job.places or [])
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

    # -- results ----------------------------------------------------------------------------------

    def reply(self, job: Job, value: Any) -> None:
        num_returns = job.num_returns
        if num_returns == 1 and is_plain(value):
            with contextlib.suppress(Closed):  # the caller is gone, and so is its interest
                job.stream.send(frame(R_PLAIN, pickle.dumps((job.id, value), 5)))
            return
        if num_returns == 0:
            with contextlib.suppress(Closed):
                job.stream.send(frame(R_PLAIN, pickle.dumps((job.id, None), 5)))
            return
        what = f"return value of {self.label(job)}"
        try:
            if num_returns == 1:
                blobs = [Blob.of(self.node, value, what)]
            else:
                assert isinstance(num_returns, int)
                blobs = [Blob.of(self.node, v, what) for v in _split(value, num_returns, what)]
        except (MinirayError, TypeError, ValueError) as error:
            self.reply_error(job, error)
            return
        del value
        self.send(job, R_ONE if num_returns == 1 else R_MANY, BLOB, blobs)

    def reply_error(self, job: Job, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and job.id in self._cancelled:
            self._cancelled.discard(job.id)
            failure: BaseException = TaskCancelledError(f"{self.label(job)} was cancelled")
        else:
            failure = TaskError.capture(error, self.label(job), self.name, os.getpid())
        del error
        kind = R_END if job.num_returns == "streaming" else R_ONE
        self.send(job, kind, FAILED, [Blob.of(self.node, failure)])

    def send(self, job: Job, kind: int, state: int, blobs: list[Blob]) -> None:
        fds: list[int] = []
        with contextlib.suppress(Closed):
            wires = [blob.to_wire(self.node, job.stream.peer, fds) for blob in blobs]
            body = pickle.dumps((job.id, state, wires), 5)
            job.stream.send(frame(kind, body, len(fds)), fds)

    def _stream(self, job: Job, items: Iterator[Any]) -> None:
        what = f"item of {self.label(job)}"
        for item in items:
            if job.id in self._cancelled:
                self._cancelled.discard(job.id)
                close = getattr(items, "close", None)
                if close is not None:
                    close()
                break
            self.send(job, R_ITEM, BLOB, [Blob.of(self.node, item, what)])
        self.send(job, R_END, BLOB, [])

    # -- cancelling (called in the I/O thread) -----------------------------------------------------

    def cancel(self, id: int) -> None:
        """Drop a call that has not started; interrupt a task that runs."""
        self._cancelled.add(id)
        if self._running == id and self.instance is None:
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

    def interrupted(self) -> bool:
        """Whether the running call, here and now, is one to interrupt."""
        return self._running is not None and self._running in self._cancelled

    def _drop_cancelled(self, job: Job) -> bool:
        if job.id not in self._cancelled:
            return False
        self._cancelled.discard(job.id)
        failure = TaskCancelledError(f"{self.label(job)} was cancelled before it started")
        kind = R_END if job.num_returns == "streaming" else R_ONE
        self.send(job, kind, FAILED, [Blob.of(self.node, failure)])
        return True


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
                os._exit(error.code if isinstance(error.code, int) else 1)
            finally:
                self._busy -= 1

    def cancel(self, id: int) -> None:
        self._cancelled.add(id)

    def finish(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()


class AsyncExecutor(Executor):
    """Runs calls as tasks of an event loop in the main thread, up to ``limit`` at once.

    Methods that are not ``async def`` run in the loop too and hold it up meanwhile.
    """

    def __init__(
        self, node: Node, name: str, limit: int, read: Callable[[Stream], list[Job]]
    ) -> None:
        import asyncio

        super().__init__(node, name)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._slots = asyncio.Semaphore(limit)
        self._read_jobs = read
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopping = False
        self._stopped: asyncio.Event = asyncio.Event()

    def construct(self, make: Callable[[], Any]) -> Any:
        """Make the instance inside the loop, where ``asyncio.get_running_loop()`` works."""

        async def inside() -> Any:
            return make()

        return self._loop.run_until_complete(inside())

    def run(self, connections: dict[int, Stream]) -> int:  # type: ignore[override]
        for stream in list(connections.values()):
            self._watch(stream)
        self._loop.run_until_complete(self._serve())
        return 0

    async def _serve(self) -> None:
        await self._stopped.wait()
        while self._tasks:
            import asyncio

            await asyncio.wait(list(self._tasks.values()))

    def add(self, stream: Stream) -> None:
        self._loop.call_soon_threadsafe(self._watch, stream)

    def _watch(self, stream: Stream) -> None:
        self._loop.add_reader(stream.fd, self._on_readable, stream)

    def remove(self, stream: Stream) -> None:
        self._loop.remove_reader(stream.fd)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)

    def _on_readable(self, stream: Stream) -> None:
        for job in self._read_jobs(stream):
            task = self._loop.create_task(self._run(job))
            self._tasks[job.id] = task
            task.add_done_callback(lambda _, id=job.id: self._tasks.pop(id, None))  # type: ignore[misc]

    async def _run(self, job: Job) -> None:
        import asyncio

        async with self._slots:
            if self._cancelled and self._drop_cancelled(job):
                return
            current_call.set(job.id)
            try:
                function, args, kwargs = self.prepare(job)
                value = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = await value
                if job.num_returns == "streaming":
                    if isinstance(value, AsyncIterator):
                        await self._stream_async(job, value)
                    else:
                        self._stream(job, iter(value))
            except asyncio.CancelledError:
                failure = TaskCancelledError(f"{self.label(job)} was cancelled")
                kind = R_END if job.num_returns == "streaming" else R_ONE
                self.send(job, kind, FAILED, [Blob.of(self.node, failure)])
            except SystemExit as error:
                os._exit(error.code if isinstance(error.code, int) else 1)
            except BaseException as error:
                self.reply_error(job, error)
            else:
                if job.num_returns != "streaming":
                    self.reply(job, value)
            finally:
                self.node.flush_calls()
                sys.stdout.flush()
                sys.stderr.flush()

    async def _stream_async(self, job: Job, items: AsyncIterator[Any]) -> None:
        what = f"item of {self.label(job)}"
        async for item in items:
            self.send(job, R_ITEM, BLOB, [Blob.of(self.node, item, what)])
        self.send(job, R_END, BLOB, [])

    def cancel(self, id: int) -> None:
        def cancel() -> None:
            task = self._tasks.get(id)
            if task is not None:
                task.cancel()

        self._loop.call_soon_threadsafe(cancel)


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """A task given as ``async def``: run it to its end."""
    import asyncio

    return asyncio.run(coroutine)


def _split(value: Any, count: int, what: str) -> list[Any]:
    try:
        values = list(value)
    except TypeError:
        raise ValueError(f"num_returns={count}, but the {what} is {value!r}") from None
    if len(values) != count:
        raise ValueError(f"num_returns={count}, but the {what} has {len(values)} values")
    return values
