"""Epochs of workers that train in their own ``train_epoch``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.join import Join

from miniray.train.ddp.checks import create_parts_error
from miniray.train.lockstep.replica import EpochReport
from miniray.train.workers.data import planned as data

if TYPE_CHECKING:
    from miniray.train.ddp.replicated import ReplicatedModel


class UserLoop:
    """Trains epochs with the worker's own ``train_epoch``."""

    def __init__(self, replica: ReplicatedModel) -> None:
        self.replica = replica

    def run(self, epoch: int, until: int | None = None) -> EpochReport:
        """Train one epoch. ``until`` isn't supported: the steps are the user's own."""
        replica, context, user = self.replica, self.replica.context, self.replica.user
        context.barrier("before-epoch")
        context.status.set_phase("train_epoch")
        names = list(replica.modules)
        is_joined = replica.settings.uneven == "join" and context.world_size > 1 and len(names) == 1
        before = replica.step_counts.get_most()
        synced = [getattr(user, name) for name in names]
        if replica.traits.gets_loader:
            data.set_epoch(user.train_loader, epoch)
        with Join(synced, enable=is_joined, divide_by_initial_world_size=False):
            result = user.train_epoch(epoch)
        steps = replica.step_counts.get_most()
        for name in names:
            if not getattr(user, name).forwards and steps:
                raise create_parts_error("train_epoch()", name)
        context.count_step(steps=max(0, steps - before))
        if is_joined:
            replica.step_counts.catch_up()
        context.status.set_phase("end of the epoch")
        context.barrier("epoch-end")
        replica.end_epoch()
        context.state.end_epoch()
        return EpochReport(context.state.step, result)

    def get_means(self) -> dict[str, Any]:
        return {}

    def get_window(self) -> dict[str, Any]:
        return {}

    def load_means(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the worker computes its own means."""
