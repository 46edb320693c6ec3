"""A worker process: takes calls, runs them, sends results.

The main thread reads call connections itself and runs the user's code (signals, debuggers and
libraries that insist on the main thread work). Actors with ``max_concurrency`` run their calls in
threads, actors with ``async def`` methods in an event loop; see ``executors``.

The process ends when told to, when the driver is gone, or when user code ends it. What it was
running is then lost; callers learn of it by the connection closing.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import signal
import socket
import sys
import threading
from collections import deque
from types import FrameType
from typing import TYPE_CHECKING, Any

from miniray.core import session, startup
from miniray.core.local import system
from miniray.core.local.calls import CALL, CALL_PLAIN, FUNCTION, R_STOLEN
from miniray.core.local.engine import LocalEngine
from miniray.core.local.executors import Executor, Job, ThreadExecutor, arguments
from miniray.core.local.node import Node, owner_of
from miniray.core.local.objects import Blob
from miniray.core.local.peers import BLOCKED, CANCEL, DRIVER, EXIT, FORGET, INIT, STEAL
from miniray.core.local.spawner import SessionInfo
from miniray.core.local.wire import Closed, Stream, frame
from miniray.errors import TaskError

if TYPE_CHECKING:
    from miniray.core.local.async_executor import AsyncExecutor

#: How long a worker that ends may take to tidy up.
_LAST_SECONDS = 30.0


def worker_main(info: SessionInfo, request: dict[str, Any], listener: socket.socket) -> int:
    """Run a worker until its end; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.breakpointhook = _breakpoint
    _use_threads(request["env"])
    _draw_other_numbers()
    node = Node(info, request["proc"], request["slot"], listener)
    node.on_peer_lost = lambda proc: os._exit(1) if proc == DRIVER else None
    node.crashed = lambda error: os._exit(1)  # type: ignore[method-assign]
    engine = LocalEngine(node, request["gpu_ids"], request["runtime_env"])
    engine.in_worker = True
    node.engine = engine
    session.install(engine)
    server = Server(node, engine, request["name"], request["is_actor"])
    node.start()
    status = server.run()
    server.leave()
    return status


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    """In the place of pdb, which would read the end of its input; another debugger may be named."""
    if os.environ.get("PYTHONBREAKPOINT"):
        return sys.__breakpointhook__(*args, **kwargs)  # noqa: T100
    raise RuntimeError(
        "breakpoint() in a worker, which has no terminal: run the script with "
        "MINIRAY_BACKEND=inline, and everything is in one process"
    )


def _use_threads(env: dict[str, str]) -> None:
    """OpenMP read its number of threads in the zygote; torch can be told again."""
    torch = sys.modules.get("torch")
    if torch is not None and env.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))


def _draw_other_numbers() -> None:
    """All workers are copies of one process, down to its random numbers; Python's own see to it."""
    numpy_random, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
    if numpy_random is not None:
        numpy_random.seed()
    if torch is not None:
        torch.default_generator.seed()


