"""Processes that need torch, quickly: forked from one that has it loaded.

Every start of the local engine is an interpreter that loads torch for its workers: seconds of CPU,
and the tests of trainers start hundreds. ``Mother`` is one such interpreter for a whole test
process; with ``forking`` the engine's zygotes are its children. From the fork on they do what they
always do. How a zygote starts by itself is for the tests of the engine, which leave this alone.

``run`` has a script run likewise, in a process of its own with engines that start as quickly.
"""

import ast
import contextlib
import fcntl
import functools
import os
import pickle
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from unittest import mock

from miniray.core.local import spawner, zygote

#: Whether a process that is not our child can be waited for.
FORKS = hasattr(os, "pidfd_open")

#: What trainers' workers need beside what the driver has loaded.
MODULES = (
    "miniray.core.local.worker",
    "torch",
    "miniray.doctor.instrument",
    "miniray.train.ddp.replicated",
)

#: In place of the command line of a zygote, the values in it.
ARGUMENTS = "{path!r}, {fd}, {modules!r}"

#: As a zygote's own command line, to which forks return: stacks look as they always do.
_BOOT = (
    "import sys; plain = sys.path[1:]; sys.path[:] = {path!r}; from tests.mother import serve; "
    "serve({fd}, plain)()"
)


class Mother:
    """Starts when it is needed first, or with ``start``."""

    def __init__(self, sock=None):
        self._sock = sock
        self._process = None
        self._lock = threading.Lock()

    def close(self):
        if self._process is not None:
            self._sock.shutdown(socket.SHUT_RDWR)  # forked children of the tests may have it, too
            self._sock.close()
            self._process.wait(timeout=30)

    @contextlib.contextmanager
    def forking(self):
        """In this process, the zygotes of engines that start meanwhile are forked."""
        with (
            mock.patch.multiple(spawner, **self.stand_ins()) if FORKS else contextlib.nullcontext()
        ):
            yield

    def stand_ins(self):
        """What takes the place of parts of the engine's module that starts zygotes."""
        process = types.SimpleNamespace(**{**vars(subprocess), "Popen": self._fork_zygote})
        return {"subprocess": process, "_BOOT": ARGUMENTS}

    def run(self, script, *arguments, cwd, env, timeout):
        """What ``subprocess.run([sys.executable, script, *arguments], ...)`` gives."""
        argv = [str(script), *map(str, arguments)]
        if not FORKS:
            return subprocess.run(
                [sys.executable, *argv],
                cwd=cwd, env=env, timeout=timeout, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = self._fork({1: out.fileno(), 2: err.fileno()}, cwd, env, argv=argv)
            try:
                code = child.wait(timeout)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                raise
            out.seek(0)
            err.seek(0)
            texts = out.read().decode(), err.read().decode()
        return subprocess.CompletedProcess(argv, code, *texts)

    def _fork_zygote(self, command, *, pass_fds, stdin, start_new_session):
        assert (command[-2], stdin, start_new_session) == ("-c", subprocess.DEVNULL, True)
        path, fd, modules = ast.literal_eval(command[-1])
        assert pass_fds == (fd,)
        descriptors = {1: 1, 2: 2, fd: fd}
        return self._fork(descriptors, os.getcwd(), os.environ, path=path, fd=fd, modules=modules)

    def _fork(self, descriptors, folder, environment, **what):
        request = (list(descriptors), str(folder), dict(environment), what)
        self.start()
        ended, report = os.pipe()
        with self._lock, open(report, "wb"):
            fds = [*descriptors.values(), report]
            socket.send_fds(self._sock, [pickle.dumps(request)], fds)
            data, fds, _, _ = socket.recv_fds(self._sock, 4096, 1)
        return _Forked(pickle.loads(data), fds[0], ended)

    def start(self):
        """Get ready, before it is needed."""
        with self._lock:
            if self._sock is None:
                self._start()

    def _start(self):
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Its own session: Ctrl-C is for the tests. It ends when their end of the socket does.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT.format(path=sys.path, fd=theirs.fileno())],
            cwd=Path(__file__).parents[1],
            # Read when numpy and torch are loaded, before a zygote can set it for itself.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()


class _Forked:
    """What the engine uses of a ``subprocess.Popen``, for a process that is not our child."""

    def __init__(self, pid, pidfd, ended):
        self.pid = pid
        self._pidfd, self._ended = pidfd, ended
        self._code = None

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self, timeout=None):
        """Its exit code, when nothing is left of it: its mother has waited for it."""
        if self._code is None:
            poll = select.poll()
            poll.register(self._ended, select.POLLIN)
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a forked process", timeout)
            self._code = pickle.loads(os.read(self._ended, 4096))
        return self._code

    def __del__(self):
        os.close(self._pidfd)
        os.close(self._ended)


# -- in the mother ---------------------------------------------------------------------------------


def serve(fd, plain):
    """Fork until the tests are gone; in each child, return what it is to do.

    ``plain`` is the path that an interpreter has where nobody added to it.
    """
    sock = socket.socket(fileno=fd)
    zygote._load(MODULES)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    children = {}
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                poll.unregister(ready)
                _bury(ready, children.pop(ready))
                continue
            data, fds, _, _ = socket.recv_fds(sock, spawner.MAX_MESSAGE, 16)
            if not data:
                sys.exit()
            numbers, folder, environment, what = pickle.loads(data)
            report = fds.pop()
            zygote._load(what.get("modules", ()))
            pid = os.fork()
            if pid == 0:
                sock.close()
                for other in (report, *children, *children.values()):
                    os.close(other)
                _settle(folder, environment, dict(zip(numbers, fds, strict=True)))
                return _zygote(**what) if "fd" in what else _script(plain, **what)
            for received in fds:
                os.close(received)
            child = os.pidfd_open(pid)
            children[child] = report
            poll.register(child, select.POLLIN)
            socket.send_fds(sock, [pickle.dumps(pid)], [child])


def _bury(child, report):
    ended = os.waitid(os.P_PIDFD, child, os.WEXITED)
    os.close(child)
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):  # nobody waited so long
        os.write(report, pickle.dumps(code))
    os.close(report)


def _settle(folder, environment, descriptors):
    """In the forked child: what a process that was started by the tests would have."""
    os.setsid()
    # Out of the way first: a number that one of these is to have may be another's now.
    above = max(descriptors) + 1
    moved = {to: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for to, fd in descriptors.items()}
    for fd in descriptors.values():
        os.close(fd)
    for to, fd in moved.items():
        os.dup2(fd, to)
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # each its own


def _zygote(path, fd, modules):
    sys.path[:] = path
    return functools.partial(zygote.main, fd, modules)


def _script(plain, argv):
    """A fork of the script's process, before it has threads, is the mother of its zygotes."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        return serve(theirs.detach(), plain)
    theirs.close()
    vars(spawner).update(Mother(ours).stand_ins())
    sys.argv[:] = argv
    sys.path[:] = [os.path.dirname(os.path.abspath(argv[0])), *plain]
    return functools.partial(runpy.run_path, argv[0], run_name="__main__")
