"""Memory that driver and ranks share: for snapshots inside epochs, and for checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from miniray.core import SharedBuffer
from miniray.errors import ObjectStoreFullError
from miniray.train.lockstep.snapshots.arena import Snapshot, SnapshotArena
from miniray.train.options import warn
from miniray.train.run.step_log import LogWindow

if TYPE_CHECKING:
    from miniray.train.lockstep.ranks import RunningRanks

#: Part of the training time that ``snapshot_every="auto"`` spends on copies.
_COPY_SHARE = 0.005
#: Steps of all ranks whose duration ``"auto"`` measures. The first of a run take longer.
_MEASURED_STEPS = 10


class SnapshotNeed(NamedTuple):
    """Memory that a rank needs for a snapshot, or why it can't write any inside an epoch."""

    nbytes: int
    problem: str = ""


class CheckpointMemory:
    """Shared memory for the state of one step, from which the driver writes a checkpoint."""

    def __init__(self) -> None:
        self._arena = SnapshotArena(num_slots=1)
        self._buffers: list[SharedBuffer] = []
        self._owners: dict[int, Any] = {}  # the actors that have the buffers
        self._has_warned = False

    def keep_state(self, ranks: RunningRanks, on_event: Callable[[dict[str, Any]], None]) -> bool:
        """Let the ranks copy their state here; return False if there isn't enough memory."""
        for _ in range(2):
            if len(self._buffers) != len(ranks.handles):
                if not self.reserve(ranks.call("measure_state")):
                    return False
                on_event({"event": "checkpoint_memory_reserved", "bytes": self._arena.nbytes})
            if all(ranks.call("keep_state", lambda rank: self._get_arguments(ranks, rank))):
                return True
            self.close()  # the state has grown
        return False

    def reserve(self, needs: Sequence[SnapshotNeed]) -> bool:
        """Reserve memory for all ranks; return whether there is enough. If not, warn once."""
        self.close()
        problem = next((need.problem for need in needs if need.problem), None)
        if problem is not None:
            return False  # the state can't be stored at all, as the checkpoint will say
        try:
            self._buffers = self._arena.reserve([need.nbytes for need in needs])
        except ObjectStoreFullError as error:
            if not self._has_warned:
                warn(f"Ranks wait while checkpoints are written: {error}")
            self._has_warned = True
            return False
        return True

    def _get_arguments(self, ranks: RunningRanks, rank: int) -> tuple[SharedBuffer | None]:
        """Return the arguments of ``keep_state`` for a rank: its buffer, unless it has it."""
        if self._owners.get(rank) is ranks.handles[rank]:
            return (None,)
        self._owners[rank] = ranks.handles[rank]
        return (self._buffers[rank],)

    def read(self) -> Snapshot:
        """Return the state that all ranks have written. Its arrays are overwritten by the next."""
        step = self._arena.find_newest_step()
        assert step is not None
        return self._arena.read(step, copy=False)

    def close(self) -> None:
        """Free the memory once no rank uses it."""
        self._arena.close()
        self._buffers, self._owners = [], {}


