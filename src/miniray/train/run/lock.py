"""``RunLock``: one process at a time writes to a run directory."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miniray.errors import RunLockedError
from miniray.files import FileLock, is_locked
from miniray.runs import files

LOCK = ".lock"
#: How long to wait until the process that holds a lock has written its name.
_HOLDER_TIMEOUT_S = 1.0
#: Locks of this process, by directory. Objects for the same directory share one.
_locks: weakref.WeakValueDictionary[Path, FileLock] = weakref.WeakValueDictionary()


class RunLock:
    """The lock of a run directory, which the end of the process releases, however it ends."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock: FileLock | None = None

    def acquire(self) -> None:
        """Lock the directory, unless this process has locked it."""
        key = self._directory.resolve()
        self._lock = _locks.get(key, self._lock)
        if self._lock is not None and self._lock.held:
            return
        deadline = time.monotonic() + _HOLDER_TIMEOUT_S
        while True:
            try:
                lock = FileLock(self._directory / LOCK, wait=False)
                break
            except BlockingIOError:
                holder = _read_holder(self._directory)
                # A process that just locked it is about to write its name, and one that only
                # looks whether it is locked releases it at once.
                if holder or time.monotonic() > deadline:
                    raise create_locked_error(self._directory, holder) from None
                time.sleep(0.01)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                    raise
                return  # a file system without locks
        lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        self._lock = _locks[key] = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()


def create_locked_error(path: Path, holder: Mapping[str, Any]) -> RunLockedError:
    """Return the error for a run that ``holder``, or an unknown process, has locked."""
    pid, host = holder.get("pid"), holder.get("host")
    where = "a different process" if pid is None else f"process {pid} on host {host}"
    return _create_error(
        f"The run {path} is still running, in {where}. Wait until it ends, or use a different "
        "name= or run_dir=.",
        holder,
    )


def create_continued_error(path: Path, latest: Mapping[str, Any]) -> RunLockedError:
    """Return the error for a run that a different process has continued."""
    return _create_error(
        f"The run {path} was continued by process {latest.get('pid')} on host "
        f"{latest.get('host')} since this trainer trained it. Call train(..., resume=True) to "
        "continue from its newest checkpoint.",
        latest,
    )


def _create_error(text: str, process: Mapping[str, Any]) -> RunLockedError:
    pid, host = process.get("pid"), process.get("host")
    return RunLockedError(
        text,
        pid=pid if isinstance(pid, int) else None,
        host=host if isinstance(host, str) else None,
    )


def find_holder(path: Path) -> Mapping[str, Any] | None:
    """Return pid and host of the process that locks the run at ``path``, or None.

    The result is empty if the process hasn't written them yet.
    """
    return _read_holder(path) if is_locked(path / LOCK) else None


def _read_holder(path: Path) -> dict[str, Any]:
    """Return the process named in the lock file, or {} if there is none or it is gone."""
    import psutil

    holder, _ = files.read_json(path / LOCK)
    pid = holder.get("pid")
    here = holder.get("host") == socket.gethostname()
    is_valid = isinstance(pid, int) and not (here and not psutil.pid_exists(pid))
    return holder if is_valid else {}
