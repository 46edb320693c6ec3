"""The zygote: a small single-threaded process that forks the workers.

Forking the driver itself would copy its threads' locks in any state; starting a fresh interpreter
for each worker costs its imports each time. The zygote has the imports and nothing else, so a fork
is safe and takes milliseconds.

It also is what ends the workers: it watches the driver's process (not a pipe, which a forked child
of the driver would hold open) and kills every worker's process group when the driver is gone. If
the zygote itself is killed, the kernel kills the workers (parent-death signal).
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from miniray import limits
from miniray.core.local import system
from miniray.core.local.spawner import MAX_MESSAGE, SessionInfo

_FAILED = 1 << 8  # the wait status of a process that exited with 1


def main(fd: int, modules: Sequence[str]) -> None:
    """Load ``modules`` and serve until told to exit or until the driver is gone."""
    system.adopt_orphans()
    system.raise_descriptor_limit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Read by OpenMP when numpy or torch is loaded. Many workers with as many threads each as there
    # are cores would fight over them; a worker that asked for more CPUs gets more threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sock = socket.socket(fileno=fd)
    os.set_inheritable(fd, False)
    import miniray.core.local.worker  # noqa: F401  # what every worker needs, before the first fork

    _load(modules)
    data, ancillary, _, _ = sock.recvmsg(MAX_MESSAGE, socket.CMSG_SPACE(4), system.CLOEXEC_FLAG)
    kind, *rest = pickle.loads(data) if data else ("exit",)
    if kind == "exit":
        return  # the driver gave up before it began
    info, driver_pid = rest
    info = dataclasses.replace(info, usage_fd=array.array("i", ancillary[0][2])[0])
    _Server(sock, info, driver_pid).run()


class _Server:
    def __init__(self, sock: socket.socket, info: SessionInfo, driver_pid: int) -> None:
        self._sock = sock
        self._info = info
        self._driver_pid = driver_pid
        self._pids: dict[int, int] = {}  # by proc
        self._procs: dict[int, int] = {}  # by pid

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        driver_fd = -1
        if hasattr(os, "pidfd_open"):
            try:
                driver_fd = os.pidfd_open(self._driver_pid)
                poll.register(driver_fd, select.POLLIN)
            except ProcessLookupError:
                self._finish()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll.register(wake_read, select.POLLIN)
        gc.freeze()  # what is here is shared with the workers: do not write to it
        while True:
            # Without pidfd (macOS) the driver's end shows as our being adopted by somebody else.
            for ready, _ in poll.poll(None if driver_fd >= 0 else 1000):
                if ready == driver_fd:
                    self._finish()
                elif ready == wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_read, 4096)
                elif not self._serve():
                    self._finish()
            self._reap()
            if driver_fd < 0 and os.getppid() != self._driver_pid:
                self._finish()

    def _serve(self) -> bool:
        """Handle one request; False when the driver wants no more or is gone."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(
                MAX_MESSAGE, socket.CMSG_SPACE(16), system.CLOEXEC_FLAG
            )
        except ConnectionResetError:
            return False
        fds: list[int] = []
        for _, _, raw in ancillary:
            fds.extend(array.array("i", raw[: len(raw) - len(raw) % 4]))
        if not data:
            return False
        kind, *rest = pickle.loads(data)
        if kind == "exit":
            return False
        if kind == "kill":
            if rest[0] in self._pids:
                _kill_group(self._pids[rest[0]])
            return True
        request, modules = rest
        if modules:
            _load(modules)
            gc.freeze()
        self._fork(request, fds)
        return True

    def _fork(self, request: dict[str, Any], fds: list[int]) -> None:
        proc: int = request["proc"]
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or too many processes: the others run on
            why = limits.describe_reached(error)
            os.write(fds[2], f"the process could not be started: {why}\n".encode())
            pid = -1
        if pid == 0:
            self._become_worker(request, fds, parent)
        for fd in fds:
            os.close(fd)
        if pid < 0:
            self._report(("exited", proc, _FAILED))
            return
        self._pids[proc] = pid
        self._procs[pid] = proc
        self._report(("spawned", proc, pid))

    def _become_worker(self, request: dict[str, Any], fds: list[int], parent: int) -> None:
        """In the forked child; never returns."""
        status = 1
        try:
            # A session, and so a process group, of its own: killing it takes along what it started,
            # and Linux shares the CPU out by sessions, as it does for workers of other launchers.
            os.setsid()
            system.die_with_parent()
            if os.getppid() != parent:
                os._exit(1)  # it died before the line above took effect
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._sock.close()
            listener_fd, out_fd, err_fd = fds
            os.dup2(out_fd, 1)
            os.dup2(err_fd, 2)
            os.close(out_fd)
            os.close(err_fd)
            os.environ.update(request["env"])
            sys.path[:] = request["path"]
            with contextlib.suppress(OSError):
                os.chdir(request["cwd"])
            from miniray.core.local.worker import worker_main

            status = worker_main(self._info, request, socket.socket(fileno=listener_fd))
        except BaseException as error:
            import traceback

            traceback.print_exc()
            if limits.limit_reached(error) is not None:
                print(limits.describe_reached(error), file=sys.stderr)
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            proc = self._procs.pop(pid, None)
            if proc is not None:  # else: an orphan of a worker, adopted
                # What it started and left behind. Not its own pid, which may be another's by now.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                del self._pids[proc]
                self._report(("exited", proc, status))

    def _report(self, message: Any) -> None:
        # Blocks while the driver is behind with reading; if it is gone, the next poll says so.
        with contextlib.suppress(OSError):
            self._sock.send(pickle.dumps(message, 5))

    def _finish(self) -> None:
        """Kill and reap every worker and everything they left, remove the sockets, exit."""
        self._sock.close()
        for pid in self._procs:
            _kill_group(pid)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _kill_descendants(os.getpid())
        shutil.rmtree(self._info.directory, ignore_errors=True)
        os._exit(0)


def _load(modules: Sequence[str]) -> None:
    for name in modules:
        # A module that fails here fails in the worker again, where the user can see it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _kill_descendants(pid: int) -> None:
    """Kill and reap children until there are none; orphans of theirs come to us and go next."""
    while True:
        try:
            done, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if done:
            continue
        children = _children(pid)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except FileNotFoundError:  # no /proc, or a kernel without this file
        import psutil

        return [child.pid for child in psutil.Process(pid).children()]
