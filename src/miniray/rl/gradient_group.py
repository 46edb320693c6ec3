"""Workers that sum their gradients in every step (``sync="grad"``), so their weights are equal.

The workers report their phase to the store of the process group. If none makes progress for
``hang_timeout``, or one is stopped, the driver finds the worker that the others wait for.

A lost worker can't be replaced on its own, because the others wait in a collective that can't
complete. Instead, all workers restart within ``max_failures``, restore the state after the last
step, and repeat the call. Losing a worker therefore costs only the current step.

The state is kept in the engine's object store, which outlives the workers. The weights and the
optimizer, which are equal on all workers, are stored once. The driver hosts the store of the
process group, so that the remaining workers can name the missing ones.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import miniray
from miniray.checks import check_number
from miniray.core import session
from miniray.doctor.findings import named
from miniray.errors import CapabilityError, MinirayError, WorkerTimeoutError
from miniray.train.lockstep.health.failure import (
    create_group_error,
    create_restart_event,
    find_root_cause,
)
from miniray.train.lockstep.health.monitor import HeartbeatMonitor, Verdict
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.lockstep.ranks import CAUSE_TIMEOUT_S, POLL_INTERVAL_S, Answers
from miniray.train.options import check_seconds
from miniray.train.workers.budget import is_loss
from miniray.train.workers.checkpoint_parts import WeightSync
from miniray.train.workers.errors import ReplacementLostError, add_worker_context
from miniray.train.workers.group import NO_WORKERS, WorkerGroup, read_unanswered

#: Methods of workers that report their progress, so that one that hangs in them is found.
_PROGRESS_METHODS = ("train_epoch", "evaluate")


@dataclasses.dataclass(frozen=True)
class _Snapshot:
    """The state of all workers after a step, in the object store.

    Attributes:
        step: Number of completed steps.
        states: Snapshots that ``get_snapshot`` returned for each worker. The snapshot of worker 0
            includes the weights and the optimizer.
    """

    step: int
    states: Sequence[Any]


class GradientGroup(WeightSync):
    """The process group of the workers, and the state from which they restart.

    It is a ``WorkerSetup``.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        timeout: Limit in seconds for a collective.
        hang_timeout: Seconds without progress after which an idle worker hangs.
        get_run_dir: Returns the run directory.
        can_restart: Keep the state after each step, so that all workers can restart.
    """

    def __init__(
        self,
        backend: str,
        timeout: float,
        *,
        hang_timeout: float | None,
        get_run_dir: Callable[[], Path],
        can_restart: bool,
    ) -> None:
        self._backend, self._can_restart = backend, can_restart
        self._timeout = check_number("group_timeout", timeout, 0, open_low=True)
        check_seconds("hang_timeout", hang_timeout)
        self._hang_timeout = math.inf if hang_timeout is None else hang_timeout
        self._get_run_dir = get_run_dir
        #: Finds workers that don't make progress. None for a single worker.
        self.monitor: HeartbeatMonitor | None = None
        self._group: GradientWorkers | None = None
        self._host: GroupHost | None = None
        self._has_joined = False
        self._snapshot: _Snapshot | None = None

    @property
    def is_in_sync(self) -> bool:
        """True: all workers have the same weights."""
        return True

    # -- workers ----------------------------------------------------------------------------------

    def start(self, group: WorkerGroup) -> None:
        """Let all workers join the process group, and copy the weights of worker 0 to all.

        Raises:
            CapabilityError: The engine can't run several workers at the same time.
        """
        assert isinstance(group, GradientWorkers)
        self._group = group
        if len(group.handles) > 1:
            if not session.engine().capabilities.processes:
                raise CapabilityError(
                    'sync="grad" with more than one worker needs workers that run at the same '
                    'time. Use backend="local" or "ray", sync="weights", or one worker.'
                )
            self._open_host(group)
            # The specification changes if workers restart during the call.
            group.call("join_group", lambda _: (self._get_spec(),), {})
            self._has_joined = True
        while not self.keep(0):
            pass
        first = group.ref_of(0, "get_weights")
        group.map("set_weights", dict.fromkeys(range(1, len(group.handles)), first))

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Do nothing: ``restart`` prepares all workers at the same time."""

    def _open_host(self, group: WorkerGroup) -> None:
        self._host = GroupHost(
            len(group.handles),
            backend=self._backend,
            name="rl",
            timeout=self._timeout,
            other_machines=session.engine().capabilities.multi_node,
        )
        self.monitor = HeartbeatMonitor(self._host, self._hang_timeout, self._get_run_dir())

    def _get_spec(self) -> Any:
        assert self._host is not None
        return self._host.spec

    def restart(self, group: GradientWorkers) -> None:
        """Let the new workers join the process group, and restore the kept state."""
        if self._host is not None:
            self._host.close()
            self._open_host(group)
        if self._has_joined:
            group.prepare("join_group", lambda _: (self._get_spec(),))
        if self._snapshot is not None:
            states = self._snapshot.states
            group.prepare("load_snapshot", lambda i: (states[0], states[i]))

    # -- state ------------------------------------------------------------------------------------

    @property
    def kept_step(self) -> int | None:
        """Number of completed steps in the kept state, or None if no state is kept."""
        return None if self._snapshot is None else self._snapshot.step

    def keep(self, step: int, method: str = "get_snapshot", epoch: int | None = None) -> bool:
        """Keep the state of all workers after ``step`` steps, unless the next loss ends the run.

        Args:
            step: Number of completed steps.
            method: The call that has changed the state, for errors.
            epoch: The epoch of the call.

        Returns:
            False if a worker was lost. All workers then have the previous state again.
        """
        group = self._group
        if group is None or not self._can_restart or not session.engine().capabilities.processes:
            return True
        if group.budget.is_spent:
            self._snapshot = None
            return True
        refs = group.try_to_get_refs("get_snapshot", lambda i: (i == 0,), method, epoch)
        if refs is None:
            return False
        self._snapshot = _Snapshot(step, refs)
        return True

    def get_weights(self) -> Any:
        """Return the weights of worker 0, which are equal to those of all workers."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        return miniray.get(self._group.ref_of(0, "get_weights"))

    def stop(self) -> None:
        """Close the store and drop the state. Call this after the workers have stopped."""
        host, self._host, self.monitor = self._host, None, None
        self._group, self._snapshot, self._has_joined = None, None, False
        if host is not None:
            host.close()


@dataclasses.dataclass(eq=False)
class GradientWorkers(WorkerGroup):
    """The workers of a ``GradientGroup``, which restart together.

    Attributes:
        gradients: The process group and the kept state of the workers.
    """

    gradients: GradientGroup = dataclasses.field(kw_only=True)
    _unanswered: list[Any] = dataclasses.field(default_factory=list)

    def call_some(
        self,
        worker_ids: Iterable[int],
        submit: Callable[[int], Any],
        method: str,
        epoch: int | None = None,
    ) -> dict[int, Any]:
        """Call some workers. If one is lost, restart all workers and repeat the calls."""
        worker_ids = list(worker_ids)
        while True:
            results, failure = self._attempt(worker_ids, submit, self.outcome, method, epoch)
            if failure is None:
                return results
            worker_id, error = failure
            self.recover(error, worker_id, method, epoch)

    def call_and_keep(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        kwargs: Mapping[str, Any],
        epoch: int | None,
        step: int,
    ) -> list[Any]:
        """Call all workers, keep their state after ``step`` steps, and return the results."""
        while True:
            results = self.call(method, arguments, kwargs, epoch)
            if self.gradients.keep(step, method, epoch):
                return results

    def try_to_get_refs(
        self,
        getter: str,
        arguments: Callable[[int], tuple[Any, ...]],
        method: str,
        epoch: int | None,
    ) -> list[Any] | None:
        """Call ``getter`` of all workers and return refs to the results.

        If a worker is lost, restart all workers and return None. Errors refer to ``method``.
        """

        def get_ref(ref: Any) -> Any:
            session.engine().peek(ref)  # raises the error of the call
            return ref

        count = len(self.handles)
        refs, failure = self._attempt(range(count), self._create_submit(getter, arguments), get_ref)
        if failure is None:
            return [refs[worker_id] for worker_id in range(count)]
        worker_id, error = failure
        self.recover(error, worker_id, method, epoch)
        return None

    def prepare(self, method: str, arguments: Callable[[int], tuple[Any, ...]]) -> None:
        """Call all new workers during a restart.

        Raises:
            ReplacementLostError: A new worker was also lost.
        """
        submit = self._create_submit(method, arguments)
        _, failure = self._attempt(range(len(self.handles)), submit, self.outcome)
        if failure is None:
            return
        worker_id, error = failure
        if is_loss(error):
            raise ReplacementLostError(error, method) from None
        raise add_worker_context(error, worker_id, method, None) from error.__cause__

    def _create_submit(
        self, method: str, arguments: Callable[[int], tuple[Any, ...]]
    ) -> Callable[[int], Any]:
        return lambda worker_id: self.submit(worker_id, method, *arguments(worker_id))

    def _attempt(
        self,
        worker_ids: Sequence[int],
        submit: Callable[[int], Any],
        get: Callable[[Any], Any],
        method: str = "",
        epoch: int | None = None,
    ) -> tuple[dict[int, Any], tuple[int, Exception] | None]:
        """Call workers once.

        Args:
            worker_ids: The workers.
            submit: Calls a worker, and returns the ref.
            get: Returns the result for a ref.
            method: The method, if workers report their progress in it.
            epoch: The epoch of the call.

        Returns:
            The results, and the worker that failed first with its error, or None.
        """
        answers = Answers({submit(worker_id): worker_id for worker_id in worker_ids}, get)
        failures, pending = answers.failures, answers.pending
        answered = time.monotonic()
        limit = math.inf if self.timeout is None else answered + self.timeout
        while pending and answers.verdict is None:
            left = limit - time.monotonic()
            if answers.receive(min(max(0.0, left), POLL_INTERVAL_S)):
                answered = time.monotonic()
            elif left <= 0:
                break
            if find_root_cause(failures) is not None:
                break
            if failures:  # consequences of a lost worker whose exit may not be known yet
                limit = min(limit, time.monotonic() + CAUSE_TIMEOUT_S)
            else:
                answers.verdict = self._find_hung(pending.values(), method, answered)
        self._unanswered += pending
        if not pending and not failures:
            return answers.results, None
        if answers.verdict is not None:
            return answers.results, self._create_hang_error(answers, answers.verdict, epoch)
        cause = find_root_cause(failures)
        if cause is None and pending:
            late = sorted(pending.values())
            text = f"{named(late)} didn't respond"
            text += ", and the others lost it" if failures else f" within {self.timeout:g} s"
            cause = late[0], WorkerTimeoutError(text)
        return answers.results, cause or next(iter(failures.items()))

    def _find_hung(self, worker_ids: Iterable[int], method: str, answered: float) -> Verdict | None:
        """Return which of the workers that haven't answered hang; None if they may still answer."""
        monitor, late = self.gradients.monitor, list(worker_ids)
        if monitor is None:
            return None
        if method in _PROGRESS_METHODS:
            return monitor.find_hung(late, answered)
        return monitor.find_stopped(late)

    def _create_hang_error(
        self, answers: Answers, verdict: Verdict, epoch: int | None
    ) -> tuple[int, Exception]:
        assert self.gradients.monitor is not None
        late = sorted(answers.pending.values())
        positions = self.gradients.monitor.read_last_positions()
        error = create_group_error(answers.failures, late, verdict, epoch, positions)
        return verdict.ranks[0] if verdict.ranks else late[0], error

    # -- failure ----------------------------------------------------------------------------------

    def replace(self, worker_id: int) -> None:
        """Stop all workers, create new ones and restore the kept state."""
        self.stop()
        self.budget.settle()
        self.start()
        self.gradients.restart(self)
        for setup in self.setups:
            for new_id in range(self.count):
                setup.set_up(self, new_id)

    def report_replacement(
        self, worker_id: int, error: Exception, method: str, epoch: int | None, seconds: float
    ) -> None:
        """Record the loss: which worker, why, and how long training was interrupted."""
        if isinstance(error, MinirayError):
            error.add_fields(rank=worker_id)
        resumed_at = self.gradients.kept_step
        died_at = epoch + 1 if method == "train_epoch" and epoch is not None else None
        event = create_restart_event(error, epoch, died_at, resumed_at, seconds)
        self.on_event({"lost_steps": 0, **event})

    def stop(self) -> None:
        """Stop all workers, and read the results of unanswered calls."""
        super().stop()
        read_unanswered(self._unanswered)
        self._unanswered.clear()
