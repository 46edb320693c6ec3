"""Heartbeats of ranks, and named barriers with a timeout.

Twice per second, a thread of each rank sends the rank's position to the store in the driver, over a
separate connection. A stuck rank therefore still reports its epoch, step and phase, the duration
and CPU time of the phase, and the stack of its main thread. A rank sends no heartbeat if its
process is stopped or if the GIL is never released.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from typing import Any

import miniray
from miniray.counting import format_epoch
from miniray.data import observers
from miniray.doctor.layout import PREPARING
from miniray.errors import BarrierTimeoutError, MinirayError, PeerLostError, TaskError
from miniray.train.lockstep import process_group
from miniray.train.lockstep.process_group import ProcessGroupSpec, find_missing
from miniray.train.run.step_log import LogWindow

EVALUATION = "evaluation"  #: the phase in which steps are evaluation steps

_INTERVAL = 0.5
_STACK_AFTER = 1.0  # seconds in one phase before the stack is reported
_DEEPEST = 12

_OURS = os.path.dirname(miniray.__file__) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
#: Parts of the paths of installed packages, in this environment or the system's.
_INSTALLED = ("site-packages" + os.sep, "dist-packages" + os.sep)
#: Code in which a rank waits for others.
_WAITING_CODE = (
    os.path.join("torch", "distributed", ""),
    os.path.join("torch", "autograd", ""),
    os.path.join("torch", "nn", "parallel", ""),
    process_group.__file__,
)


@dataclasses.dataclass
class RankPosition:
    """The phase of a rank, how many ``seconds`` it has lasted, and its ``cpu`` seconds since."""

    rank: int
    pid: int = 0
    host: str = ""
    beat: int = 0
    epoch: int = -1
    step: int = -1
    phase: str = "not joined"
    seconds: float = 0.0
    cpu: float = 0.0
    waits: bool = False
    stack: str = ""

    def describe(self) -> str:
        """Format the position as ``rank 1 is in forward, epoch 1, step 3, for 61 s``."""
        where = (
            f"rank {self.rank} is {'' if self.phase.startswith('after ') else 'in '}{self.phase}"
        )
        if self.epoch >= 0:
            where += f", {format_epoch(self.epoch)}"
        if self.step >= 0:
            where += f", step {self.step}"
        return f"{where}, for {self.seconds:.0f} s"


class LogReader:
    """Reads the log windows that ranks post, in the driver."""

    def __init__(self, store: Any, spec: ProcessGroupSpec) -> None:
        self._store, self._name = store, spec.name
        self._next = [0] * spec.world_size

    def read(self) -> list[LogWindow]:
        """Return the windows that have arrived since the last call."""
        found = []
        for rank, number in enumerate(self._next):
            while self._store.check([key := f"{self._name}/log/{rank}/{number}"]):
                found.append(LogWindow(*json.loads(self._store.get(key))))
                self._store.delete_key(key)
                number += 1
            self._next[rank] = number
        return found


class HeartbeatSender:
    """Sends this rank's position. ``set_phase``, for the main thread, takes well under 1 µs.

    ``close`` stops the thread. If the driver's store is closed, the thread stops by itself.
    """

    def __init__(self, spec: ProcessGroupSpec, rank: int, store: Any) -> None:
        self.rank = rank
        self.epoch = -1
        self.step = -1
        self.limit = spec.timeout
        self._spec = spec
        self._store = store  # the main thread's
        self._main = threading.get_ident()
        self._where = ("joined", time.monotonic())
        self._moved = 0.0  # time of the last progress of the main thread, as of the last post
        self._cpu_then = time.process_time()
        self._beats = 0
        self._barriers = 0
        self._logs: collections.deque[Any] = collections.deque()
        self._logs_posted = 0
        self._logs_lock = threading.Lock()  # held while windows are sent to the store
        self._request: tuple[int, int] | None = None
        self._before_preparation: str | None = None
        observers.preparation_hooks.append(self._prepare)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="miniray-heartbeat", daemon=True)
        self._thread.start()

    def set_phase(self, phase: str, step: int | None = None) -> None:
        """Note that the main thread is in ``phase`` now."""
        if step is not None:
            self.step = step
        self._where = (phase, time.monotonic())

    def touch(self) -> None:
        """Note that the main thread makes progress in the same phase."""
        self._where = (self._where[0], time.monotonic())

    def _prepare(self, is_active: bool) -> None:
        """Enter the phase ``PREPARING``, report its progress, or return to the phase before."""
        if is_active:
            if self._before_preparation is None:
                self._before_preparation = self._where[0]
            self.set_phase(PREPARING)
        elif self._before_preparation is not None:
            self.set_phase(self._before_preparation)
            self._before_preparation = None

    def barrier(self, name: str) -> None:
        """Wait for all ranks. Raise ``BarrierTimeoutError`` after ``limit`` seconds.

        The error names the missing ranks and shows their positions.
        """
        self.set_phase(f"barrier {name!r}")
        self._barriers += 1
        prefix = f"{self._spec.name}/barrier/{self._barriers}/{name}"
        self._store.set(f"{prefix}/{self.rank}", b"")
        missing = find_missing(self._store, prefix, self._spec.world_size, self.limit)
        if missing:
            positions = read_positions(self._store, self._spec)
            ranks = ", ".join(map(str, missing))
            shown = "\n".join(format_position(positions[rank]) for rank in missing)
            raise BarrierTimeoutError(
                f"barrier {name!r} of {format_epoch(self.epoch)} timed out after {self.limit:g} s "
                f"waiting for rank{'s' if len(missing) > 1 else ''} {ranks} of "
                f"{self._spec.world_size}\n"
                f"{shown}",
                name,
                tuple(missing),
                rank=self.rank,
                epoch=None if self.epoch < 0 else self.epoch,
                step=None if self.step < 0 else self.step,
            )
        self.set_phase(f"after barrier {name!r}")

    def post(self, store: Any = None) -> None:
        """Send the position now."""
        phase, since = self._where
        if since != self._moved:
            self._moved, self._cpu_then = since, time.process_time()
        self._beats += 1
        seconds = time.monotonic() - since
        stack, waits = self._stack() if seconds > _STACK_AFTER else ("", False)
        found = RankPosition(
            self.rank,
            os.getpid(),
            socket.gethostname(),
            self._beats,
            self.epoch,
            self.step,
            phase,
            seconds,
            time.process_time() - self._cpu_then,
            waits or phase.startswith("barrier "),
            stack,
        )
        text = json.dumps(dataclasses.asdict(found))
        (store or self._store).set(f"{self._spec.name}/heartbeat/{self.rank}", text)

    def post_log(self, window: Any) -> None:
        """Queue a log window, which the thread sends, so that the step doesn't wait."""
        self._logs.append(window)

    def take_logs(self) -> list[Any]:
        """Return the log windows that weren't sent yet, to include them in a result."""
        with self._logs_lock:
            taken = list(self._logs)
            self._logs.clear()
        return taken

    def flush_logs(self, store: Any = None) -> None:
        """Post all queued log windows now."""
        with self._logs_lock:
            while self._logs:
                key = f"{self._spec.name}/log/{self.rank}/{self._logs_posted}"
                (store or self._store).set(key, json.dumps(self._logs.popleft()))
                self._logs_posted += 1

    def take_request(self) -> tuple[int, int]:
        """Return the newest request of the driver, (action, argument), once.

        Without a request, return (0, 0). Only rank 0 receives requests.
        """
        request, self._request = self._request, None
        return request or (0, 0)

    def _exchange(self, store: Any) -> None:
        """Post log windows, and read the driver's request on rank 0."""
        name = self._spec.name
        self.flush_logs(store)
        if not self.rank and store.check([f"{name}/request"]):
            self._request = json.loads(store.get(f"{name}/request"))
            store.delete_key(f"{name}/request")

    def _stack(self) -> tuple[str, bool]:
        frame = sys._current_frames().get(self._main)
        if frame is None:
            return "", False
        stack = "".join(traceback.format_list(select_readable(traceback.extract_stack(frame))))
        return stack, _is_waiting(frame)

    def _run(self) -> None:
        try:
            store = self._spec.connect()
            while not self._ended.is_set():
                self.post(store)
                self._exchange(store)
                self._ended.wait(_INTERVAL)
        except RuntimeError:  # the store is closed: the driver has exited or stops this process
            return

    def close(self) -> None:
        """Stop the thread and wait for it."""
        observers.preparation_hooks.remove(self._prepare)
        self._ended.set()
        self._thread.join(timeout=2 * _INTERVAL)


