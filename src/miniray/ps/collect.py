"""Getting the weights of all workers for a sync: returned by them, or read where they lie.

A worker that is read stays in its call until the server is done with it, so its weights cannot
change meanwhile; the last thing that is asked of it is whether it still lives. If it does not, the
sync fails with its name like any other. If it does and could not be read, it returns its weights
after all: which way they came never changes the result.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import miniray
from miniray.core import session
from miniray.core.local.executors import AROUND
from miniray.core.remote import ActorHandle
from miniray.errors import (
    ActorDiedError,
    MinirayError,
    SyncError,
    TaskError,
    WorkerLostError,
)
from miniray.ps.blocks import readers
from miniray.ps.model import Given, Model
from miniray.ps.offer import DIGEST, OFFER, READ, RETURN, Desk, offer
from miniray.ps.places import Places
from miniray.ps.reading import Far, Memory, Reception, Report, UnreadableError

TRANSPORTS = ("auto", "copy", "read")

#: Nobody is held for others longer than this, in seconds: they may be waiting for him. Longer where
#: the user insists on reading.
_PATIENCE = {"auto": 1.0, "read": 30.0}


class Collector:
    """What a server knows about its workers' memory from sync to sync."""

    def __init__(self, model: Model, transport: str) -> None:
        self._model = model
        self._transport = transport
        self.eager = transport == "read"
        self.patience = _PATIENCE.get(transport, 0.0)
        #: By actor: the number of its plan, and where its weights are.
        self.plans: dict[str, tuple[int, Far]] = {}
        #: By actor: why the kernel does not let us read its memory.
        self.refused: dict[str, str] = {}

    def round(self, workers: Sequence[ActorHandle[Any]]) -> Round:
        actors = {worker._actor_id for worker in workers}
        self.plans = {a: plan for a, plan in self.plans.items() if a in actors}
        self.refused = {a: why for a, why in self.refused.items() if a in actors}
        return Round(self, self._model, workers, self._places(len(workers), actors))

    def _places(self, workers: int, actors: set[str]) -> Places | None:
        """What reading goes by; None while weights can only be copied."""
        places = self._model.places
        if self._transport == "copy" or places is None or sys.platform != "linux":
            return None
        if len(actors) < workers:
            return None  # one of them twice: held in its first call it does not come to the second
        enough = readers(workers, self._model.nbytes) >= min(2, self._model.threads)
        return places if self.eager or enough else None


