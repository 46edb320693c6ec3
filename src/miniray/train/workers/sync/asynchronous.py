"""Epochs without a barrier: ``DataParallelTrainer(mode="async")``.

Every ``sync_interval`` epochs, a worker pushes its weights to the server and pulls those of the
server. It never waits for the others, so a slow worker delays only itself. With ``staleness=n``, a
worker that is more than n syncs ahead of the slowest waits.

Every worker trains every epoch once. When the slowest worker has completed an epoch, the trainer
aggregates the results of that epoch and calls the hooks. ``train(epochs)`` returns when all workers
have completed all epochs. Before a checkpoint and an evaluation, every worker finishes its epoch. A
checkpoint contains the position of each worker, so no epoch is trained twice after a resume.

The replacement of a lost worker starts with the weights of the server and repeats the epoch.
Results depend on the order of pushes, so runs aren't bit-identical.
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
from miniray.train.workers.errors import add_error_context
from miniray.train.workers.group import NO_WORKERS, WorkerGroup
from miniray.train.workers.sync.policy import SyncPolicy


def check_mode(mode: str, staleness: int | None, data: Any) -> None:
    """Raise ``ValueError`` for an unknown mode, or options that need a different one."""
    if mode not in ("sync", "async"):
        raise ValueError(f'mode must be "sync" or "async", not {mode!r}')
    if staleness is not None:
        check_int("staleness", staleness, 0)
        if mode != "async":
            raise ValueError('staleness needs mode="async"')
    if data is not None and mode == "async":
        raise ValueError(
            'data= needs mode="sync", because workers that don\'t wait for each other have no '
            'common position in the data. To use mode="async", shard the data in load_data_shard'
        )


@dataclass
class _Step:
    """The current task of a worker: training an epoch or, with ``weights``, pushing them."""

    worker: int
    epoch: int
    began: float
    weights: Any = None
    result: Any = None  # of the epoch, while its weights are pushed


class AsyncSync(SyncPolicy):
    """Keep every worker busy, and return results epoch by epoch; see the module.

    Args:
        staleness: Number of syncs that a worker may be ahead of the slowest. Default: no limit.
    """

    mode = "async"

    def __init__(self, num_workers: int, *, staleness: int | None = None, **options: Any) -> None:
        server_options = {**options.pop("server_options", {}), "num_workers": num_workers}
        super().__init__(num_workers, server_options=server_options, **options)
        self.staleness = staleness
        self._next: list[int] = []  # the next epoch of each worker; empty before the first
        self._end = 0
        self._kwargs: Mapping[str, Any] = {}
        self._results: dict[int, dict[int, Any]] = {}  # by epoch, by worker
        self._running: dict[Any, _Step] = {}
        self._given: dict[int, Any] = {}  # pending ``set_weights`` calls by worker

    def start(self, group: WorkerGroup) -> None:
        """Start the server, with no worker training yet."""
        super().start(group)
        self._next, self._results, self._running, self._given = [], {}, {}, {}

    @property
    def _workers(self) -> WorkerGroup:
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return self._group

    def finish(self, epoch: int, end: int, kwargs: Mapping[str, Any]) -> list[Any]:
        """Train until every worker has completed ``epoch``, and return its results by worker id.

        No worker trains an epoch after ``end - 1``.
        """
        self._next = self._next or [epoch] * self.num_workers
        self._end, self._kwargs = end, kwargs
        while len(self._results.get(epoch, ())) < self.num_workers:
            self._start_idle()
            self._advance()
        self._start_idle()  # no worker is idle while hooks run
        found = self._results.pop(epoch)
        return [found[i] for i in range(self.num_workers)]

    def pause(self) -> None:
        """Wait until every worker has finished its current epoch."""
        while self._running:
            self._advance()
        for worker in list(self._given):
            try:
                miniray.get(self._given.pop(worker), timeout=self._workers.timeout)
            except Exception as error:
                self._workers.recover(error, worker, "set_weights", self._next[worker] - 1)

    def settle(self, epoch: int) -> bool:
        """Raise the error of a failed push, and return whether the epoch ends with a sync."""
        super().settle(epoch)
        return self.is_due(epoch)

    @property
    def is_in_sync(self) -> bool:
        """False: each worker has its own weights."""
        return False

    def get_weights(self) -> Any:
        """Return the weights of the server."""
        return miniray.get(self.server.get_weights.remote())

    def state_dict(self) -> dict[str, Any]:
        """Return the position of each worker too. No worker may be training; see ``pause``."""
        results = [
            [epoch, worker, simplify(result)]
            for epoch, found in self._results.items()
            for worker, result in found.items()
        ]
        return {**super().state_dict(), "next": list(self._next), "results": results}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the positions, if the number of workers is the same."""
        super().load_state_dict(state)
        self._next, self._results = [], {}
        if len(state.get("next", ())) == self.num_workers:
            self._next = list(state["next"])
            for done, worker, result in state["results"]:
                self._results.setdefault(done, {})[worker] = result

    def load_missing_state(self) -> None:
        """Continue from a checkpoint without positions of the workers."""
        super().load_missing_state()
        self._next, self._results = [], {}

    @contextlib.contextmanager
    def final_weights(self) -> Iterator[None]:
        """Set the weights of the server on all workers, and afterwards their own again.

        A worker that is replaced inside keeps those of the server, as all replacements do.
        """
        weights = self.server.get_weights.remote()
        self.pause()
        group = self._workers
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
        slowest = min(self._syncs(i) for i in range(self.num_workers))
        for worker in range(self.num_workers):
            if worker in busy or self._next[worker] >= self._end:
                continue
            if self.staleness is None or self._syncs(worker) - slowest <= self.staleness:
                self._train(worker)

    def _syncs(self, worker: int) -> int:
        return self._next[worker] // self.interval

    def _train(self, worker: int) -> None:
        epoch = self._next[worker]
        ref = self._workers.submit(worker, "train_epoch", epoch, **self._kwargs)
        self._running[ref] = _Step(worker, epoch, time.monotonic())

    def _advance(self) -> None:
        """Wait until a task completes, and start the next one of its worker."""
        for ref in self._workers.some_ready({ref: s.began for ref, s in self._running.items()}):
            step, method = self._running.pop(ref), "set_weights"
            try:
                if step.worker in self._given:  # runs before the epoch, and can hang as well
                    self._workers.outcome(self._given.pop(step.worker))
                method = "train_epoch"
                value = self._workers.outcome(ref)
            except Exception as error:
                self._replace_lost(step, error, method)
                continue
            handle = self._workers.handles[step.worker]
            if step.weights is None and (step.epoch + 1) % self.interval == 0:
                weights = handle.get_weights.remote()
                push = self.server.push_weights.remote(step.worker, weights)
                began = time.monotonic()
                self._running[push] = _Step(step.worker, step.epoch, began, weights, value)
                continue
            if step.weights is not None:
                value = step.result
                pulled = self.server.pull_weights.remote()
                self._given[step.worker] = handle.set_weights.remote(pulled)
            self._results.setdefault(step.epoch, {})[step.worker] = value
            self._next[step.worker] = step.epoch + 1

    def _replace_lost(self, step: _Step, error: Exception, method: str) -> None:
        """Replace the worker and let the replacement repeat the epoch, or raise the error."""
        if step.weights is not None:
            method = "get_weights"
            try:
                self._workers.outcome(step.weights)
            except Exception as cause:  # the worker's, and not the server's
                error = cause
            else:
                raise add_error_context(
                    error, f"worker {step.worker} in {self._workers.format_epoch(step.epoch)}"
                ) from None
        self._workers.recover(error, step.worker, method, step.epoch)
        self._train(step.worker)
