"""Epochs without a barrier: ``DataParallelTrainer(mode="async")``.

Each worker trains an epoch, hands its weights to the server (every ``sync_interval`` epochs), takes
what the server has then and goes on, whatever the others do. So a worker that is slow for a while
holds up nobody; with ``staleness=n`` one that is more than n syncs ahead of the slowest waits.

What the driver counts stays as it is with a barrier: every worker does every epoch once, an epoch
is over, with its results and hooks, when the last worker is through it, and ``train(epochs)``
returns when all are through all. Hooks therefore run at the pace of the slowest worker, while
others are ahead. Saving a checkpoint and evaluating let every worker finish the epoch it is in; a
checkpoint has each worker's own position, and nothing is done twice after a resume.

A worker that is lost is replaced as ever: the new one has the server's weights and does that epoch
again. Results depend on who came first, so runs are not the same bit for bit.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import miniray
from miniray.checks import check_int
from miniray.core import session
from miniray.train.run.records import simplify
from miniray.train.workers.group import WorkerGroup, located


def check_mode(mode: str, staleness: int | None, data: Any) -> None:
    """``ValueError`` for a mode that there is not, or what does not go with it."""
    if mode not in ("sync", "async"):
        raise ValueError(f'mode must be "sync" or "async", not {mode!r}')
    if staleness is not None:
        check_int("staleness", staleness, 0)
        if mode != "async":
            raise ValueError('staleness needs mode="async"')
    if data is not None and mode == "async":
        raise ValueError(
            'data= needs mode="sync": workers that do not wait for each other are in different '
            "epochs, and no state of the data is right for all; shard it in load_data_shard"
        )


@dataclass
class _Step:
    """What one worker is doing: training an epoch, or (with ``weights``) handing them in."""

    worker: int
    epoch: int
    began: float
    weights: Any = None
    result: Any = None  # of the epoch whose weights they are


class AsyncEpochs:
    """Keeps every worker busy and hands out results epoch by epoch; see the module."""

    def __init__(
        self, group: WorkerGroup, server: Any, interval: int, staleness: int | None, epoch: int
    ) -> None:
        self._group = group
        self._server = server
        self._interval = interval
        self._staleness = staleness
        self._count = len(group.handles)
        self._next = [epoch] * self._count  # the epoch each worker does next
        self._end = epoch
        self._kwargs: Mapping[str, Any] = {}
        self._results: dict[int, dict[int, Any]] = {}  # by epoch, by worker
        self._running: dict[Any, _Step] = {}
        self._given: dict[int, Any] = {}  # by worker: weights on their way to it

    def finish(self, epoch: int, end: int, kwargs: Mapping[str, Any]) -> list[Any]:
        """Go on until every worker is through ``epoch``; its results by worker id.

        No worker goes beyond epoch ``end - 1``.
        """
        self._end, self._kwargs = end, kwargs
        while len(self._results.get(epoch, ())) < self._count:
            self._start_idle()
            self._advance()
        self._start_idle()  # nobody idles while the hooks run
        found = self._results.pop(epoch)
        return [found[i] for i in range(self._count)]

    def settle(self) -> dict[str, Any]:
        """Let every worker finish the epoch it is in; returns where all are, for a checkpoint."""
        while self._running:
            self._advance()
        for worker in list(self._given):
            try:
                miniray.get(self._given.pop(worker), timeout=self._group.timeout)
            except Exception as error:
                self._group.recover(error, worker, "set_weights", self._next[worker] - 1)
        results = [
            [epoch, worker, simplify(result)]
            for epoch, found in self._results.items()
            for worker, result in found.items()
        ]
        return {"next": list(self._next), "results": results}

    def restore(self, epoch: int, saved: Mapping[str, Any] | None) -> None:
        """Go on from ``settle``'s answer; without one of as many workers, all from ``epoch``."""
        if saved is None or len(saved["next"]) != self._count:
            saved = {"next": [epoch] * self._count, "results": ()}
        self._next, self._results = list(saved["next"]), {}
        for done, worker, result in saved["results"]:
            self._results.setdefault(done, {})[worker] = result

    @contextlib.contextmanager
    def at_rest_with(self, weights: Any) -> Iterator[None]:
        """All workers between two epochs and with these weights; with their own again after.

        One that is replaced meanwhile keeps those of the server, as all replacements do.
        """
        self.settle()
        group = self._group
        session.engine().peek(weights)  # the server's error, if it is one, and not a worker's
        before = list(group.handles)
        own = [worker.get_weights.remote() for worker in before]
        group.call("set_weights", lambda _: (weights,), {})
        yield
        kept = [i for i, worker in enumerate(before) if group.handles[i] is worker]
        group.call_some(kept, lambda i: group.submit(i, "set_weights", own[i]), "set_weights")

    # -- one worker's steps -----------------------------------------------------------------------

    def _start_idle(self) -> None:
        busy = {step.worker for step in self._running.values()}
        slowest = min(self._syncs(i) for i in range(self._count))
        for worker in range(self._count):
            if worker in busy or self._next[worker] >= self._end:
                continue
            if self._staleness is None or self._syncs(worker) - slowest <= self._staleness:
                self._train(worker)

    def _syncs(self, worker: int) -> int:
        return self._next[worker] // self._interval

    def _train(self, worker: int) -> None:
        epoch = self._next[worker]
        ref = self._group.submit(worker, "train_epoch", epoch, **self._kwargs)
        self._running[ref] = _Step(worker, epoch, time.monotonic())

    def _advance(self) -> None:
        """Wait for something to be done, and have its worker do what comes next."""
        for ref in self._group.some_ready({ref: s.began for ref, s in self._running.items()}):
            step, method = self._running.pop(ref), "set_weights"
            try:
                if step.worker in self._given:  # before the epoch, and may be where it hangs
                    self._group.outcome(self._given.pop(step.worker))
                method = "train_epoch"
                value = self._group.outcome(ref)
            except Exception as error:
                self._lost(step, error, method)
                continue
            handle = self._group.handles[step.worker]
            if step.weights is None and (step.epoch + 1) % self._interval == 0:
                weights = handle.get_weights.remote()
                push = self._server.push_weights.remote(step.worker, weights)
                began = time.monotonic()
                self._running[push] = _Step(step.worker, step.epoch, began, weights, value)
                continue
            if step.weights is not None:
                value = step.result
                pulled = self._server.pull_weights.remote()
                self._given[step.worker] = handle.set_weights.remote(pulled)
            self._results.setdefault(step.epoch, {})[step.worker] = value
            self._next[step.worker] = step.epoch + 1

    def _lost(self, step: _Step, error: Exception, method: str) -> None:
        """Replace the worker and let the new one do the epoch again, or raise."""
        if step.weights is not None:
            method = "get_weights"
            try:
                self._group.outcome(step.weights)
            except Exception as cause:  # the worker's, and not the server's
                error = cause
            else:
                raise located(error, f"worker {step.worker} in epoch {step.epoch}") from None
        self._group.recover(error, step.worker, method, step.epoch)
        self._train(step.worker)