class Server:
    """The calls of one worker."""

    def __init__(self, node: Node, engine: LocalEngine, name: str, is_actor: bool) -> None:
        self.node = node
        self.engine = engine
        self.name = name
        self.executor = Executor(node, name)
        self._is_actor = is_actor
        self._backlog: deque[Job] = deque()
        self._poller = system.Poller()
        self._waker = system.Waker()
        self._poller.set(self._waker.fd, 0, system.IN)
        self._connections: dict[int, Stream] = {}
        self._init: queue.SimpleQueue[tuple[Any, list[Blob]]] = queue.SimpleQueue()
        self._exiting = False
        self._waiting = 0  # threads and coroutines that wait inside a task
        self._waiting_lock = threading.Lock()
        self._told: int | None = None
        self._async: AsyncExecutor | None = None
        node.on_calls = self._connected
        node.messages[EXIT] = lambda *_: self._exit()
        node.messages[INIT] = lambda _, meta, blobs: self._init.put((meta, blobs))
        node.messages[CANCEL] = lambda _, meta, __: self._cancel(*meta)
        node.messages[FORGET] = lambda _, id, __: self.executor.forget(id)
        node.messages[STEAL] = lambda proc, thief, _: self._give_back(proc, thief)
        if not is_actor:
            engine.on_block = self._on_block

    def run(self) -> int:
        signal.signal(signal.SIGINT, self._on_interrupt)
        # Forked children (a DataLoader's, say) must not act as this worker.
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        try:
            if self._is_actor and not self._construct():
                return 1
            if self._async is not None:
                if self._exiting:  # told so before there was a loop to stop
                    self._async.stop()
                return self._async.run(self._connections)
            self._loop()
        except SystemExit as error:
            return self.executor.exit_status(error)
        return 0

    def leave(self) -> None:
        """End as any program does: exit handlers run, files of the user's object are flushed.

        One that does not come to an end is ended, and shows where it was.
        """
        faulthandler.dump_traceback_later(_LAST_SECONDS, exit=True, file=2)
        if self._async is not None:
            self._async.close()
        atexit._run_exitfuncs()
        self.executor.instance = None
        gc.collect()

    # -- the actor itself -------------------------------------------------------------------------

    def _construct(self) -> bool:
        """Wait for the class and its arguments and make the instance; False if that failed."""
        meta, (spec, *blobs) = self._init.get()
        self.engine.set_actor(meta["actor_id"], meta["name"], meta["restarts"])
        label = self.name
        make: Any = None

        def construct() -> Any:
            cls, wrapper = spec.load(self.node)
            nonlocal label
            label = cls.__name__
            args, kwargs = arguments(self.node, blobs, meta["places"])
            return startup.construct(cls, args, kwargs, wrapper)

        try:
            if meta["is_async"]:
                # Here: most workers never need an event loop.
                from miniray.core.local.async_executor import AsyncExecutor

                limit = meta["max_concurrency"] or 1000
                self._async = AsyncExecutor(self.node, self.name, limit, self._read)
                self._use(self._async)
                make = self._async.construct(construct)
            else:
                make = construct()
        except SystemExit:
            raise
        except BaseException as error:
            failure = TaskError.capture(error, f"{label}.__init__", self.name, os.getpid())
            self.node.ask_and_wait(DRIVER, "actor_failed", (meta["actor_id"], str(failure)))
            return False
        if not meta["is_async"] and (meta["max_concurrency"] or 1) > 1:
            self._use(ThreadExecutor(self.node, self.name, meta["max_concurrency"]))
        self.executor.instance = make
        self.executor.class_name = label
        return True

    def _use(self, executor: Executor) -> None:
        executor.cancelled = self.executor.cancelled  # some may have been cancelled before it began
        self.executor = executor

    # -- reading calls ----------------------------------------------------------------------------

    def _connected(self, sock: socket.socket, proc: int) -> None:
        """A caller connected (I/O thread). Its calls are read by the main thread."""
        stream = Stream(sock, proc, self.node.watch_output)
        stream.handler = lambda _: self._flush(stream)
        self._connections[stream.fd] = stream
        self._poller.set(stream.fd, 0, system.IN)
        if self._async is not None:
            self._async.add(stream)

    def _flush(self, stream: Stream) -> None:
        try:
            self.node.flush_output(stream)
        except Closed:
            self.node.rewatch(stream, remove=stream.events)

    def _loop(self) -> None:
        backlog, node, executor = self._backlog, self.node, self.executor
        patience = system.Patience(self._poller.poll)
        while True:
            while backlog:
                try:
                    job = backlog.popleft()
                except IndexError:
                    break  # given back by the I/O thread in this very moment
                executor.run(job)
            if node.dirty:
                node.flush_calls()
            ready = patience.wait(0 if self._exiting else None)
            if self._exiting and not ready:
                executor.finish()
                return
            for fd, _ in ready:
                if fd == self._waker.fd:
                    self._waker.clear()
                    continue
                stream = self._connections.get(fd)
                if stream is not None:  # otherwise the I/O thread has just dropped it
                    backlog.extend(self._read(stream))

    def _read(self, stream: Stream) -> list[Job]:
        """Calls that arrived on ``stream``; a caller that is gone is dropped."""
        try:
            with stream.read_lock:
                frames = stream.read()
        except Closed:
            self._disconnect(stream)
            return []
        jobs = []
        for kind, body, fds in frames:
            if kind == CALL_PLAIN:
                jobs.append(Job(stream, *pickle.loads(body)))
            elif kind == CALL:
                id, method, num_returns, wires, places = pickle.loads(body)
                blobs = self.node.decode(wires, stream.peer, fds)
                jobs.append(Job(stream, id, method, num_returns, (), {}, blobs, places))
            elif kind == FUNCTION:
                id, name, wire = pickle.loads(body)
                (blob,) = self.node.decode([wire], stream.peer, fds)
                self.executor.functions[id] = (name, blob, None)
        return jobs

    def _disconnect(self, stream: Stream) -> None:
        """Drop a connection, once: both threads that read calls may see its end.

        Its descriptor stays open, and so isn't reused, as long as one of them has the stream.
        """
        if self._connections.pop(stream.fd, None) is None:
            return
        self._poller.set(stream.fd, system.IN, 0)
        self.node.rewatch(stream, remove=stream.events)
        stream.handler = None
        stream.close()
        if self._async is not None:
            self._async.remove(stream)

    def _cancel(self, id: int, recursive: bool) -> None:
        self.executor.cancel(id)
        if recursive:
            self.engine.cancel_started_by(id)

    def _exit(self) -> None:
        self._exiting = True
        self._waker.wake()
        if self._async is not None:
            self._async.stop()

    # -- tasks that wait ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_block(self) -> Any:
        """Around a wait inside a task: others may use the CPU and run what is queued here.

        In whatever thread it waits: what it waits for may need just this CPU.
        """
        with self._waiting_lock:
            self._waiting += 1
            self.node.tell(DRIVER, BLOCKED, True)
        call = self.executor.running
        submitters = {job.stream.peer for job in list(self._backlog)}
        if call is not None and call != self._told:
            self._told = call  # once a task: its submitter sends nothing more until it is done
            submitters.add(owner_of(call))
        for proc in submitters:
            self._give_back(proc, None)
        try:
            yield
        finally:
            with self._waiting_lock:
                self._waiting -= 1
                if not self._waiting:
                    self.node.tell(DRIVER, BLOCKED, False)

    def _give_back(self, proc: int, thief: int | None) -> None:
        """Return tasks of ``proc`` that have not started: half, or all if the running one waits."""
        streams = [s for s in list(self._connections.values()) if s.peer == proc]
        for stream in streams:
            # While the main thread runs a task nobody reads: look for more that lies there.
            self._backlog.extend(self._read(stream))
            self._waker.wake()  # the main thread may be waiting for just these
        mine = [job for job in list(self._backlog) if job.stream.peer == proc]
        take = mine if self._waiting else mine[len(mine) // 2 :]
        returned = []
        for job in take:
            try:
                self._backlog.remove(job)
            except ValueError:
                continue  # the main thread started it meanwhile
            returned.append(job.id)
        # Not as a control message: a thread that waits for one of these results reads there.
        with contextlib.suppress(Closed, IndexError):  # its submitter is gone
            streams[0].send(frame(R_STOLEN, pickle.dumps((thief, returned), 5)))

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        """SIGINT comes from ``cancel`` only (the terminal's goes to the driver alone)."""
        if self.executor.interrupted():
            raise KeyboardInterrupt
