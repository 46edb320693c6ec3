"""Ranks that make different numbers of steps, because they have different numbers of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from miniray.train.ddp.replicated import ReplicatedModel


class StepCounts:
    """The optimizer steps of a rank since all ranks were equal, by optimizer.

    ``Join`` gives ranks that ran out of data only the model of the others. Without their
    optimizers, their next steps would differ, and the models with them.
    """

    def __init__(self, replica: ReplicatedModel) -> None:
        self._replica = replica
        self._counts: dict[str, int] = {}

    def observe(self, optimizers: Mapping[str, Any]) -> None:
        """Count the steps of these optimizers."""
        for name, optimizer in optimizers.items():
            self._counts[name] = 0
            optimizer.register_step_post_hook(self._create_counter(name))

    def _create_counter(self, name: str) -> Any:
        def count(*_: Any) -> None:
            self._counts[name] += 1

        return count

    def get_most(self) -> int:
        """Return the steps of the optimizer that has made most."""
        return max(self._counts.values(), default=0)

    def catch_up(self) -> None:
        """Give all ranks the state of the rank with the most steps. A collective."""
        context, state = self._replica.context, self._replica.state
        context.status.set_phase("end of the epoch")
        steps = sum(self._counts.values())
        counts: list[Any] = [None] * context.world_size
        dist.all_gather_object(counts, steps)
        most = max(counts)
        if min(counts) == most:
            return
        source = counts.index(most)
        box = [state.get_shared() if context.rank == source else None]
        dist.broadcast_object_list(box, src=source)
        if steps != most:
            state.load_shared(box[0])
        self._counts = dict.fromkeys(self._counts, 0)