class StepSnapshots:
    """The memory for snapshots inside epochs, and how often ranks write one.

    The memory is reserved after the first step, because only then the optimizer has its state.

    Args:
        requested: Steps between two snapshots, ``"auto"``, or None for no snapshots.
        on_event: Called with each event of the run.
    """

    def __init__(
        self, requested: int | Literal["auto"] | None, on_event: Callable[[dict[str, Any]], None]
    ) -> None:
        self._requested, self._on_event = requested, on_event
        self._arena = SnapshotArena()
        self._copy_seconds = 0.0
        self._num_kept = 0
        self.buffers: list[SharedBuffer] = []
        #: Whether the memory has yet to be reserved.
        self.is_pending = requested is not None
        #: Steps between two snapshots; None without memory for them.
        self.every: int | None = None
        self._is_tuned = requested != "auto"
        self._measured_steps, self._measured_seconds = 0, 0.0

    @property
    def num_slots(self) -> int:
        return self._arena.num_slots

    @property
    def newest_step(self) -> int | None:
        """The step of the newest snapshot of all ranks."""
        return self._arena.find_newest_step()

    def open(self, ranks: RunningRanks, step_seconds: float) -> None:
        """Reserve memory, and let the ranks write snapshots from now on.

        Args:
            ranks: The ranks.
            step_seconds: Duration of the first step.
        """
        if self.reserve(ranks.call("measure_snapshot")):
            self.start(self._open_buffers(ranks, measure=True), step_seconds)

    def reopen(self, ranks: RunningRanks) -> None:
        """Let ranks that have restarted write snapshots, if those before did."""
        if not self.buffers:
            return
        is_resized = len(self.buffers) != len(ranks.handles)  # each rank has a part of the state
        if not is_resized or self.reserve(ranks.call("measure_snapshot")):
            self._open_buffers(ranks, measure=False)

    def _open_buffers(self, ranks: RunningRanks, *, measure: bool) -> float:
        """Give each rank its buffer; return how long a snapshot takes if it is measured."""
        buffers, num_slots = self.buffers, self.num_slots
        seconds = ranks.call("open_snapshots", lambda rank: (buffers[rank], num_slots, measure))
        return float(max(seconds))

    def reserve(self, needs: Sequence[SnapshotNeed]) -> bool:
        """Reserve memory for all ranks; return whether there is enough.

        Otherwise, warn once if the user should know, and leave snapshots out.
        """
        problems = [need.problem for need in needs if need.problem]
        nbytes = self.num_slots * sum(need.nbytes for need in needs)
        try:
            if not problems:
                self.buffers = self._arena.reserve([need.nbytes for need in needs])
                return True
            problem, is_expected = problems[0], self._requested == "auto"
        except ObjectStoreFullError as error:
            problem, is_expected = str(error), False
        self.close()
        self._on_event({"event": "snapshots_disabled", "bytes": nbytes, "reason": problem})
        if not is_expected:
            warn(
                f"There are no snapshots inside epochs, which need {nbytes} bytes of shared "
                "memory: a rank that is lost costs the steps since the last epoch or checkpoint "
                f"({problem})"
            )
        return False

    def start(self, copy_seconds: float, step_seconds: float) -> None:
        """Set the interval. ``"auto"`` tunes it once more steps have been measured."""
        self.is_pending, self._copy_seconds = False, copy_seconds
        if self._requested == "auto":
            self.every = self._choose_interval(step_seconds)
        else:
            self.every = self._requested
        size = self._arena.nbytes
        self._on_event({"event": "snapshots_started", "bytes": size, "every": self.every})

    def tune(self, windows: Iterable[LogWindow]) -> int | None:
        """Return a new interval, once, if steps in these log windows show how long they take."""
        if self._is_tuned or self.every is None:
            return None
        for window in windows:
            if window.step > window.steps:  # not that of the first step
                self._measured_steps += window.steps
                self._measured_seconds += window.seconds
        if self._measured_steps < _MEASURED_STEPS:
            return None
        self._is_tuned = True
        step_seconds = self._measured_seconds / self._measured_steps
        self.every = self._choose_interval(step_seconds)
        event = {"event": "snapshots_tuned", "every": self.every, "step_seconds": step_seconds}
        self._on_event({**event, "copy_seconds": self._copy_seconds})
        return self.every

    def _choose_interval(self, step_seconds: float) -> int:
        return max(1, math.ceil(self._copy_seconds / (_COPY_SHARE * max(step_seconds, 1e-6))))

    def count_next(self) -> int:
        """Return the count of the snapshots that ranks write from now on; see ``arena``."""
        self._num_kept += 1
        return self._num_kept

    def take_newest(self, after: int | None) -> Snapshot | None:
        """Return the newest snapshot of all ranks if it is newer than step ``after``.

        All snapshots are removed, because ranks that restart begin with the first slot. Call it
        only while no rank runs.
        """
        step = self._arena.find_newest_step()
        is_newer = step is not None and (after is None or step > after)
        found = self._arena.read(step) if step is not None and is_newer else None
        self._arena.clear()
        return found

    def clear(self) -> None:
        """Remove all snapshots, while ranks wait for calls. The run continues from another step."""
        self._arena.clear()

    def close(self) -> None:
        """Free the memory once no rank uses it."""
        self._arena.close()
        self.buffers, self.every, self.is_pending = [], None, False
