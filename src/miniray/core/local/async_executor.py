"""Running the calls of an actor with ``async def`` methods: in an event loop, many at once."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from miniray.core.engine import cancel_rest
from miniray.core.local.executors import Executor, Job, current_call, flush_output
from miniray.core.local.wire import Stream
from miniray.errors import TaskCancelledError

if TYPE_CHECKING:
    from miniray.core.local.node import Node


class AsyncExecutor(Executor):
    """Runs calls as tasks of an event loop in the main thread, up to ``limit`` at once.

    Methods that are not ``async def`` run in the loop too and hold it up meanwhile.
    """

    def __init__(
        self, node: Node, name: str, limit: int, read: Callable[[Stream], list[Job]]
    ) -> None:
        super().__init__(node, name)
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._slots = asyncio.Semaphore(limit)
        self._read_jobs = read
        self._tasks: dict[int, asyncio.Task[None]] = {}
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
            await asyncio.wait(list(self._tasks.values()))

    def close(self) -> None:
        """Cancel what methods left running."""
        self._loop.run_until_complete(cancel_rest())

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
            task.add_done_callback(functools.partial(self._done, job))

    def _done(self, job: Job, task: asyncio.Task[None]) -> None:
        self._tasks.pop(job.id, None)
        self.cancelled.discard(job.id)
        if task.cancelled():  # before its first step: `_run` knows nothing of it
            self._was_cancelled(job)

    def _was_cancelled(self, job: Job) -> None:
        self.fail(job, TaskCancelledError(f"{self.label(job)} was cancelled"))

    async def _run(self, job: Job) -> None:
        current_call.set(job.id)
        try:
            if job.id in self.cancelled:
                raise asyncio.CancelledError
            async with self._slots:
                function, args, kwargs = self.prepare(job)
                value = function(*args, **kwargs)
                if inspect.isawaitable(value):
                    value = await value
                if job.num_returns not in (0, 1):
                    if isinstance(value, AsyncIterator):
                        value = await self._read_out(job, value)
                    value = self.several(job, value)
        except asyncio.CancelledError:
            self._was_cancelled(job)
        except SystemExit as error:
            os._exit(self.exit_status(error))
        except BaseException as error:
            self.reply_error(job, error)
        else:
            self.reply(job, value)
        finally:
            self.node.flush_calls()
            flush_output()

    async def _read_out(self, job: Job, items: AsyncIterator[Any]) -> list[Any]:
        """The items of an async generator; those of a stream are sent as they come."""
        if job.num_returns != "streaming":
            return [item async for item in items]
        async for item in items:
            self.send_item(job, item)
        return []

    def cancel(self, id: int) -> None:
        def cancel() -> None:
            task = self._tasks.get(id)
            if task is not None:
                task.cancel()
            else:
                self.cancelled.add(id)  # the call itself comes on another connection: not there yet

        self._loop.call_soon_threadsafe(cancel)

    def forget(self, id: int) -> None:
        # In the loop: after the request itself.
        self._loop.call_soon_threadsafe(self.cancelled.discard, id)
