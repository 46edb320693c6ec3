"""The processes of a session: numbered, started by the zygote, heard of when they end, and how."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from miniray import limits
from miniray.core import machine, startup
from miniray.core.local.logs import LogReader
from miniray.core.local.node import Node
from miniray.core.local.peers import DRIVER
from miniray.core.local.spawner import Zygote
from miniray.core.local.store import Usage
from miniray.core.machine import Grant


@dataclasses.dataclass(eq=False)
class Worker:
    """One process: an actor's, or one of the pool's. The fields at the end are for its keeper."""

    proc: int
    name: str
    listener: socket.socket | None  # until it is launched
    slot: int = 0  # in the table of memory in use, from then on
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    pid: int = 0
    grant: Grant | None = None
    blocked: bool = False  # waits in `get`: its CPUs are free for others
    at_exit: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    actor: Any = None  # the directory's record, if it is an actor's
    holder: int | None = None  # the pool's: the submitter that leases it
    recalled: bool = False
    threads: int = 0  # OpenMP's, if not the default
    single_use: bool = False  # not leased a second time
    leases: int = 0  # until now
    stopping: bool = False  # the driver waits for its answer to "when_idle"


class Processes:
    """Starts and ends workers. The caller holds ``lock``, the control plane's own.

    ``on_exit(worker, wait status, why it never ran)`` is called in the I/O thread, without the
    lock, for each that ends.
    """

    def __init__(
        self,
        node: Node,
        logs: LogReader,
        lock: threading.RLock,
        on_exit: Callable[[Worker, int, str], None],
    ) -> None:
        self.node = node
        self.logs = logs
        self.lock = lock
        self.workers: dict[int, Worker] = {}
        self._on_exit = on_exit
        self._next_proc = DRIVER
        self._free_slots = list(range(Usage.SLOTS - 1, 1, -1))
        self._zygote: Zygote | None = None
        self._closing = False

    def use(self, zygote: Zygote) -> Zygote:
        zygote.begin(self.node.info)
        self.node.watch(zygote.sock.fileno(), lambda _: self._on_zygote())
        self._zygote = zygote
        return zygote

    def reserve(self, name: str) -> Worker:
        """A new process's number and socket; callers can connect before it runs."""
        self._next_proc += 1
        proc = self._next_proc
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self.node.info.path(proc))
        listener.listen(1024)
        worker = Worker(proc, name, listener)
        self.workers[proc] = worker
        return worker

    def launch(self, worker: Worker) -> None:
        """Start the process. Where that fails its end is reported, like that of one that ran."""
        assert worker.listener is not None
        try:
            zygote = self._zygote or self.use(Zygote())
            if not self._free_slots:
                raise OSError(errno.EAGAIN, f"{len(self.workers)} run already")
            out_fd, err_fd = self.logs.add(
                worker.proc, worker.name, worker.env.get(startup.LABEL, "")
            )
        except OSError as error:
            why = f"{worker.name} could not be started: {limits.describe_reached(error)}"
            self.node.post(lambda: self._on_exit(worker, 0, why))
            return
        worker.slot = self._free_slots.pop()
        env = dict(worker.env)
        if worker.grant is not None and worker.grant.gpus:
            names = machine.gpu_ids()
            env["CUDA_VISIBLE_DEVICES"] = ",".join(
                names[i] if i < len(names) else str(i) for i in worker.grant.gpus
            )
        threads = 0 if worker.grant is None else omp_threads(worker.grant.cpus)
        if threads:
            env.setdefault("OMP_NUM_THREADS", str(threads))
        request = {
            "proc": worker.proc,
            "slot": worker.slot,
            "name": worker.name,
            "env": env,
            "runtime_env": worker.env,
            "path": sys.path,
            "cwd": _cwd(),
            "gpu_ids": worker.grant.gpus if worker.grant else (),
            "is_actor": worker.actor is not None,
        }
        is_async = worker.actor is not None and worker.actor.is_async
        modules = ["miniray.core.local.async_executor"] if is_async else []
        modules += worker.env.get(startup.PRELOAD, "").split()
        zygote.spawn(request, (worker.listener.fileno(), out_fd, err_fd), modules)
        os.close(out_fd)
        os.close(err_fd)
        worker.listener.close()
        worker.listener = None

    def _on_zygote(self) -> None:
        zygote = self._zygote
        if zygote is None:
            return
        reports = zygote.receive()
        if reports is None:
            self._zygote_lost(zygote)
            return
        for kind, proc, value in reports:
            if kind == "spawned":
                self.logs.set_pid(proc, value)
                worker = self.workers.get(proc)
                if worker is not None:
                    worker.pid = value
            else:
                self._ended(proc, value)

    def _zygote_lost(self, zygote: Zygote) -> None:
        """Somebody killed the zygote: all workers die with it. The next one starts anew."""
        self.node.unwatch(zygote.sock.fileno())
        with self.lock:
            self._zygote = None
            running = [w for w in self.workers.values() if w.listener is None]
        if self._closing:
            return
        zygote.close()
        for worker in running:
            if worker.pid:  # the kernel killed the worker itself, not what it had started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)
            self._ended(worker.proc, int(signal.SIGKILL))

    def _ended(self, proc: int, status: int) -> None:
        worker = self.workers.get(proc)
        if worker is not None and not self._closing:
            self._on_exit(worker, status, "")

    def kill(self, worker: Worker) -> None:
        """Kill a process that runs, and what it started; its end is reported like any other."""
        if self._zygote is not None:
            self._zygote.kill(worker.proc)

    def remove(self, worker: Worker) -> None:
        """Forget a process that ended or never ran; its number is not used again."""
        self.workers.pop(worker.proc, None)
        if worker.slot:
            self.node.usage.clear(worker.slot)
            self._free_slots.append(worker.slot)
        if worker.listener is not None:
            worker.listener.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.node.info.path(worker.proc))

    def running(self) -> list[int]:
        return [w.proc for w in self.workers.values() if w.listener is None]

    def close(self) -> None:
        """End every process and wait until they are gone."""
        with self.lock:
            self._closing = True
            zygote, self._zygote = self._zygote, None
            listeners = [w.listener for w in self.workers.values() if w.listener is not None]
        if zygote is not None:
            self.node.unwatch(zygote.sock.fileno())
            zygote.close()
        for listener in listeners:
            listener.close()
        self.logs.close()


