"""``RankCheckpoints``: the state of ranks in checkpoints.

Ranks copy their state to shared memory, from which a thread writes it. A run that is stopped inside
a step leaves the newest snapshot as its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import miniray
from miniray.core import session
from miniray.errors import CheckpointError, WeightsDivergedError
from miniray.train.lockstep.health.failure import find_divergence
from miniray.train.lockstep.snapshots.memory import CheckpointMemory
from miniray.train.lockstep.snapshots.state import Keep, share_positions
from miniray.train.options import warn
from miniray.train.run.checkpointer import Part
from miniray.train.run.checkpoints.format import LateState
from miniray.train.workers.checkpoint_parts import WeightSync, WorkerCheckpoints

if TYPE_CHECKING:
    from miniray.train.lockstep.group import LockstepGroup
    from miniray.train.lockstep.parallelism import Parallelism
    from miniray.train.lockstep.snapshots.arena import Snapshot
    from miniray.train.run.checkpointer import Checkpointer
    from miniray.train.run.session import RunSession
    from miniray.train.run.state import TrainState


class RankCheckpoints(WorkerCheckpoints):
    """The state of ranks in checkpoints: weights, own states, and the state that they share.

    Args:
        get_group: Returns the ranks.
        parallelism: How they divide the work.
        on_divergence: If ranks that should have the same weights have different ones, raise
            ``WeightsDivergedError`` (``"error"``) or only leave out checkpoints (``"warn"``).
    """

    def __init__(
        self,
        get_group: Callable[[], LockstepGroup],
        parallelism: Parallelism,
        on_divergence: Literal["error", "warn"],
    ) -> None:
        super().__init__(get_group, WeightSync())
        self._parallelism, self._on_divergence = parallelism, on_divergence
        self._memory = CheckpointMemory()
        self._names = ("weights", "workers", parallelism.kind)

    def register(self, checkpointer: Checkpointer, session: RunSession, state: TrainState) -> None:
        super().register(checkpointer, session, state)
        shared = Part(self.gather_shared, self._load_shared)
        checkpointer.register(self._parallelism.kind, shared, in_workers=True)

    def get_weights(self) -> list[Any]:
        return [self._parallelism.merge_weights(self.get_group().call("gather_weights"))]

    def gather_shared(self) -> Any:
        """Return the state that all ranks share, merged."""
        return self._parallelism.merge_shared(self.get_group().call("gather_shared"))

    def _load_shared(self, shared: Any) -> None:
        shared = miniray.put(shared)
        self.get_group().call("load_shared", lambda _: (shared,), keep=Keep.ALL)

    # -- writing ----------------------------------------------------------------------------------

    def can_save(self) -> bool:
        """Return whether all replicas have the same weights.

        Raises:
            WeightsDivergedError: They don't, and ``on_divergence`` is ``"error"``.
        """
        group, step = self.get_group(), self.state.step
        replicas = [r for r in self._parallelism.list_replicas(group.count) if len(r) > 1]
        found = find_divergence(group.call("get_checksums"), replicas) if replicas else None
        if found is None:
            return True
        message, name = found.describe(step), found.parameters[0]
        event = {"event": "weights_diverged", "rank": found.rank, "parameter": name, "step": step}
        self.session.append_event({**event, "message": message})
        if self._on_divergence == "error":
            raise WeightsDivergedError(message, rank=found.rank, entry=name, step=step)
        warn(message)
        return False

    def keep(self) -> LateState | None:
        """Copy the ranks' state to shared memory, from which a thread writes a checkpoint.

        If ranks share no memory, each writes its part itself, unless one has the whole model.
        """
        self.checkpointer.wait()  # it may be reading the memory
        can = session.engine().capabilities
        if not can.processes:
            return None
        if not can.shared_memory:
            is_sharded = self._parallelism.is_sharded
            return LateState(self._names, self._save_shards, at_once=True) if is_sharded else None
        group = self.get_group()
        if not group.run(partial(group.keep_state, self._memory), keep=Keep.NOTHING):
            return None
        return LateState(self._names, self._read_memory)

    def _read_memory(self, directory: Path) -> tuple[Mapping[str, Any], Sequence[str]]:
        del directory
        return self._name_parts(*self._convert(self._memory.read())), ()

    def _save_shards(self, directory: Path) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Let the ranks write their parts to a directory that all of them see."""
        group = self.get_group()
        found = group.run(partial(group.save_shards, directory), keep=Keep.NOTHING)
        saved, own = [shards for shards, _ in found], [state for _, state in found]
        for shards in saved:
            if shards.problem is not None:
                raise CheckpointError(shards.problem, entry=str(directory))
        files = [shards.file for shards in saved if shards.file is not None]
        for rank, shards in enumerate(saved):
            if shards.file is not None and not (directory / shards.file).is_file():
                raise CheckpointError(
                    f"rank {rank} has written {shards.file}, which the driver doesn't see. The run "
                    "directory must be on a file system that all machines share",
                    entry=str(directory / shards.file),
                )
        local = [shards.state["local"] for shards in saved]
        weights, shared = self._parallelism.merge_local(saved[0].state["shared"], local)
        return self._name_parts(weights, shared, own), files

    def _name_parts(self, weights: Any, shared: Any, own: Sequence[Any]) -> dict[str, Any]:
        workers = {"count": len(own), "states": list(own)}
        return dict(zip(self._names, ([weights], workers, shared), strict=True))

    def _convert(self, snapshot: Snapshot) -> tuple[Any, Any, Sequence[Any]]:
        """Return the whole weights, the shared state and the ranks' states of a snapshot."""
        own = snapshot.own
        local = [state["local"] for state in own]
        weights, shared = self._parallelism.merge_local(snapshot.shared, local)
        if own[0]["weights"] is not None:  # the worker's own
            weights = own[0]["weights"]
        return weights, shared, [state["state"] for state in own]

    def save_newest(self) -> None:
        """Stop the ranks, which didn't reach the end of their step, and save their newest state."""
        group, state = self.get_group(), self.state
        group.stop()
        group.take_newest_snapshot()
        if group.snapshots.is_empty:
            return
        weights, shared, own = group.snapshots.get_parts(self._convert)
        position = shared["position"]
        state.epoch, state.step = position["epoch"], position["step"]
        state.step_in_epoch = position["step_in_epoch"]
        self.checkpointer.wait()
        if state.step and not self.checkpointer.is_saved(state):
            parts = self._name_parts(weights, shared, own)
            self.checkpointer.save(state, late=LateState(tuple(parts), lambda _: (parts, ())))

    # -- reading ----------------------------------------------------------------------------------

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Restore all parts. Ranks that restart in between restart with this state."""
        group, workers = self.get_group(), loaded["workers"]
        if workers["count"] != group.count:
            states = share_positions(workers["states"], group.count)
            workers = {**workers, "states": states}
        loaded = {**loaded, "workers": workers}
        weights, _, shared = (loaded[name] for name in self._names)
        group.snapshots.set(loaded["state"]["step"], weights[0], shared, workers["states"])
        group.step_snapshots.clear()
        self.warn_of_other_size(loaded)
        self.checkpointer.restore(loaded, lambda: list(group.handles))

    def close(self) -> None:
        """Free the memory."""
        self._memory.close()
