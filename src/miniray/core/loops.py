"""Async code of the user's where no event loop runs: a coroutine to its end, a stream item by item.

asyncio is imported where used: most workers never need it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of ``coroutine``."""
    import asyncio

    return asyncio.run(coroutine)


async def cancel_rest() -> None:
    """Cancel the other tasks of the running loop, and wait until they have ended."""
    import asyncio

    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def drain(items: AsyncIterator[Any]) -> Iterator[Any]:
    """The items of an async generator, one turn of a private event loop each."""
    import asyncio

    loop = asyncio.new_event_loop()
    try:
        while True:
            try:
                yield loop.run_until_complete(anext(items))
            except StopAsyncIteration:
                return
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())  # one that was not read to its end
        loop.close()
