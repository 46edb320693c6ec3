"""Running user code in the calling thread: errors contained, event loops nested.

User code here shares its thread with its caller, so three things need care that a process gives for
nothing: an exception must not carry the caller's frames along, Ctrl-C and leaving the debugger must
end the program and not become a result, and an event loop must run while another one stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from miniray.core import startup
from miniray.core.engine import cancel_rest

T = TypeVar("T")


def guarded(function: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    """Run user code: (what it raised, None) or (None, its value).

    Ctrl-C and leaving the debugger are meant for the program as a whole and go through.
    """
    kept: list[Any] = []
    suspended = _suspended(function, kept)
    error, value = next(suspended)
    if error is not None:
        kept.append(suspended)  # ended here, it would have a caller after all
    return error, value


def _suspended(
    function: Callable[[], Any], kept: list[Any]
) -> Iterator[tuple[BaseException | None, Any]]:
    # A generator on purpose. An error kept in a ref keeps its frames and, by f_back, all callers'
    # frames with their locals, handles included, so actors would outlive their last handle. A
    # suspended generator has no caller, and the chain ends here. It holds itself, by ``kept``, and
    # nothing of the user's.
    outcome: list[tuple[BaseException | None, Any]] = []
    try:
        outcome.append((None, function()))
    except BaseException as error:
        if _is_for_the_program(error):
            raise
        outcome.append((error, None))
    del function
    yield outcome.pop()


async def _guarded_async(function: Callable[[], Any]) -> tuple[BaseException | None, Any]:
    try:
        value = function()
        return None, (await value if inspect.iscoroutine(value) else value)
    except BaseException as error:
        if _is_for_the_program(error):
            raise
        return error, None


def _is_for_the_program(error: BaseException) -> bool:
    if isinstance(error, (KeyboardInterrupt, GeneratorExit)):
        return True
    bdb = sys.modules.get("bdb")  # loaded if a debugger is
    return bdb is not None and isinstance(error, bdb.BdbQuit)


def users_part(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is neither ours nor asyncio's."""
    part = traceback
    while part is not None and _is_plumbing(part.tb_frame.f_code.co_filename):
        part = part.tb_next
    return part or traceback  # all of it where the plumbing itself failed


def _is_plumbing(filename: str) -> bool:
    folder = os.path.dirname(filename)
    own = folder == os.path.dirname(__file__) or filename == startup.__file__
    return own or folder == os.path.dirname(asyncio.__file__)


class PrivateLoop:
    """The event loop of an async actor. It turns only while one of the actor's calls runs.

    Tasks that a method leaves behind go on during the next call and are cancelled at the end.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def guarded(self, function: Callable[[], Any]) -> tuple[BaseException | None, Any]:
        """As ``guarded``, on the loop; a coroutine is awaited."""
        if self._loop is not None and self._loop.is_running():
            # The actor called itself. Its loop cannot be entered twice, so a fresh one does this
            # call; waiting for the outer one instead would be a deadlock.
            with contextlib.closing(asyncio.new_event_loop()) as nested:
                return run_on(nested, _guarded_async(function))
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return run_on(self._loop, _guarded_async(function))

    def close(self) -> None:
        """Cancel what is left and close; nothing while it runs (an actor that ends itself)."""
        loop = self._loop
        if loop is None or loop.is_running() or loop.is_closed():
            return
        if asyncio.all_tasks(loop):
            run_on(loop, cancel_rest())
        loop.close()


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run ``coroutine`` to its end, also where the caller is inside a running loop itself.

    asyncio refuses to nest loops in one thread because the outer one stands still meanwhile. Here
    that is the point: a call runs right away, and its caller waits. So the outer loop is hidden.
    """
    outer = asyncio._get_running_loop()
    task = None if outer is None else asyncio.current_task(outer)
    if outer is not None and task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None and task is not None:
            asyncio.tasks._enter_task(outer, task)
