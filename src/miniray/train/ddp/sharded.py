"""A rank whose model is cut over all ranks: what it does otherwise than ``Rank``."""

from __future__ import annotations

from typing import Any

import torch

from miniray.train.ddp import sharding, state
from miniray.train.ddp.rank import Rank, RankSettings
from miniray.train.ranks.pulse import EVALUATION


class ShardedRank(Rank):
    """See ``sharding``. Every rank is needed for every step, evaluation and checkpoint."""

    is_sharded = True

    def __init__(self, worker: Any, rank: int, world_size: int, settings: RankSettings) -> None:
        super().__init__(worker, rank, world_size, settings)
        if self.has_steps:  # else the driver refuses it in a moment
            sharding.check_worker(worker)

    def _place_models(self) -> Any:
        """The device; each part of the model goes there when it is cut."""
        return torch.device(self.worker.device)

    def _wrap(self, optimizers: Any) -> dict[str, Any]:
        model = sharding.shard(self.worker.model, self.device, self.world_size, optimizers)
        return {"model": model}

    def evaluate(self, rows: Any) -> dict[str, Any]:
        assert self.loop is not None
        with self.loop.autocast():
            self.pulse.at(EVALUATION, step=-1)
            found = sharding.evaluate_in_step(self.worker, self.rank, self.world_size, rows)
            self.pulse.at("idle")
            return found

    def shared_state(self) -> dict[str, Any] | None:
        """A collective; only rank 0 has something to say."""
        found = state.shared_state(self)
        return None if self.rank else found

    def get_weights(self) -> dict[str, Any]:
        """In one piece on rank 0, nothing elsewhere. A collective."""
        return sharding.get_weights(self.worker, keep=not self.rank)

    def set_weights(self, weights: Any) -> None:
        sharding.set_weights(self.worker, weights)
