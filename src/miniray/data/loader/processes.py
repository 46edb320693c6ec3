"""A transform in worker processes, for one that holds the GIL.

Processes are started with ``spawn``: a fork would copy the locks of this process's threads in any
state. A worker that dies is a ``DataError``; workers end with this process, whatever ends it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

import cloudpickle

from miniray.errors import DataError

_PATIENCE = 3.0  # seconds for workers to end by themselves

_transform: Callable[[Any], Any] | None = None


class ProcessPool:
    def __init__(self, transform: Callable[[Any], Any] | None, workers: int) -> None:
        self.pid = os.getpid()
        self.closed = False
        end, self._end = multiprocessing.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(
            workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_begin,
            initargs=(cloudpickle.dumps(transform), end),
        )

    def apply(self, rows: list[Any]) -> list[tuple[Any, BaseException | None]]:
        """(value, error) for each row."""
        try:
            return self._pool.submit(_apply, rows).result()
        except BrokenProcessPool as error:
            self.closed = True  # for good: the next pass over the loader needs another
            raise DataError(
                "a decode process ended while it transformed rows: it was killed (out of memory?),"
                " or the transform cannot be loaded there. Scripts that use decode_processes need"
                " `if __name__ == '__main__':` around what they run"
            ) from error

    def close(self, patience: float = _PATIENCE) -> None:
        """End the workers, after ``patience`` also one whose transform does not come back."""
        self.closed = True
        if self.pid != os.getpid():
            return  # they are the parent's
        ending = threading.Thread(
            target=self._pool.shutdown, kwargs={"cancel_futures": True}, daemon=True
        )
        ending.start()
        ending.join(patience)
        if ending.is_alive():
            self._end.send(None)
            ending.join(_PATIENCE)


def _begin(pickled: bytes, end: connection.Connection) -> None:
    global _transform
    parent = multiprocessing.parent_process()
    assert parent is not None
    watch = threading.Thread(target=_end_with, args=([parent.sentinel, end],), daemon=True)
    watch.start()
    _transform = pickle.loads(pickled)


def _end_with(ends: list[int | connection.Connection]) -> None:
    # The pool's own queues are held open by its other workers, so nothing else tells of its end.
    # What is sent is never read, so that all workers see it.
    connection.wait(ends)
    os._exit(1)


def _apply(rows: list[Any]) -> list[tuple[Any, BaseException | None]]:
    assert _transform is not None
    found: list[tuple[Any, BaseException | None]] = []
    for row in rows:
        try:
            found.append((_transform(row), None))
        except Exception as error:  # the user's code may raise anything
            found.append((None, _that_travels(error)))
    return found


def _that_travels(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a user's __reduce__ or __init__ raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
