"""Replace files atomically, and lock files between processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

#: Age from which a temporary file is considered left over from a crashed process.
_LEFTOVER_AGE_S = 3600.0

#: Descriptors that hold locks. A forked child closes them, or the lock would outlive the parent.
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def replace_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write ``data`` to a temporary file beside ``path`` and rename it.

    Readers see the old content or all of the new one. With ``sync``, the new content also survives
    a power failure. Remove temporary files that crashed processes left.
    """
    for leftover in path.parent.glob(f".{path.name}.*.partial"):
        with contextlib.suppress(OSError):  # another writer was faster
            if time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE_S:
                leftover.unlink()
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with open(partial, "xb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` survive a power failure, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems reject fsync of directories
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_directory(source: Path, target: Path) -> None:
    """Rename the directory ``source`` to ``target``, after its files are on disk.

    Readers see the old directory, briefly none, or the complete new one.
    """
    for path in source.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync_directory(source)
    old = source.with_name(f"{source.name}.old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, old)
    os.rename(source, target)
    sync_directory(target.parent)
    shutil.rmtree(old, ignore_errors=True)


class FileLock:
    """An exclusive ``flock`` on a file, which the kernel releases when this process ends.

    Raise ``BlockingIOError`` if it is held and ``wait`` is False. Child processes don't inherit the
    lock, whether they are started with ``exec`` or forked. The file is created if necessary, and
    remains, empty.
    """

    def __init__(self, path: Path, *, wait: bool = True) -> None:
        # A link could lead to a file of the user's, whose content write() would replace.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        self._descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BaseException:
            os.close(self._descriptor)
            raise
        self._close = weakref.finalize(self, _unlock, self._descriptor)
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process still holds the lock."""
        return self._close.alive

    def write(self, data: bytes) -> None:
        """Replace the content of the locked file, which processes that find it locked can read."""
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, data, 0)

    def release(self) -> None:
        """Release the lock. Do nothing if it was released before."""
        self._close()


@contextlib.contextmanager
def lock_file(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold an exclusive lock on ``path``. See ``FileLock``."""
    lock = FileLock(path, wait=wait)
    try:
        yield
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """Return True if a ``FileLock`` on ``path`` is held by any process."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return False


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # on a file system that became read-only
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def _release_in_child() -> None:
    # Closing the inherited descriptor doesn't release the lock of the parent.
    for lock in list(_held):
        if lock._close.detach():
            os.close(lock._descriptor)


os.register_at_fork(after_in_child=_release_in_child)
