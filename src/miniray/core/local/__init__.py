"""The local engine: processes of this machine and shared memory. Started in the driver here."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import tempfile
from typing import Any

from miniray.core import machine, session
from miniray.core.engine import InitConfig
from miniray.core.local import system
from miniray.core.local.control import Control
from miniray.core.local.engine import LocalEngine
from miniray.core.local.logs import LogReader, remove_old_logs
from miniray.core.local.node import DRIVER, Node, SessionInfo
from miniray.core.local.store import Usage, default_spill_dir
from miniray.errors import EngineStartError

_MEMORY_SHARE = 0.3
_MAX_PATH = 90  # a Unix socket's path has room for about 100 characters


def start(config: InitConfig) -> LocalEngine:
    """Start the engine in this process, which becomes the driver.

    Raises ``EngineStartError``; nothing is left behind then.
    """
    try:
        return _start(config)
    except OSError as error:
        raise EngineStartError(f"cannot start the local engine: {error}") from error


def _start(config: InitConfig) -> LocalEngine:
    system.raise_descriptor_limit()
    base = _private_directory()
    _sweep(base)
    session_id, directory, lock_fd = _session_directory(base)
    log_parent = os.path.join(base, "logs")
    os.makedirs(log_parent, mode=0o700, exist_ok=True)
    remove_old_logs(log_parent)

    cores = machine.cpu_count()
    cpus = config.num_cpus or max(cores, config.num_workers or 0)
    num_workers = config.num_workers or max(1, int(cpus))
    gpus = len(machine.gpu_ids()) if config.num_gpus is None else config.num_gpus
    resources = {"CPU": float(cpus), "memory": float(machine.memory_total())}
    if gpus:
        resources["GPU"] = float(gpus)
    limit = int(config.object_store_memory or machine.memory_total() * _MEMORY_SHARE)
    usage = Usage.create(limit)
    info = SessionInfo(
        session_id=session_id,
        directory=directory,
        token=secrets.token_bytes(32),
        namespace=config.namespace or f"session-{session_id}",
        resources=resources,
        usage_fd=usage.fd,
        memory_limit=limit,
        spill_dir=default_spill_dir(),
        log_dir=os.path.join(log_parent, session_id),
    )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(info.path(DRIVER))
    listener.listen(1024)
    node = Node(info, DRIVER, 1, listener)
    engine = LocalEngine(node, range(int(gpus)))
    node.engine = engine
    node.start()
    control = Control(node, LogReader(info.log_dir, config.log_to_driver), num_workers)
    node.on_peer_lost = control.peer_lost

    def close() -> None:
        if node.closing:
            return
        control.close()
        node.close()
        os.close(lock_fd)
        os.close(usage.fd)
        shutil.rmtree(directory, ignore_errors=True)

    engine.close = close
    return engine


def _private_directory() -> str:
    """A directory only this user can enter, with a path short enough for sockets in it."""
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if len(parent) > _MAX_PATH - 40 or not os.access(parent, os.W_OK):
        parent = "/tmp"
    base = os.path.join(parent, f"miniray-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(base, 0o700)
    status = os.lstat(base)
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or os.path.islink(base):
        raise EngineStartError(
            f"{base} must be a directory that belongs to you and that only you can enter "
            "(somebody else made it, or its mode is not 0700); remove it or set TMPDIR"
        )
    return base


def _session_directory(base: str) -> tuple[str, str, int]:
    """A new session's id, its directory, and the lock in it, which says that it is alive."""
    while True:
        session_id = secrets.token_hex(6)
        directory = os.path.join(base, session_id)
        os.mkdir(directory, 0o700)
        path = os.path.join(directory, "lock")
        lock_fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX)
        if os.path.exists(path):
            return session_id, directory, lock_fd
        os.close(lock_fd)  # somebody swept it before we had the lock


def _sweep(base: str) -> None:
    """Remove sockets of sessions in which driver and zygote were killed at the same moment."""
    for entry in os.scandir(base):
        if entry.name == "logs" or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            fd = os.open(os.path.join(entry.path, "lock"), os.O_RDWR)
        except OSError:
            continue  # being made or being removed at this moment
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # alive
        else:
            shutil.rmtree(entry.path, ignore_errors=True)
        finally:
            os.close(fd)


def _after_fork_in_child() -> None:
    """A forked child has the driver's memory but not its threads: it must not act as the driver."""
    engine: Any = session._engine
    if isinstance(engine, LocalEngine):
        engine.node.closing = True
        session.install(None)


os.register_at_fork(after_in_child=_after_fork_in_child)
