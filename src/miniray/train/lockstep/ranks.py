"""``RunningRanks``: the actors of all ranks, and calls of all of them at once.

After an error the other ranks are stuck in a collective, so all of them have to be stopped. The
error that is raised is that of the root cause, which may arrive a few seconds later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import miniray
from miniray.core import session
from miniray.doctor.findings import named
from miniray.errors import ActorDiedError, MinirayError, TaskError, WorkerTimeoutError
from miniray.train.lockstep.health.failure import (
    add_rank_context,
    create_group_error,
    find_root_cause,
)
from miniray.train.lockstep.health.monitor import HeartbeatMonitor, Verdict
from miniray.train.lockstep.health.status import LogReader
from miniray.train.lockstep.options import choose_backend
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.lockstep.schedule import Action
from miniray.train.run.progress import StepBar
from miniray.train.run.step_log import LogWindow
from miniray.train.workers.errors import add_error_context
from miniray.train.workers.group import end, filter_kwargs, get_method_spec, read_unanswered

#: The method that trains an epoch: its errors have a step.
TRAIN_EPOCH = "run_rank_epoch"

#: Seconds between two checks of the ranks' heartbeats.
POLL_INTERVAL_S = 0.5
_LEAVE_TIMEOUT_S = 5.0  # for ranks to leave the process group
#: Seconds for the cause to arrive after its first consequence.
CAUSE_TIMEOUT_S = 5.0


@dataclasses.dataclass
class Answers:
    """The state of a call of several ranks.

    Attributes:
        pending: Ranks that haven't answered, by ref.
        get: Returns the result for a ref, or raises its error.
        results, failures: By rank.
        verdict: The ranks that won't answer.
    """

    pending: dict[Any, int]
    get: Callable[[Any], Any] = miniray.get
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    failures: dict[int, Exception] = dataclasses.field(default_factory=dict)
    verdict: Verdict | None = None

    def receive(self, timeout: float | None) -> bool:
        """Wait for a result or a failure; return whether there was one."""
        ready = miniray.wait(list(self.pending), timeout=timeout)[0]
        for ref in ready:
            rank = self.pending.pop(ref)
            try:
                self.results[rank] = self.get(ref)
            # User code raises anything. It is raised again by the caller.
            except Exception as error:
                self.failures[rank] = error
        return bool(ready)


@dataclasses.dataclass(eq=False, kw_only=True)
class RunningRanks:
    """The actors of all ranks, from their start until ``stop``; see the module.

    After ``stop``, new actors may be added. ``LockstepGroup`` documents the attributes that it
    passes on.
    """

    hang_timeout: float
    call_timeout: float | None
    run_dir: Path
    shows_progress: bool
    describe_part: Callable[[int], str | None]
    on_poll: Callable[[list[LogWindow]], None]
    get_epochs: Callable[[], int | None]
    handles: list[Any] = dataclasses.field(default_factory=list)
    steps_per_epoch: int | None = None
    knows_steps: bool = False
    _host: GroupHost | None = None
    _monitor: HeartbeatMonitor | None = None
    _logs: LogReader | None = None
    _is_broken: bool = False
    _unanswered: list[Any] = dataclasses.field(default_factory=list)

    # -- process group ----------------------------------------------------------------------------

    @property
    def has_joined(self) -> bool:
        """Whether the ranks have joined each other, or failed to."""
        return self._host is not None

    def join(
        self,
        facts: Sequence[Mapping[str, Any]],
        agreed: Any,
        *,
        name: str,
        backend: str,
        timeout: float,
    ) -> None:
        """Let the ranks form a process group.

        Args:
            facts: Results of ``prepare_rank``, by rank.
            agreed: Values on which the ranks agree.
            name, backend, timeout: See ``LockstepGroup``.
        """
        machines = {fact["host"] for fact in facts}
        self._host = GroupHost(
            len(self.handles),
            backend=choose_backend(backend, facts),
            name=name,
            timeout=timeout,
            other_machines=len(machines) > 1 or session.engine().capabilities.multi_node,
        )
        self._monitor = HeartbeatMonitor(self._host, self.hang_timeout, self.run_dir)
        self._logs = LogReader(self._host.store, self._host.spec)
        arguments = (self._host.spec, agreed, len(machines) == 1)
        self.steps_per_epoch = self.call("join_group", lambda _: arguments)[0]
        self.knows_steps = self.call("count_epoch_steps")[0] is not None
        self._is_broken = False

    def leave(self) -> None:
        """Let the ranks leave the process group, if they can. In this process they always can."""
        if not miniray.is_initialized():
            return
        if self._is_broken and session.engine().capabilities.processes:
            return
        leaving = [worker.leave_group.remote() for worker in self.handles]
        with contextlib.suppress(MinirayError):  # they are stopped in a moment in any case
            miniray.get(leaving, timeout=_LEAVE_TIMEOUT_S)

    def stop(self) -> list[LogWindow]:
        """Stop all ranks and the store; return the log windows that weren't read yet."""
        for worker in self.handles:
            end(worker)
        self.handles.clear()
        self._monitor = None
        read_unanswered(self._unanswered)
        self._unanswered.clear()
        windows = self.read_logs()
        self.close()
        return windows

    def close(self) -> None:
        """Close the store of the process group, after the ranks have exited."""
        host, self._host, self._logs = self._host, None, None
        if host is not None:
            host.close()

    # -- messages ---------------------------------------------------------------------------------

    def read_logs(self) -> list[LogWindow]:
        """Return the log windows that the ranks have posted since the last call."""
        return [] if self._logs is None else self._logs.read()

    def request(self, action: Action, argument: int = 0) -> None:
        """Ask the ranks for an action. All take it after the same step, in about a second."""
        if self._host is not None:
            key, text = f"{self._host.spec.name}/request", json.dumps([action, argument])
            self._host.store.set(key, text)

    # -- calls ------------------------------------------------------------------------------------

    def call(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]] = lambda rank: (),
        kwargs: Callable[[int], Mapping[str, Any]] = lambda rank: {},
        epoch: int | None = None,
        *,
        ranks: Iterable[int] | None = None,
        reports_progress: bool = False,
    ) -> list[Any]:
        """Call a method of ranks at once; return the results in their order.

        Args:
            method: Name of the method.
            arguments: Returns the positional arguments for a rank.
            kwargs: Returns the keyword arguments for a rank, which gets those that its method
                accepts.
            epoch: For errors.
            ranks: Which ranks; all by default.
            reports_progress: The ranks report progress in this call, so one that hangs is found.

        Raises:
            ActorDiedError, WorkerTimeoutError: A rank was lost. The error has ``rank``, ``epoch``
                and, in an epoch, ``step``.
        """
        pending = {}
        for rank in range(len(self.handles)) if ranks is None else ranks:
            worker = self.handles[rank]
            spec = get_method_spec(worker, method)
            given = filter_kwargs(spec.signature if spec else None, kwargs(rank))
            pending[getattr(worker, method).remote(*arguments(rank), **given)] = rank
        called, answers = list(pending.values()), Answers(pending)
        try:
            self._await(answers, method, epoch, reports_progress)
            if answers.failures or answers.verdict is not None:
                raise self._create_error(answers, method, epoch, reports_progress)
        except BaseException:
            self._is_broken = True
            self._unanswered += answers.pending
            raise
        return [answers.results[rank] for rank in called]

    def _await(
        self, answers: Answers, method: str, epoch: int | None, reports_progress: bool
    ) -> None:
        """Wait until all ranks have answered, or until it is known that some won't."""
        monitor, pending, notice_s = self._monitor, answers.pending, self.hang_timeout
        shows_bar = reports_progress and self.shows_progress
        bar = StepBar(epoch or 0, self.steps_per_epoch, shows_bar, self.get_epochs())
        start = answered = time.monotonic()
        give_up: float | None = None
        with contextlib.closing(bar):
            while pending and answers.verdict is None:
                has_answer = answers.receive(POLL_INTERVAL_S)
                now = time.monotonic()
                answered = now if has_answer else answered
                if answers.failures:
                    give_up = give_up or now + CAUSE_TIMEOUT_S
                    if find_root_cause(answers.failures) is not None or now > give_up:
                        return
                elif not pending:
                    return
                elif self.call_timeout is not None and now > start + self.call_timeout:
                    late = sorted(pending.values())
                    text = f"{named(late)} gave no result in {self.call_timeout:g} s"
                    answers.verdict = Verdict(late, text)
                elif monitor is not None and reports_progress:
                    bar.update(monitor.read())
                    self.on_poll(self.read_logs())
                    answers.verdict = monitor.find_hung(pending.values(), answered)
                elif monitor is not None and (verdict := monitor.find_stopped(pending.values())):
                    answers.verdict = verdict
                elif now > start + notice_s:
                    self._print_waiting(method, pending.values(), now - start)
                    notice_s *= 2

    def _print_waiting(self, method: str, ranks: Iterable[int], seconds: float) -> None:
        """Print which ranks haven't answered, and how to find out why."""
        text = (
            f"{named(ranks)}: {method}() takes {seconds:.0f} s so far and "
            f"is waited for; `miniray doctor {self.run_dir}` shows where it is, worker_timeout= "
            "would set a limit"
        )
        print(text, file=sys.stderr, flush=True)

    def _create_error(
        self, answers: Answers, method: str, epoch: int | None, reports_progress: bool
    ) -> Exception:
        """Return the error of the root cause."""
        failures, pending = answers.failures, answers.pending
        positions = self._monitor.read_last_positions() if self._monitor is not None else []
        cause = find_root_cause(failures)
        if cause is None and not pending and not reports_progress:
            cause = next(iter(failures.items()))  # it may not be about a collective
        if cause is None:
            ranks = sorted(pending.values())
            return self._add_part(
                create_group_error(failures, ranks, answers.verdict, epoch, positions)
            )
        rank, error = cause
        position = positions[rank] if positions and method == TRAIN_EPOCH else None
        return self._add_part(add_rank_context(error, rank, epoch, position, self.get_epochs()))

    def _add_part(self, error: Exception) -> Exception:
        """Add the part of the model that a lost rank held to its error."""
        rank = getattr(error, "rank", None)
        part = None if rank is None else self.describe_part(rank)
        is_lost = isinstance(error, (ActorDiedError, WorkerTimeoutError))
        if part is None or not is_lost or isinstance(error, TaskError):
            return error
        return add_error_context(error, part)
