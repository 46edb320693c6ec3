"""``LockstepGroup``: starts the ranks, calls all of them at once, and restarts them after a loss.

Ranks aren't replaced one by one, because after an error the others are stuck in a collective. The
first failure stops all ranks. The error that is raised is that of the root cause, which may arrive
a few seconds later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import miniray
from miniray.core import session
from miniray.doctor.findings import named
from miniray.errors import ActorDiedError, MinirayError, TaskError, WorkerTimeoutError
from miniray.train.lockstep.failure import (
    add_rank_context,
    create_group_error,
    describe_loss,
    find_root_cause,
)
from miniray.train.lockstep.monitor import HeartbeatMonitor, Verdict
from miniray.train.lockstep.options import choose_backend
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.lockstep.schedule import Action
from miniray.train.lockstep.snapshots.state import (
    CheckpointMemory,
    Keep,
    RankSnapshots,
    StepSnapshots,
)
from miniray.train.lockstep.status import LogReader
from miniray.train.run.progress import StepBar
from miniray.train.run.step_log import LogWindow
from miniray.train.workers.budget import (
    Decision,
    FailureBudget,
    TooFewRanksError,
    WorldSize,
    is_loss,
)
from miniray.train.workers.group import (
    add_error_context,
    check_worker,
    end,
    filter_kwargs,
    get_method_spec,
)

T = TypeVar("T")

#: The method that trains an epoch: its errors have a step.
TRAIN_EPOCH = "run_rank_epoch"

_POLL_INTERVAL_S = 0.5  # between two checks of the ranks' heartbeats
_STOP_TIMEOUT_S = 5.0  # for calls of stopped ranks to fail, and for ranks to leave
_CAUSE_TIMEOUT_S = 5.0  # for the cause to arrive after its first consequence


def no_arguments(rank: int) -> tuple[Any, ...]:
    """Return no arguments for the call of a rank."""
    del rank
    return ()


def no_kwargs(rank: int) -> Mapping[str, Any]:
    """Return no keyword arguments for the call of a rank."""
    del rank
    return {}


@dataclasses.dataclass
class _Answers:
    """The state of a call of several ranks."""

    pending: dict[Any, int]  # ranks by ref
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    failures: dict[int, Exception] = dataclasses.field(default_factory=dict)
    verdict: Verdict | None = None

    def receive(self, timeout: float) -> bool:
        """Wait for a result or a failure; return whether there was one."""
        ready = miniray.wait(list(self.pending), timeout=timeout)[0]
        for ref in ready:
            rank = self.pending.pop(ref)
            try:
                self.results[rank] = miniray.get(ref)
            except (
                Exception
            ) as error:  # user code raises anything; it is raised again by the caller
                self.failures[rank] = error
        return bool(ready)


@dataclasses.dataclass(eq=False, kw_only=True)
class LockstepGroup:
    """All ranks of a run; see the module.

    Attributes:
        count: Number of ranks.
        create: Creates the actor of a rank.
        required: Methods that workers must have.
        prepare: Prepares new ranks with ``call_ranks``. Returns what ``prepare_rank`` returned, by
            rank, and what they agree on for ``join_group``. No rank may wait for others in it.
        snapshots: The state to restart from.
        step_snapshots: Newer ones inside an epoch.
        budget: Decides whether a lost rank may be repaired.
        name: Name of the process group.
        backend: ``"gloo"``, ``"nccl"`` or ``"auto"``.
        timeout: Seconds that ranks wait for each other in a collective.
        hang_timeout: Seconds without progress after which idle ranks hang. In calls whose ranks
            report no progress, the time after which a message names the ranks that haven't
            answered; it is repeated after twice as long, and so on.
        call_timeout: Seconds that a call may take, or None.
        run_dir: The run directory.
        shows_progress: Show a bar over the steps of an epoch.
        describe_part: Returns what is lost with a rank, or None if all ranks hold the same.
        on_event: Called with each event of the run.
        on_restored: Called after a restart with the step that training continues at, and the log
            windows that the ranks had posted since the last ``read_logs``.
        on_replaced: Called with each rank after a restart.
        on_resized: Called with the number of ranks before a restart that has changed it.
        on_poll: Called with new log windows while an epoch runs.
        world: Decides how many ranks restart.
        get_epochs: Returns the number of epochs at the end of the run, for people.
        keep_initial: The state to keep after the start, to restart from.
    """

    count: int
    create: Callable[[int], Any]
    required: Sequence[str]
    prepare: Callable[[LockstepGroup], tuple[Sequence[Mapping[str, Any]], Any]]
    snapshots: RankSnapshots
    step_snapshots: StepSnapshots
    budget: FailureBudget
    name: str
    backend: str
    timeout: float
    hang_timeout: float
    call_timeout: float | None
    run_dir: Path
    shows_progress: bool
    describe_part: Callable[[int], str | None]
    on_event: Callable[[dict[str, Any]], None]
    on_restored: Callable[[int | None, list[LogWindow]], None]
    on_replaced: Callable[[int], None]
    on_poll: Callable[[list[LogWindow]], None]
    on_resized: Callable[[int], None] = lambda before: None
    world: WorldSize = dataclasses.field(default_factory=WorldSize)
    get_epochs: Callable[[], int | None] = lambda: None
    keep_initial: Keep = Keep.ALL
    handles: list[Any] = dataclasses.field(default_factory=list)
    #: Optimizer steps of each epoch; None if they aren't known or differ.
    steps_per_epoch: int | None = None
    #: Whether the ranks know the steps of an epoch when they start it.
    knows_steps: bool = False
    _logs: LogReader | None = None
    _unread_logs: list[LogWindow] = dataclasses.field(default_factory=list)
    _host: GroupHost | None = None
    _monitor: HeartbeatMonitor | None = None
    _is_broken: bool = False
    _is_restarting: bool = False
    _last_count: int = 0  # of ranks that trained
    _unanswered: list[Any] = dataclasses.field(default_factory=list)

    # -- start and stop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Create the actors of all ranks. They start at the same time."""
        for rank in range(self.count):
            worker = self.create(rank)
            check_worker(worker, rank, self.required)
            self.handles.append(worker)

    def set_up_all(self) -> None:
        """Prepare the ranks and let them join each other."""
        self._last_count = self.count
        self.run(self._join, keep=self.keep_initial)

    def _join(self) -> None:
        if self._host is not None:  # by a restart
            return
        facts, agreed = self.prepare(self)
        machines = {fact["host"] for fact in facts}
        self._host = GroupHost(
            self.count,
            backend=choose_backend(self.backend, facts),
            name=self.name,
            timeout=self.timeout,
            other_machines=len(machines) > 1 or session.engine().capabilities.multi_node,
        )
        self._monitor = HeartbeatMonitor(self._host, self.hang_timeout, self.run_dir)
        self._logs = LogReader(self._host.store, self._host.spec)
        arguments = (self._host.spec, agreed, len(machines) == 1)
        self.steps_per_epoch = self.call_ranks("join_group", lambda _: arguments)[0]
        self.knows_steps = self.call_ranks("count_epoch_steps")[0] is not None
        self._is_broken = False

    def _restart(self, lost: Exception, epoch: int | None, epoch_start: int | None) -> None:
        """Stop all ranks and start them with the newest snapshot, or else the initial state."""
        start = time.monotonic()
        self._is_restarting = True
        try:
            self.stop()  # whatever they are in
            newest = self.step_snapshots.take_newest(self.snapshots.step)
            if newest is not None:
                self.snapshots.set_local(newest)
            self.budget.settle()
            rank: int | None = getattr(lost, "rank", None)
            self._start_from_snapshot(self.world.shrink(self.count, rank, self.snapshots.step))
        finally:
            self._is_restarting = False
        self._report_restart(lost, epoch, epoch_start, time.monotonic() - start)
        self._report_resize()

    def _start_from_snapshot(self, count: int) -> None:
        """Start ``count`` ranks with the state that is kept, or else the initial state."""
        if count != self.count:
            self.count = count
            self.snapshots.resize(count)
        self.start()
        self._join()
        if not self.snapshots.is_empty:
            self.call_ranks(*self.snapshots.create_call())
        if self.budget.is_spent:
            self.step_snapshots.close()
        elif buffers := self.step_snapshots.buffers:
            is_resized = len(buffers) != count  # each rank has a part of the state
            if not is_resized or self.step_snapshots.reserve(self.call_ranks("measure_snapshot")):
                self._open_buffers(measure=False)
        windows, self._unread_logs = self._unread_logs, []
        self.on_restored(self.snapshots.step, windows)
        for rank in range(count):
            self.on_replaced(rank)

    def grow(self) -> None:
        """Restart more ranks from the current state, if there is room for more."""
        larger = self.world.find_larger(self.count)
        if larger is not None:
            sizes = [larger]
            self.run(lambda: self._grow_once(sizes), keep=Keep.NOTHING)

    def _grow_once(self, sizes: list[int]) -> None:
        """Grow to the size in the list, unless a restart after a loss has emptied it."""
        if not sizes:
            return
        wanted = sizes.pop()
        self.snapshots.collect(self.call_ranks("get_snapshot"))
        self._is_restarting = True
        try:
            self.leave()
            self.stop()
            self._start_from_snapshot(self.world.grow(wanted))
        finally:
            self._is_restarting = False
        self._report_resize()

    def _report_resize(self) -> None:
        before, self._last_count = self._last_count, self.count
        if before != self.count:
            self.on_resized(before)

    def _report_restart(
        self, lost: Exception, epoch: int | None, epoch_start: int | None, seconds: float
    ) -> None:
        """Record the loss, and how long training was interrupted."""
        died_at, resumed_at = None, self.snapshots.step
        step_in_epoch: int | None = getattr(lost, "step", None)
        if epoch_start is not None and step_in_epoch is not None:
            died_at = epoch_start + step_in_epoch
        event: dict[str, Any] = {"event": "ranks_restarted", "epoch": epoch, "reason": str(lost)}
        event |= {"rank": getattr(lost, "rank", None), "died_at_step": died_at}
        event |= {"resumed_at_step": resumed_at, "seconds": seconds}
        if died_at is not None and resumed_at is not None:
            event["lost_steps"] = max(0, died_at - resumed_at)
        event["message"] = describe_loss(lost, died_at, resumed_at, seconds)
        self.on_event(event)

    # -- snapshots inside an epoch ----------------------------------------------------------------

    def open_snapshots(self, step_seconds: float) -> None:
        """Reserve memory for snapshots inside epochs, and let the ranks write them from now on.

        Args:
            step_seconds: Duration of the first step.
        """
        if self.step_snapshots.reserve(self.call_ranks("measure_snapshot")):
            self.step_snapshots.start(self._open_buffers(measure=True), step_seconds)

    def _open_buffers(self, *, measure: bool) -> float:
        """Give each rank its buffer; return how long a snapshot takes if it is measured."""
        buffers, num_slots = self.step_snapshots.buffers, self.step_snapshots.num_slots
        seconds = self.call_ranks(
            "open_snapshots", lambda rank: (buffers[rank], num_slots, measure)
        )
        return float(max(seconds))

    def keep_state(self, memory: CheckpointMemory) -> bool:
        """Let the ranks copy their state to ``memory``; return False if there isn't enough."""
        for _ in range(2):
            is_reserved = memory.is_reserved(self.count)
            if not is_reserved:
                if not memory.reserve(self.call_ranks("measure_state")):
                    return False
                self.on_event({"event": "checkpoint_memory_reserved", "bytes": memory.nbytes})
            assigned = partial(memory.get_arguments, self.handles)
            if all(self.call_ranks("keep_state", assigned)):
                return True
            memory.close()  # the state has grown
        return False

    def save_shards(self, directory: Path) -> list[Any]:
        """Let the ranks write their parts of a checkpoint; return what ``save_shards`` returns."""
        for path in directory.iterdir():  # of ranks that were lost while they wrote
            path.unlink()
        return self.call_ranks("save_shards", lambda _: (directory.resolve(),))

    def leave(self) -> None:
        """Let the ranks leave the process group, if they can. In this process they always can."""
        if not miniray.is_initialized():
            return
        if self._is_broken and session.engine().capabilities.processes:
            return
        leaving = [worker.leave_group.remote() for worker in self.handles]
        with contextlib.suppress(MinirayError):  # they are stopped in a moment in any case
            miniray.get(leaving, timeout=_STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Stop all ranks and the store, and read the results of unanswered calls.

        The engine would log the errors of calls whose results are dropped unread.
        """
        for worker in self.handles:
            end(worker)
        self.handles.clear()
        self._monitor = None
        unanswered, self._unanswered = self._unanswered, []
        for ref in unanswered if miniray.is_initialized() else ():
            with contextlib.suppress(Exception):
                miniray.get(ref, timeout=_STOP_TIMEOUT_S)
        self._unread_logs += self.read_logs()
        self.close()

    def close(self) -> None:
        """Close the store of the process group, after the ranks have exited."""
        host, self._host, self._logs = self._host, None, None
        if host is not None:
            host.close()

    # -- recovery ---------------------------------------------------------------------------------

    def run(
        self,
        attempt: Callable[[], T],
        *,
        epoch: int | None = None,
        epoch_start: int | None = None,
        keep: Keep = Keep.ALL,
    ) -> T:
        """Return ``attempt()``. If a rank is lost, restart all ranks and repeat it.

        Args:
            attempt: Calls ranks with ``call_ranks``, and changes nothing in this process.
            epoch: For events.
            epoch_start: Completed steps of the run at the start of the epoch, for events.
            keep: The state that ``attempt`` changes, which is kept afterwards. If a rank is lost
                before it is kept, the attempt is repeated.
        """
        lost: Exception | None = None
        while True:
            is_repairing = lost is not None
            try:
                if lost is not None:
                    self._restart(lost, epoch, epoch_start)
                is_repairing = False
                result = attempt()
                self._keep(keep)
                return result
            except TooFewRanksError:
                assert lost is not None  # it is raised by a restart only
                raise lost from lost.__cause__
            except (ActorDiedError, WorkerTimeoutError) as error:
                # A call that a callback makes during a restart is part of the restart.
                if self._is_restarting or not is_loss(error):
                    raise
                decision = self.budget.decide(error, is_repairing=is_repairing)
                rank = getattr(error, "rank", None)
                event = {"event": "worker_failed", "worker": rank, "epoch": epoch}
                self.on_event({**event, "reason": str(error)})
                if decision is Decision.RAISE:
                    raise
                lost = error

    def call(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]] = no_arguments,
        kwargs: Mapping[str, Any] | None = None,
        epoch: int | None = None,
        *,
        keep: Keep = Keep.NOTHING,
    ) -> list[Any]:
        """Call a method of all ranks, as ``run`` does; return the results by rank."""
        given = {} if kwargs is None else kwargs
        attempt = partial(self.call_ranks, method, arguments, lambda _: given, epoch)
        return self.run(attempt, epoch=epoch, keep=keep)

    def map(self, method: str, values: Mapping[int, Any]) -> dict[int, Any]:
        """Call ``method(value)`` on the ranks that have a value, as ``run`` does."""

        def attempt() -> dict[int, Any]:
            ranks = [rank for rank in values if rank < self.count]  # fewer after a restart
            found = self.call_ranks(method, lambda rank: (values[rank],), ranks=ranks)
            return dict(zip(ranks, found, strict=True))

        return self.run(attempt, keep=Keep.NOTHING)

    def _keep(self, keep: Keep) -> None:
        """Keep the state that a restart needs, if another one is allowed."""
        if self.budget.is_spent:
            self.snapshots.clear()
        elif keep is Keep.ALL:
            self.snapshots.collect(self.call_ranks("get_snapshot"))
        elif keep is Keep.OWN:
            self.snapshots.set_own(self.call_ranks("get_state"))

    # -- calls ------------------------------------------------------------------------------------

    def has(self, method: str) -> bool:
        return get_method_spec(self.handles[0], method) is not None

    def call_ranks(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]] = no_arguments,
        kwargs: Callable[[int], Mapping[str, Any]] = no_kwargs,
        epoch: int | None = None,
        *,
        ranks: Iterable[int] | None = None,
        reports_progress: bool = False,
    ) -> list[Any]:
        """Call a method of ranks at once, without recovery; return the results in their order.

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
        for rank in range(self.count) if ranks is None else ranks:
            worker = self.handles[rank]
            spec = get_method_spec(worker, method)
            given = filter_kwargs(spec.signature if spec else None, kwargs(rank))
            pending[getattr(worker, method).remote(*arguments(rank), **given)] = rank
        called, answers = list(pending.values()), _Answers(pending)
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
        self, answers: _Answers, method: str, epoch: int | None, reports_progress: bool
    ) -> None:
        """Wait until all ranks have answered, or until it is known that some won't."""
        monitor, pending, notice_s = self._monitor, answers.pending, self.hang_timeout
        shows_bar = reports_progress and self.shows_progress
        bar = StepBar(epoch or 0, self.steps_per_epoch, shows_bar, self.get_epochs())
        start = answered = time.monotonic()
        give_up: float | None = None
        with contextlib.closing(bar):
            while pending and answers.verdict is None:
                has_answer = answers.receive(_POLL_INTERVAL_S)
                now = time.monotonic()
                answered = now if has_answer else answered
                if answers.failures:
                    give_up = give_up or now + _CAUSE_TIMEOUT_S
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

    def read_logs(self) -> list[LogWindow]:
        """Return the log windows that the ranks have posted since the last call."""
        return [] if self._logs is None else self._logs.read()

    def request(self, action: Action, argument: int = 0) -> None:
        """Ask the ranks for an action. All take it after the same step, in about a second."""
        if self._host is not None:
            key, text = f"{self._host.spec.name}/request", json.dumps([action, argument])
            self._host.store.set(key, text)

    def request_stop(self) -> None:
        """Ask the ranks to stop at one of the next steps."""
        self.request(Action.STOP)

    def _print_waiting(self, method: str, ranks: Iterable[int], seconds: float) -> None:
        """Print which ranks haven't answered, and how to find out why."""
        text = (
            f"{named(ranks)}: {method}() takes {seconds:.0f} s so far and "
            f"is waited for; `miniray doctor {self.run_dir}` shows where it is, worker_timeout= "
            "would set a limit"
        )
        print(text, file=sys.stderr, flush=True)

    def _create_error(
        self, answers: _Answers, method: str, epoch: int | None, reports_progress: bool
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
