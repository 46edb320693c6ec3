"""A pool of daemon threads, which don't delay the end of the interpreter."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any


class DaemonPool:
    """Runs functions in daemon threads, or in the calling thread if there are none.

    ``concurrent.futures.ThreadPoolExecutor`` joins its threads at exit, so a function that never
    returns would keep the interpreter alive.
    """

    def __init__(self, name: str, threads: int) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._is_closed = False
        self.threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` in a thread and return its future."""
        future: Future[Any] = Future()
        if self.threads:
            self._jobs.put((future, function))
            if self._is_closed:  # by another thread, so the threads may have ended
                future.cancel()
        else:
            _run_job(future, function)
        return future

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._is_closed:
                job[0].cancel()
            else:
                _run_job(*job)
            del job  # releases the arguments while the thread waits

    def close(self) -> None:
        """Cancel waiting functions and let the threads end."""
        self._is_closed = True
        for _ in self.threads:
            self._jobs.put(None)

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads until ``deadline``. Return the names of those still running."""
        # The garbage collector can run this in one of the threads.
        if threading.current_thread() in self.threads:
            return []
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self.threads if thread.is_alive()]


def _run_job(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # raised by ``future.result()``
        future.set_exception(error)


def join_futures(parts: Sequence[Future[Any]], join: Callable[[list[Any]], Any]) -> Future[Any]:
    """Return the future of ``join`` of all results. The thread that ends last calls it."""
    joined: Future[Any] = Future()
    missing, lock = len(parts), threading.Lock()

    def finish(_: Future[Any]) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            if missing:
                return
        _run_job(joined, lambda: join([part.result() for part in parts]))

    for part in parts:
        part.add_done_callback(finish)
    return joined