def select_readable(found: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames of a stack to show: no frames of miniray, and the last frame of user code.

    Library frames below the last frame of user code are dropped if there are too many. If all
    frames are miniray's, return the last ones.
    """
    theirs = [f for f in found if not f.filename.startswith((_OURS, "<"))]
    shown = theirs[-_DEEPEST:]
    users = [f for f in theirs if not _is_library(f.filename)]
    if users and users[-1] not in shown:
        shown = [users[-1], *shown[1:]]
    return shown or found[-3:]


def _is_library(filename: str) -> bool:
    return filename.startswith(_STDLIB) or any(part in filename for part in _INSTALLED)


def _is_waiting(frame: Any) -> bool:
    """Return whether a thread waits for other ranks.

    The frames of the doctor's recorder, which wraps calls of torch, are skipped. Otherwise, waiting
    ranks would seem to be busy and would be reported as the cause of a hang.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if any(part in name for part in _WAITING_CODE):
            return True
        if not name.startswith(_OURS):
            return False
        frame = frame.f_back
    return False


def read_positions(store: Any, spec: ProcessGroupSpec) -> list[RankPosition]:
    """Return the last position that each rank has sent."""
    positions = []
    for rank in range(spec.world_size):
        key = f"{spec.name}/heartbeat/{rank}"
        if store.check([key]):
            positions.append(RankPosition(**json.loads(store.get(key))))
        else:
            positions.append(RankPosition(rank))
    return positions


def format_position(position: RankPosition) -> str:
    """Return a position with its stack, for error messages."""
    stack = "".join(f"    {line}\n" for line in position.stack.splitlines())
    return f"  {position.describe()}\n{stack}".rstrip()


def is_consequence(error: BaseException | None) -> bool:
    """Return whether ``error`` only reports that other ranks are lost or don't respond."""
    while isinstance(error, TaskError):
        error = error.cause
    if isinstance(error, MinirayError):
        return isinstance(error, (BarrierTimeoutError, PeerLostError))
    return error is not None and process_group.is_connection_error(error)
