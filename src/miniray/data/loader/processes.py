"""A transform in worker processes, for one that holds the GIL.

Processes are started with ``spawn``: a fork would copy the locks of this process's threads in any
state. A process that is lost is replaced. All of them end with this process, whatever ends it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

import cloudpickle

from miniray.data.loader.decode import Outcome, try_transform
from miniray.errors import DataError

_PATIENCE = 3.0  # seconds for workers to end by themselves
_ATTEMPTS = 2  # Rows that end two processes are the likely reason.

_transform: Callable[[Any], Any] | None = None


class ProcessPool:
    """Apply ``transform`` to rows in ``workers`` processes.

    Each process has a separate executor: an executor that loses a process fails all its tasks.
    """

    def __init__(self, transform: Callable[[Any], Any] | None, workers: int) -> None:
        self.pid = os.getpid()
        self.closed = False
        end, self._end = multiprocessing.Pipe(duplex=False)
        self._arguments = (cloudpickle.dumps(transform), end)
        self._lock = threading.Lock()
        self._executors = [self._create_executor() for _ in range(workers)]
        self._free: queue.SimpleQueue[ProcessPoolExecutor] = queue.SimpleQueue()
        for executor in self._executors:
            self._free.put(executor)

    def _create_executor(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_init_process,
            initargs=self._arguments,
        )

    def apply(self, rows: list[Any], file: str, row: int) -> list[Outcome]:
        """Return a pair (value, error) for each row.

        If the process is lost, transform the rows again in a new one. Raise ``DataError`` if that
        is lost too. ``file`` and ``row`` of the error are those of the first row.
        """
        executor = self._free.get()
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    return executor.submit(_transform_rows, rows).result()
                except BrokenProcessPool as error:
                    lost = error
                    executor = self._replace(executor)
                if self.closed:
                    break
                if attempt < _ATTEMPTS:
                    warnings.warn(
                        f"A decode process ended while it transformed rows of {file}, from row"
                        f" {row}. It was killed, for example because memory ran out, or the"
                        " transform crashed. The rows are transformed again in a new process.",
                        RuntimeWarning,
                        stacklevel=2,
                    )
            raise DataError(
                f"{_ATTEMPTS} decode processes ended while they transformed the same {len(rows)}"
                f" rows of {file}, from row {row}. They were killed, for example because memory ran"
                " out, the transform crashes, or they can't load it. Scripts that use"
                " decode_processes need `if __name__ == '__main__':` around the code that runs.",
                file,
                row,
            ) from lost
        finally:
            self._free.put(executor)

    def _replace(self, lost: ProcessPoolExecutor) -> ProcessPoolExecutor:
        with self._lock:
            if self.closed:
                return lost
            executor = self._create_executor()
            self._executors[self._executors.index(lost)] = executor
        lost.shutdown(wait=False)
        return executor

    def close(self, patience: float = _PATIENCE) -> None:
        """End the processes, after ``patience`` also one whose transform doesn't return."""
        if self.pid != os.getpid():
            self.closed = True
            return  # They belong to the parent process.
        with self._lock:
            self.closed = True
        ending = threading.Thread(target=self._shut_down, daemon=True)
        ending.start()
        ending.join(patience)
        if ending.is_alive():
            self._end.send(None)
            ending.join(_PATIENCE)

    def _shut_down(self) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)


def _init_process(pickled: bytes, end: connection.Connection) -> None:
    global _transform
    parent = multiprocessing.parent_process()
    assert parent is not None
    watch = threading.Thread(target=_exit_with, args=([parent.sentinel, end],), daemon=True)
    watch.start()
    _transform = pickle.loads(pickled)


def _exit_with(ends: list[int | connection.Connection]) -> None:
    # Other workers keep the queues of the pool open, so these don't show its end. The message is
    # never read, so that all workers receive it.
    connection.wait(ends)
    os._exit(1)


def _transform_rows(rows: list[Any]) -> list[Outcome]:
    assert _transform is not None
    outcomes = [try_transform(_transform, row) for row in rows]
    return [(value, None if error is None else _make_picklable(error)) for value, error in outcomes]


def _make_picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a user's __reduce__ or __init__ can raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
