"""Starting the local engine: this process becomes the driver of a session."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile

from miniray import limits
from miniray.core import machine
from miniray.core.engine import STORE_SHARE, InitConfig
from miniray.core.local import system, waiting
from miniray.core.local.control import Control
from miniray.core.local.engine import LocalEngine
from miniray.core.local.logs import LogReader, remove_old_logs
from miniray.core.local.node import Node
from miniray.core.local.peers import DRIVER
from miniray.core.local.spawner import SessionInfo, Zygote
from miniray.core.local.store import Usage, default_spill_dir
from miniray.errors import EngineStartError

_MAX_PATH = 90  # a Unix socket's path has room for about 100 characters


def start(config: InitConfig, zygote: Zygote) -> LocalEngine:
    """Make the session and its control plane around a zygote that is starting up."""
    system.raise_descriptor_limit()
    _check_room(config.num_workers or 1)  # the default pool may never be needed in full
    with contextlib.ExitStack() as stack:  # undone in reverse, here on failure, else at shutdown
        base = _private_directory()
        _sweep(base)
        session_id, directory, lock_fd = _session_directory(base)
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.callback(os.close, lock_fd)
        log_parent = os.path.join(base, "logs")
        os.makedirs(log_parent, mode=0o700, exist_ok=True)
        remove_old_logs(log_parent)

        cpus = config.num_cpus or max(limits.cpu_count(), config.num_workers or 0)
        gpus = len(machine.gpu_ids()) if config.num_gpus is None else config.num_gpus
        resources = machine.Resources(cpus, int(gpus)).total()
        limit = int(config.object_store_memory or limits.memory_total() * STORE_SHARE)
        usage = Usage.create(limit)
        stack.callback(os.close, usage.fd)
        info = SessionInfo(
            session_id=session_id,
            directory=directory,
            token=os.urandom(32),
            namespace=config.namespace or f"session-{session_id}",
            resources=resources,
            usage_fd=usage.fd,
            memory_limit=limit,
            spill_dir=default_spill_dir(),
            log_dir=os.path.join(log_parent, session_id),
        )
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stack.callback(listener.close)
        listener.bind(info.path(DRIVER))
        listener.listen(1024)
        node = Node(info, DRIVER, 1, listener)
        engine = LocalEngine(node, range(int(gpus)))
        node.engine = engine
        stack.callback(node.close)
        node.start()
        num_workers = config.num_workers or max(1, int(cpus))
        logs = LogReader(info.log_dir, config.log_to_driver)
        control = Control(node, logs, num_workers, zygote)
        stack.callback(control.close)
        stack.callback(waiting.restore_handler)
        node.on_peer_lost = control.peer_lost
        engine.close = stack.pop_all().close
    return engine


def _check_room(workers: int) -> None:
    """Raise ``EngineStartError`` if limits of the system leave too little room for ``workers``.

    The driver has two threads and about ten descriptors. Each worker has two threads, and the
    driver holds its pipes, log file and connections.
    """
    limits.check_room(processes=2 + 2 * workers, descriptors=16 + 6 * workers)


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
        session_id = os.urandom(6).hex()
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
