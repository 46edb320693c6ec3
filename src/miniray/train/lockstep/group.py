"""``LockstepGroup``: starts the ranks, and restarts all of them after a loss.

Ranks aren't replaced one by one, because after an error the others are stuck in a collective. The
first failure stops all ranks; ``RunningRanks`` finds its root cause.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.train.lockstep.health.failure import create_restart_event
from miniray.train.lockstep.ranks import RunningRanks
from miniray.train.lockstep.schedule import Action
from miniray.train.lockstep.snapshots.memory import CheckpointMemory, StepSnapshots
from miniray.train.lockstep.snapshots.state import Keep, RankSnapshots
from miniray.train.run.step_log import LogWindow
from miniray.train.workers.budget import (
    Decision,
    FailureBudget,
    TooFewRanksError,
    WorldSize,
    is_loss,
)
from miniray.train.workers.group import check_worker, get_method_spec

T = TypeVar("T")


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
        on_ready: Called once, after the ranks have started.
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
    on_ready: Callable[[], None] = lambda: None
    world: WorldSize = dataclasses.field(default_factory=WorldSize)
    get_epochs: Callable[[], int | None] = lambda: None
    keep_initial: Keep = Keep.ALL
    #: Calls a method of ranks at once, without recovery; see ``RunningRanks.call``.
    call_ranks: Callable[..., list[Any]] = dataclasses.field(init=False)
    _ranks: RunningRanks = dataclasses.field(init=False)
    _unread_logs: list[LogWindow] = dataclasses.field(default_factory=list)
    _is_restarting: bool = False
    _last_count: int = 0  # of ranks that trained

    def __post_init__(self) -> None:
        self._ranks = RunningRanks(
            hang_timeout=self.hang_timeout,
            call_timeout=self.call_timeout,
            run_dir=self.run_dir,
            shows_progress=self.shows_progress,
            describe_part=self.describe_part,
            on_poll=self.on_poll,
            get_epochs=self.get_epochs,
        )
        self.call_ranks = self._ranks.call

    @property
    def handles(self) -> list[Any]:
        """The actors by rank; none before ``start`` and after ``stop``."""
        return self._ranks.handles

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps of each epoch; None if they aren't known or differ."""
        return self._ranks.steps_per_epoch

    @property
    def knows_steps(self) -> bool:
        """Whether the ranks know the steps of an epoch when they start it."""
        return self._ranks.knows_steps

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
        self.on_ready()

    def _join(self) -> None:
        if self._ranks.has_joined:  # by a restart
            return
        facts, agreed = self.prepare(self)
        self._ranks.join(facts, agreed, name=self.name, backend=self.backend, timeout=self.timeout)

    def _restart(self, lost: Exception, epoch: int | None, epoch_start: int | None) -> None:
        """Stop all ranks and start them with the newest snapshot, or else the initial state."""
        start = time.monotonic()
        self._is_restarting = True
        try:
            self.stop()  # whatever they are in
            self.take_newest_snapshot()
            self.budget.settle()
            rank: int | None = getattr(lost, "rank", None)
            self._start_from_snapshot(self.world.shrink(self.count, rank, self.snapshots.step))
        finally:
            self._is_restarting = False
        seconds, resumed_at = time.monotonic() - start, self.snapshots.step
        step: int | None = getattr(lost, "step", None)
        died_at = None if epoch_start is None or step is None else epoch_start + step
        self.on_event(create_restart_event(lost, epoch, died_at, resumed_at, seconds))
        self._report_resize()

    def take_newest_snapshot(self) -> None:
        """Move the newest state from shared memory to ``snapshots``. No rank may be running."""
        after = None if self.snapshots.is_stored else self.snapshots.step
        newest = self.step_snapshots.take_newest(after)
        if newest is not None:
            self.snapshots.set_local(newest)

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
        else:
            self.step_snapshots.reopen(self._ranks)
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
        self._collect_state()
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

    # -- snapshots inside an epoch ----------------------------------------------------------------

    def open_snapshots(self, step_seconds: float) -> None:
        """Reserve memory for snapshots inside epochs, and let the ranks write them from now on.

        Args:
            step_seconds: Duration of the first step.
        """
        self.step_snapshots.open(self._ranks, step_seconds)

    def keep_state(self, memory: CheckpointMemory) -> bool:
        """Let the ranks copy their state to ``memory``; return False if there isn't enough."""
        return memory.keep_state(self._ranks, self.on_event)

    def save_shards(self, directory: Path) -> list[Any]:
        """Let the ranks write their parts of a checkpoint; return what ``save_shards`` returns."""
        for path in directory.iterdir():  # of ranks that were lost while they wrote
            path.unlink()
        return self.call_ranks("save_shards", lambda _: (directory.resolve(),))

    def leave(self) -> None:
        """Let the ranks leave the process group, if they can."""
        self._ranks.leave()

    def stop(self) -> None:
        """Stop all ranks and the store of the process group."""
        self._unread_logs += self._ranks.stop()

    def close(self) -> None:
        """Close the store of the process group, after the ranks have exited."""
        self._ranks.close()

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
        arguments: Callable[[int], tuple[Any, ...]] = lambda rank: (),
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
        elif keep is Keep.NOTHING:
            return
        elif self.step_snapshots.buffers:
            count = self.step_snapshots.count_next()
            steps = self.call_ranks("keep_snapshot", lambda _: (count,))
            if None not in steps:
                self.snapshots.set_stored(steps[0])
            else:
                self._collect_state()
        elif keep is Keep.ALL:
            self._collect_state()
        else:
            self.snapshots.set_own(self.call_ranks("get_state"))

    def _collect_state(self) -> None:
        self.snapshots.collect(self.call_ranks("get_snapshot"))
        self.step_snapshots.clear()

    # -- calls ------------------------------------------------------------------------------------

    def has(self, method: str) -> bool:
        return get_method_spec(self.handles[0], method) is not None

    def read_logs(self) -> list[LogWindow]:
        """Return the log windows that the ranks have posted since the last call."""
        return self._ranks.read_logs()

    def request(self, action: Action, argument: int = 0) -> None:
        """Ask the ranks for an action. All take it after the same step, in about a second."""
        self._ranks.request(action, argument)

    def request_stop(self) -> None:
        """Ask the ranks to stop at one of the next steps."""
        self.request(Action.STOP)