class Round:
    """One sync's collecting; no worker is held after its ``with`` block, whatever happens."""

    def __init__(
        self,
        collector: Collector,
        model: Model,
        workers: Sequence[ActorHandle[Any]],
        places: Places | None,
    ) -> None:
        #: How each worker's weights came: ``read``, or ``copy`` and why.
        self.transport = dict.fromkeys(range(len(workers)), "copy")
        self._collector = collector
        self._model = model
        self._workers = workers
        self._places = places
        self._refs: list[Any] = []
        self._values: dict[int, Given] = {}
        self._held: dict[int, tuple[socket.socket, Far]] = {}
        self._since = 0.0
        self._reception = None if places is None else Reception(len(workers))

    def __enter__(self) -> Round:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # A worker that is held, or reports from now on, returns its weights to nobody.
        if self._reception is not None:
            self._reception.close()

    # -- collecting --------------------------------------------------------------------------------

    def collect(self) -> list[Given]:
        """The weights of all workers. Raises ``SyncError``, ``WorkerLostError``."""
        self._refs = [self._call(i, worker) for i, worker in enumerate(self._workers)]
        if self._reception is not None:
            for ref in self._refs:
                session.engine().on_ready(ref, self._reception.ring)
        return self._all()

    def copies(self, reason: str) -> list[Given]:
        """The same when those that are held could not be read: they return them. Raises as above.

        Also where one of them died and this is how it came out.
        """
        self._let_go(reason)
        return self._all()

    def confirm(self) -> None:
        """What was read is right: each worker that was held lives. Raises as above."""
        held = sorted(self._held)
        for conn, _ in self._held.values():
            _answer(conn, READ)
        self._held.clear()
        for i in held:
            try:
                miniray.get(self._refs[i])
            except Exception as error:  # whatever ended the call
                raise failure({i: error}, "get_weights", "collect") from error

    def _call(self, index: int, worker: ActorHandle[Any]) -> Any:
        known, _ = self._plan(worker)
        why = self._collector.refused.get(worker._actor_id)
        if self._reception is None or why is not None:
            self.transport[index] = f"copy: {why}" if why else "copy"
            return worker.get_weights.remote()
        address, token = self._reception.address, self._reception.token
        desk = Desk(address, token, index, os.getpid(), known, self._collector.eager)
        around = {AROUND: functools.partial(offer, desk)}
        return session.engine().call(worker._actor, "get_weights", (), around, 1)

    def _plan(self, worker: ActorHandle[Any]) -> tuple[int, Far | None]:
        known, far = self._collector.plans.get(worker._actor_id, (0, None))
        return (known, far) if far is not None and far.places is self._places else (0, None)

    def _all(self) -> list[Given]:
        count = len(self._refs)
        # As they come: one that died is noticed although another one takes its time.
        while len(self._values) + len(self._held) < count:
            due = [ref for i, ref in enumerate(self._refs) if i not in self._values]
            for ref in self._arrived(due):
                index = self._refs.index(ref)
                if self._held.pop(index, None):  # it did not wait for us
                    self.transport[index] = "copy"
                try:
                    self._values[index] = self._received(index, ref)
                except Exception as error:  # whatever the worker's code raises
                    raise failure({index: error}, "get_weights", "collect") from error
        # Why some were copied: it was sent ahead, and may still lie there.
        self._listen(0)
        far = {i: Given(i, None, far=far) for i, (_, far) in self._held.items()}
        return [self._values.get(i) or far[i] for i in range(count)]

    def _received(self, worker: int, ref: Any) -> Given:
        engine = session.engine()
        stored = engine.stored(ref)
        weights = None if self._model.knows(stored) else engine.peek(ref)
        return Given(worker, weights, ref, stored)

    def _arrived(self, pending: list[Any]) -> list[Any]:
        """Those of ``pending`` that are ready; waits until some are, or a worker reported."""
        if self._reception is None:
            return miniray.wait(pending)[0]
        ready = miniray.wait(pending, num_returns=len(pending), timeout=0)[0]
        if ready:
            return ready
        patience = self._collector.patience
        self._listen(self._since + patience - time.monotonic() if self._held else None)
        if self._held and time.monotonic() >= self._since + patience:
            self._let_go("other workers took too long")
        return []

    # -- workers that report -----------------------------------------------------------------------

    def _listen(self, seconds: float | None) -> None:
        for report in () if self._reception is None else self._reception.reports(seconds):
            if report.offered:
                self._consider(report)
            else:
                self.transport[report.worker] = f"copy: {report.body.decode()}"

    def _consider(self, report: Report) -> None:
        """Hold the worker that made an offer, or have it return its weights."""
        index = report.worker
        try:
            far = self._far(report)
        except UnreadableError as error:
            self.transport[index] = f"copy: {error}"
            self._collector.refused[self._workers[index]._actor_id] = str(error)
            far = None
        if far is None or index in self._values:
            _answer(report.conn, RETURN)
            return
        if not self._held:
            self._since = time.monotonic()
        self._held[index] = report.conn, far
        self.transport[index] = "read"

    def _far(self, report: Report) -> Far | None:
        """The offered weights; None if they are not known to fit. Raises ``UnreadableError``."""
        assert self._reception is not None
        assert self._places is not None
        body, token = report.body, self._reception.token
        address, serial = OFFER.unpack_from(body)
        memory = Memory(report.pid)
        if memory.read_bytes(address, len(token)) != token:
            raise UnreadableError(f"process {report.pid} is seen under another number")
        worker = self._workers[report.worker]
        known, far = self._plan(worker)
        if serial != known or far is None:
            digest, rest = body[OFFER.size :][:DIGEST], body[OFFER.size + DIGEST :]
            found = self._places.located(digest, np.frombuffer(rest, np.uint64))
            if found is None:
                self.transport[report.worker] = "copy: their structure is new"
                return None
            far = Far(self._places, memory, found)
            self._collector.plans[worker._actor_id] = serial, far
        return far

    def _let_go(self, reason: str) -> None:
        """Those that are held return their weights."""
        for index, (conn, _) in self._held.items():
            self.transport[index] = f"copy: {reason}"
            _answer(conn, RETURN)
        self._held.clear()


def _answer(conn: socket.socket, what: bytes) -> None:
    with contextlib.suppress(OSError):  # it is gone; its call says so
        conn.send(what)


def failure(errors: dict[int, Exception], method: str, phase: str) -> SyncError:
    """Return one error for those of several workers, by index.

    Its fields describe the first worker that exited, or the first one if none did.
    """
    (first, error), *others = errors.items()
    # The traceback of one worker is enough to read.
    lines = [f"worker {first}: {method} failed: {error}"]
    lines += [f"worker {i}: {method} failed: {_one_line(other)}" for i, other in others]
    lost = [i for i, error in errors.items() if _is_death(error)]
    worker = lost[0] if lost else first
    kind = WorkerLostError if lost else SyncError
    fields = _get_process_fields(errors[worker])
    return kind("\n".join(lines), tuple(errors), phase, worker=worker, **fields)


def _is_death(error: Exception) -> bool:
    """Return whether the worker exited. Its code may also raise the death of another actor."""
    return isinstance(error, ActorDiedError) and not isinstance(error, TaskError)


def _get_process_fields(error: Exception) -> dict[str, Any]:
    """Return the fields of a worker's error that describe its process."""
    if isinstance(error, TaskError):  # others are those of the original error
        return {"pid": error.pid}
    names = ("host", "pid", "exit_code", "signal", "in_init")
    return {n: getattr(error, n) for n in names} if isinstance(error, MinirayError) else {}


def _one_line(error: Exception) -> str:
    """Return the line that names the problem: the first one of a death, the last of a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0 if _is_death(error) else -1]