def omp_threads(cpus: float) -> int:
    """Return how many OpenMP threads a worker with this many CPUs gets; 0 for the default."""
    return int(cpus) if cpus > 1 else 0


def _cwd() -> str:
    """Where the driver is; nowhere if somebody removed that directory."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def exit_fields(pid: int, status: int) -> dict[str, Any]:
    """Return the fields of an error about a process that ended with this wait status."""
    fields: dict[str, Any] = {"pid": pid, "host": socket.gethostname()}
    if os.WIFSIGNALED(status):
        return {**fields, "signal": _signal_name(os.WTERMSIG(status))}
    return {**fields, "exit_code": os.WEXITSTATUS(status)}


def describe(
    name: str, pid: int, status: int, lines: list[str], log_path: str, by_us: bool = False
) -> str:
    """One paragraph: who, how, the last lines of output, where the rest is."""
    who = f"{name} (pid {pid})"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        how = f"was killed by {_signal_name(number)}"
        if number == signal.SIGKILL and not by_us:
            how += " (by somebody, or by the kernel because memory ran out)"
    else:
        how = f"exited with code {os.WEXITSTATUS(status)}"
    text = f"{who} {how}"
    if lines:
        text += "\nIts last output:\n" + "\n".join(f"    {line}" for line in lines)
    if log_path:
        text += f"\nIts whole output is in {log_path}"
    return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"
