"""The start of the local engine, and the driver's end of the zygote, which starts the workers.

Imports little, so that the zygote can be started before the rest of the engine is loaded: both get
ready at the same time.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from miniray import limits
from miniray.core.local import system

if TYPE_CHECKING:
    from miniray.core.engine import Engine, InitConfig

MAX_MESSAGE = 1 << 20
# Messages with boundaries; macOS has only the second for Unix sockets.
_SOCKET_KIND = socket.SOCK_SEQPACKET if system.LINUX else socket.SOCK_DGRAM

#: Imports worth sharing by fork: loaded in the zygote once the driver has them. None of these
#: starts a thread on import. (pyarrow does, and with it pandas and sklearn: its allocator has one.)
PRELOAD = ("numpy", "torch", "scipy", "transformers")

_BOOT = (
    "import sys; sys.path[:] = {path!r}; from miniray.core.local.zygote import main; "
    "main({fd}, {modules!r})"
)


def start(config: InitConfig) -> Engine:
    """Start the engine in this process, which becomes the driver.

    Raise ``EngineStartError``, and leave nothing behind, if that fails. The error names the limit
    that was reached, if one was.
    """
    zygote = None
    try:
        zygote = Zygote()
        from miniray.core.local import driver  # only now: see above

        return driver.start(config, zygote)
    except BaseException as error:
        if zygote is not None:
            zygote.close()
        if isinstance(error, OSError) or limits.is_thread_failure(error):
            raise limits.to_start_error(error) from error
        raise


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """What every process of a session knows from birth.

    ``usage_fd`` is this process's own number for the shared table of memory use.
    """

    session_id: str
    directory: str
    token: bytes
    namespace: str
    resources: dict[str, float]
    usage_fd: int
    memory_limit: int
    spill_dir: str
    log_dir: str

    def path(self, proc: int) -> str:
        """The socket on which process number ``proc`` listens."""
        return f"{self.directory}/{proc}"


class Zygote:
    """The driver's end: start, kill and hear about worker processes."""

    def __init__(self) -> None:
        system.fill_standard_descriptors()
        ours, theirs = socket.socketpair(socket.AF_UNIX, _SOCKET_KIND)
        self.sock = ours
        # Reports of many exits may queue up while the driver is busy: spawning must not wait.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._lock = threading.Lock()
        # Loaded while this process gets the rest of the engine ready.
        shared = [m for m in PRELOAD if m in sys.modules]
        boot = _BOOT.format(path=sys.path, fd=theirs.fileno(), modules=shared)
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # Its own session: Ctrl-C in the terminal reaches the driver, which decides.
        try:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", boot],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._preloaded = set(shared)
        self._spawned = False

    def begin(self, info: SessionInfo) -> None:
        """Tell it about its session. Before that it only gets ready."""
        self._send(("session", info, os.getpid()), (info.usage_fd,))

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(self, request: dict[str, Any], fds: Sequence[int], modules: Sequence[str]) -> None:
        """Fork a worker with the descriptors (listener, stdout, stderr).

        ``modules`` are loaded in the zygote first, for this worker and all later ones.
        """
        shared = [m for m in PRELOAD if m in sys.modules]
        wanted = [m for m in (*shared, *modules) if m not in self._preloaded]
        self._preloaded.update(wanted)
        self._spawned = True
        self._send(("spawn", request, wanted), fds)

    def kill(self, proc: int) -> None:
        """Kill a worker and whatever it started."""
        self._send(("kill", proc))

    def _send(self, message: Any, fds: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        # A zygote that is gone is noticed by whoever reads from it, with all its workers.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendmsg([pickle.dumps(message, 5)], ancillary)

    def receive(self) -> list[Any] | None:
        """Reports that have come: ("exited", proc, status), ...; None when the zygote is gone."""
        reports: list[Any] = []
        while True:
            try:
                data = self.sock.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return reports
            except OSError:
                data = b""
            if not data:
                return reports or None
            reports.append(pickle.loads(data))

    def close(self) -> None:
        """End all workers and the zygote, and wait until they are gone."""
        if not self._spawned:  # it may be in the midst of its imports, and has nobody to end
            self._process.kill()
        self._send(("exit",))
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.sock.close()
