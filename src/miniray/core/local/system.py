"""What the kernel gives us, with the substitutes for systems that lack it.

Linux is the platform: memfd, epoll, eventfd, pidfd, parent-death signal. macOS has none of these;
the substitutes here (named shared memory unlinked at once, kqueue, a pipe, polling) are written for
it but were never run on it.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import secrets
import select
import selectors
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from miniray import limits

LINUX = sys.platform == "linux"

#: Received file descriptors must not leak into programs the user's code starts.
CLOEXEC_FLAG: int = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
IN = select.EPOLLIN if LINUX else selectors.EVENT_READ
OUT = select.EPOLLOUT if LINUX else selectors.EVENT_WRITE

#: For ``mmap``: don't duplicate the descriptor, which stays open beside the mapping.
NO_DUP: dict[str, bool] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


def anonymous_memory(size: int) -> int:
    """A file descriptor of ``size`` bytes of shared memory that no name leads to.

    The kernel frees it with the last descriptor and mapping. Pages are reserved here, so that a
    machine without enough memory says ``OSError`` now and not ``SIGBUS`` at the first write.
    """
    if LINUX:
        fd = os.memfd_create("miniray", os.MFD_CLOEXEC)
    else:
        import _posixshmem  # type: ignore[import-not-found, unused-ignore]

        name = f"/miniray-{secrets.token_hex(8)}"
        fd = _posixshmem.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        _posixshmem.shm_unlink(name)
    return _sized(fd, size)


def anonymous_file(directory: str, size: int) -> int:
    """Like ``anonymous_memory``, on the disk that holds ``directory``."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return _sized(os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), size)
        except OSError as error:
            # Some filesystems (NFS, older overlayfs) cannot; a full disk is not that case.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    import tempfile

    fd, path = tempfile.mkstemp(dir=directory)
    os.unlink(path)
    return _sized(fd, size)


def _sized(fd: int, size: int) -> int:
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def peer_uid(sock: socket.socket) -> int:
    """The user at the other end of a Unix socket, as the kernel knows it."""
    if LINUX:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", raw)[1])
    local_peercred = 0x001  # LOCAL_PEERCRED of sys/un.h: struct xucred {version, uid, ...}
    raw = sock.getsockopt(0, local_peercred, 76)
    return int(struct.unpack_from("II", raw)[1])


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the process that forked it ends (Linux only)."""
    pr_set_pdeathsig = 1
    _prctl(pr_set_pdeathsig, signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ended (Linux only)."""
    pr_set_child_subreaper = 36
    _prctl(pr_set_child_subreaper, 1)


def _prctl(option: int, value: int) -> None:
    if LINUX:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def raise_descriptor_limit() -> None:
    """Use all file descriptors we may: every large object in use holds one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # macOS reports a hard limit it does not grant; the soft one stays


def fill_standard_descriptors() -> None:
    """Where the terminal's descriptors are closed (a daemon), let /dev/null take their place.

    A socket of ours there would get what libraries print, and workers would have no ``sys.stdout``.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


class Waker:
    """A descriptor that becomes readable when any thread calls ``wake``."""

    def __init__(self) -> None:
        if LINUX and hasattr(os, "eventfd"):
            self.fd = self._write_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            self.fd, self._write_fd = os.pipe()
            os.set_blocking(self.fd, False)
            os.set_blocking(self._write_fd, False)

    def wake(self) -> None:
        try:
            os.write(self._write_fd, b"\1\0\0\0\0\0\0\0")
        except BlockingIOError:
            return  # so many wake-ups are pending that one more changes nothing

    def clear(self) -> None:
        try:
            os.read(self.fd, 4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
        if self._write_fd != self.fd:
            os.close(self._write_fd)


class Patience:
    """Waits for a descriptor by looking again and again for some microseconds before sleeping.

    To be woken from sleep costs more than a whole call takes. So where the last sleep was short,
    the next answer is probably near: look for it (as often as takes about 50 us) and sleep only
    then. Where sleeps are long the looking stops, so idle processes cost nothing.
    """

    LOOKS = 80 if limits.cpu_count() > 1 else 0  # with one core, the other side couldn't run
    SHORT_SECONDS = 0.0001

    def __init__(self, poll: Callable[[float | None], list[Any]]) -> None:
        self._poll = poll
        self._looks = 0

    def wait(self, timeout: float | None) -> list[Any]:
        """What ``poll`` gives, empty at the time-out (in ``poll``'s own unit)."""
        poll = self._poll
        for _ in range(self._looks):
            ready = poll(0)
            if ready:
                return ready
        started = time.monotonic()
        ready = poll(timeout)
        short = time.monotonic() - started < self.SHORT_SECONDS
        self._looks = self.LOOKS if short else self._looks // 2
        return ready


class Poller:
    """Readiness of many descriptors; registration may change from any thread while one polls."""

    def __init__(self) -> None:
        self._target: Any = select.epoll() if LINUX else selectors.DefaultSelector()

    def set(self, fd: int, old: int, new: int) -> None:
        """Change what ``fd`` is watched for from ``old`` to ``new`` (0: not watched)."""
        if old == new:
            return
        if not old:
            self._target.register(fd, new)
        elif not new:
            self._target.unregister(fd)
        else:
            self._target.modify(fd, new)

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """(descriptor, events) of those ready; hang-ups and errors count as readable."""
        if LINUX:
            return self._target.poll(-1 if timeout is None else timeout)  # type: ignore[no-any-return]
        return [(key.fd, events) for key, events in self._target.select(timeout)]

    def close(self) -> None:
        self._target.close()


def is_untouched(private: mmap.mmap) -> bool:
    """Whether no page of a private file mapping was written to, so that it shows the file itself.

    Linux only; False where it cannot be told.
    """
    import numpy as np

    view = np.frombuffer(private, np.uint8)
    found = bytearray(-(-len(view) // mmap.PAGESIZE) * 8)
    start = view.__array_interface__["data"][0] // mmap.PAGESIZE * 8
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if os.preadv(fd, [found], start) != len(found):
            return False
    finally:
        os.close(fd)
    # Bits 62 and 63: swapped out, in memory. Bit 61: a page of the file and not a copy of one.
    state = np.frombuffer(found, np.uint64) >> np.uint64(61)
    return not bool(np.any((state > 1) & (state & np.uint64(1) == 0)))


def page_faults() -> int:
    """How often this process was given a page until now, or a copy of one to write to."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt
