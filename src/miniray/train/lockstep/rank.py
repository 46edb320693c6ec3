"""``RankActor``: a rank, the actor that the driver calls.

After an error the process group is in an unknown state: the driver stops all ranks, and the process
isn't used again.
"""

from __future__ import annotations

import dataclasses
import inspect
import time
from typing import TYPE_CHECKING, Any

from miniray.errors import CheckpointError
from miniray.train.lockstep import process_group
from miniray.train.lockstep.context import RankContext, WorkerTraits, defines
from miniray.train.lockstep.options import RunFacts
from miniray.train.lockstep.snapshots.arena import SnapshotWriter, measure_slot
from miniray.train.lockstep.snapshots.memory import SnapshotNeed
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.context import WorkerContext
from miniray.train.workers.data.seeding import derive_seed, seed_generators
from miniray.train.workers.data.shards import TrainData, give_data
from miniray.train.workers.group import filter_kwargs

if TYPE_CHECKING:
    from pathlib import Path

    from miniray.core import SharedBuffer
    from miniray.train.lockstep.replica import EpochReport
    from miniray.train.run.state import TrainTarget
    from miniray.train.run.tensors.distributed import SavedShards


class RankActor:
    """One rank of a run: the methods that the driver calls, around the user's object.

    A rank is prepared (``prepare_rank``), joins the others (``join_group``), runs one epoch after
    the other (``run_rank_epoch``) and leaves (``leave_group``). Methods that users call too
    (``evaluate``, ``get_weights``, ...) use the user's own if the class has one, and otherwise do
    what ``TorchWorker`` does. Calls of all other methods go to the user's object.
    """

    def __init__(self, user: Any) -> None:
        self._user = user
        self._traits = WorkerTraits.from_class(type(user))
        self._context: Any = None
        self._replica: Any = None
        self._loop: Any = None
        self._writer: SnapshotWriter | None = None
        self._snapshot_count = 0  # see ``keep_snapshot``
        self._keeper: SnapshotWriter | None = None  # for checkpoints
        self._steps_per_epoch: int | None = None

    @staticmethod
    def __before_init__(user: Any) -> None:
        WorkerContext.from_environment().bind(user)

    # -- the life of a rank -----------------------------------------------------------------------

    def assign_data(self, data: TrainData, rank: int, world_size: int, **kwargs: Any) -> None:
        """Set the user's loaders from ``data=``, or call its ``load_data_shard`` with a shard."""
        has_own_load = self._traits.shards_data
        give_data(self._user, data, rank, world_size, kwargs, has_own_load=has_own_load)
        gets_loader = data.data is not None and not has_own_load
        self._traits = dataclasses.replace(self._traits, gets_loader=gets_loader)

    def prepare_rank(self, rank: int, world_size: int, facts: RunFacts) -> dict[str, Any]:
        """Check the user's object and return what the driver compares before any rank waits."""
        self._context = RankContext(rank, world_size, facts, self._user)
        self._replica = facts.create_replica(self._user, self._traits, self._context)
        found = self._replica.prepare()
        return {**self._context.describe(), **found}

    def join_group(
        self, spec: process_group.ProcessGroupSpec, agreed: Any, one_machine: bool
    ) -> int | None:
        """Join the process group; return the number of steps of each epoch, if it is known."""
        facts = self._context.facts
        start = type(self._context.state)(**facts.position)
        self._context.join(spec, one_machine)
        self._context.status.set_phase("wrapping the model")
        steps: int | None = self._replica.wrap(agreed)
        self._steps_per_epoch = steps
        total = self._context.set_target(facts.target, start, steps)
        self._replica.configure_scheduler(facts.schedule_steps or total)
        self._loop = self._replica.create_loop()
        self._context.status.set_phase("idle")
        return steps

    def run_rank_epoch(
        self,
        epoch: int,
        until: int | None = None,
        snapshot_every: int | None = None,
        target: TrainTarget | None = None,
    ) -> EpochReport:
        """Train an epoch together with all other ranks, or until a step inside it."""
        context = self._context
        context.start_epoch(epoch)
        if target is not None:
            context.set_target(target, context.state, self._steps_per_epoch)
        try:
            if snapshot_every is not None:
                self._loop.set_snapshot_interval(snapshot_every)
            report: EpochReport = self._loop.run(epoch, until)
        except Exception:
            context.post_status()
            raise
        context.status.set_phase("idle")
        if context.recorder is not None:
            context.recorder.flush()
        return report

    def count_global_batch(self) -> int | None:
        """Return the number of rows in a step of all ranks, if it is fixed and known."""
        size: int | None = self._replica.count_global_batch()
        return size

    def count_epoch_steps(self) -> int | None:
        """Return the steps of the epoch under way, if they are known."""
        steps: int | None = self._replica.count_epoch_steps()
        return steps

    def leave_group(self) -> None:
        """Leave the process group, if this rank has joined."""
        if self._context is not None:
            self._context.leave()

    # -- state ------------------------------------------------------------------------------------

    def gather_weights(self) -> Any:
        """Return this rank's part of the weights for the driver; None if other ranks' are enough.

        A collective if the model is sharded.
        """
        if "get_weights" in self._traits.own_methods:
            return None if self._context.rank else self._user.get_weights()
        return self._replica.state.gather_weights()

    def gather_shared(self) -> Any:
        """Return the state that all ranks share: optimizers, position, data order. See above."""
        return self._replica.state.gather_shared()

    def get_checksums(self) -> dict[str, int]:
        """Return a checksum of each parameter that this rank holds."""
        checksums: dict[str, int] = self._replica.state.get_checksums()
        return checksums

    def load_shared(self, shared: Any) -> None:
        self._replica.state.load_shared(shared)

    def get_snapshot(self) -> dict[str, Any]:
        """Return this rank's part of all that a restart needs."""
        weights, shared = self.gather_weights(), self.gather_shared()
        step = self._context.state.step
        return {"step": step, "weights": weights, "shared": shared, "own": self.get_state()}

    def load_snapshot(self, weights: Any, shared: Any, own: Any) -> None:
        """Restore a merged snapshot; ``own`` is None for a rank that the saved run didn't have."""
        if weights is not None:
            self.set_weights(weights)
        self.load_shared(shared)
        if own is not None:
            self.set_state(own)

    # -- snapshots inside an epoch, in shared memory ----------------------------------------------

    def measure_snapshot(self) -> SnapshotNeed:
        """Return how much memory a snapshot needs, once the optimizer has its state."""
        if not self._replica.has_position:
            return SnapshotNeed(0, "the train_loader can't start inside an epoch")
        return self.measure_state()

    def measure_state(self) -> SnapshotNeed:
        """Return how much memory the state of this rank needs."""
        context = self._context
        try:
            shared, own = self._get_local_state()
            return SnapshotNeed(measure_slot(shared, own, context.rank, context.world_size))
        except CheckpointError as error:  # such as an object in the user's get_state()
            return SnapshotNeed(0, str(error))

    def open_snapshots(self, buffer: SharedBuffer, num_slots: int, measure: bool) -> float:
        """Write snapshots to a buffer from now on.

        Args:
            buffer: This rank's.
            num_slots: Snapshots that fit.
            measure: Write this step to all slots, and return how long the last copy took. The
                first write to a slot takes longer, because the kernel provides the memory.
        """
        context = self._context
        self._writer = SnapshotWriter(buffer, num_slots, context.rank, context.world_size)
        self._loop.save_snapshot = self._save_snapshot
        start = time.perf_counter()
        for _ in range(num_slots + 1 if measure else 0):
            start = time.perf_counter()
            self._save_snapshot()
        return time.perf_counter() - start

    def keep_snapshot(self, count: int) -> int | None:
        """Write a snapshot while no step is under way. It is newer than those of a lower count.

        Returns:
            Its step; None if the state has outgrown the memory.
        """
        self._snapshot_count = count
        if self._loop.save_snapshot is not None:
            self._save_snapshot()
            self._context.status.set_phase("idle")
        return None if self._loop.save_snapshot is None else self._context.state.step

    def keep_state(self, buffer: SharedBuffer | None) -> bool:
        """Copy the state to a buffer, from which the driver writes a checkpoint.

        Args:
            buffer: This rank's; None for that of the last call.

        Returns:
            False if the state has outgrown the buffer.
        """
        context = self._context
        if buffer is not None:
            self._keeper = SnapshotWriter(buffer, 1, context.rank, context.world_size)
        assert self._keeper is not None
        return self._keeper.save(context.state.step, *self._get_local_state())

    def _save_snapshot(self) -> None:
        context = self._context
        assert self._writer is not None
        context.status.set_phase("snapshot")
        context.status.flush_logs()  # a restart doesn't repeat these steps
        state = self._get_local_state()
        if not self._writer.save(context.state.step, *state, self._snapshot_count):
            self._loop.save_snapshot = None
            print(
                f"The state of rank {context.rank} has outgrown the memory for snapshots at step "
                f"{context.state.step}. If a rank is lost, training continues from an earlier step."
            )

    def _get_local_state(self) -> tuple[Any, dict[str, Any]]:
        from miniray.train.lockstep.mesh import take_part  # it imports torch

        shared, local = self._replica.state.get_local_state(take_part)
        weights = None
        if "get_weights" in self._traits.own_methods:  # may be more than the model
            weights = self._user.get_weights()
        own = {"local": local, "weights": weights, "window": self._loop.get_window()}
        return shared, {**own, "state": self.get_state()}

    def restore_snapshot(self, shared: Any, own: Any) -> None:
        """Restore a snapshot of this rank."""
        self._replica.state.load_local_state(shared, own["local"])
        if own["weights"] is not None:
            self._user.set_weights(own["weights"])
        self.set_state(own["state"])
        self._loop.load_window(own["window"])

    def save_shards(self, directory: Path) -> tuple[SavedShards, Any]:
        """Write this rank's part of the state to a directory, and return the rest. A collective."""
        from miniray.train.run.tensors.distributed import save_shards

        shared, local = self._replica.state.get_local_state(lambda tensor: tensor.detach())
        self._context.status.set_phase("checkpoint")
        saved = save_shards(directory, {"shared": shared, "local": local})
        self._context.status.set_phase("idle")
        return saved, self.get_state()

    def write_pretrained(self, directory: str | None, send_files: bool) -> Any:
        """Write a Hugging Face model to a directory. A collective if the model is sharded."""
        return self._replica.write_pretrained(directory, send_files)

    # -- methods that users call too --------------------------------------------------------------

    def load_data_shard(self, *args: Any, **kwargs: Any) -> Any:
        """Call the user's method; ``TorchWorker``'s only if the worker makes its own steps."""
        if self._traits.shards_data or not self._traits.has_steps:
            return self._user.load_data_shard(*args, **kwargs)
        return None  # the samples are planned step by step when the rank is prepared

    def evaluate_together(self, **kwargs: Any) -> Any:
        """Evaluate on the validation data, which all ranks do at the same time."""
        self._context.barrier("before-evaluation")
        return self.evaluate(**kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate by the user's own ``evaluate``, or by ``validation_step``.

        With ``validation_step``, training continues with the random numbers it had before.
        """
        with self._replica.evaluation_context():
            if "evaluate" in self._traits.own_methods:
                scores = self._user.evaluate(*args, **kwargs)
            else:
                accepts = inspect.signature(self._replica.evaluate)
                with parts.keep_random_state():
                    scores = self._replica.evaluate(*args, **filter_kwargs(accepts, kwargs))
            self._context.log.take()  # of a method that returned its metrics
            return scores

    def check_validation(self, max_batches: int) -> None:
        """Validate on a few batches, and discard the scores."""
        with self._replica.evaluation_context():
            self._replica.check_validation(max_batches)
        self._context.log.take()

    def get_weights(self) -> Any:
        if "get_weights" in self._traits.own_methods:
            return self._user.get_weights()
        return self._replica.state.get_weights()

    def set_weights(self, weights: Any) -> None:
        if "set_weights" in self._traits.own_methods:
            self._user.set_weights(weights)
        else:
            self._replica.state.set_weights(weights)

    def set_lr(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self._user, "set_lr"):
            return self._user.set_lr(*args, **kwargs)
        return self._replica.set_lr(*args, **kwargs)

    def get_state(self) -> dict[str, Any]:
        """Return the state of this rank alone: random numbers, loader, the user's ``get_state``."""
        user = self._user.get_state() if defines(type(self._user), "get_state") else None
        return {
            "rank": {
                "random": parts.random_state(),
                "means": self._loop.get_means(),
                **self._replica.state.get_data_state(),
            },
            "worker": user,
        }

    def set_state(self, state: Any) -> None:
        own = state["rank"]
        self._replica.state.load_data_state(own)
        self._loop.load_means(own.get("means", {}))
        if own["random"] is not None:
            parts.set_random_state(own["random"])
        else:  # this rank is new in a run of fewer ranks
            context = self._context
            seed_generators(derive_seed(context.facts.seed, context.rank, context.state.step))
        if state["worker"] is not None and defines(type(self._user), "set_state"):
            self._user.set_state(state["worker"])
