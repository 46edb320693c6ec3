"""The actor that is a rank of a split model: what the driver calls."""

from __future__ import annotations

from typing import Any

from miniray.train.lockstep.rank import MemberMethods


class ModelWorker(MemberMethods):
    """Holds a part of the model. Made by the trainers; there is nothing to derive from it."""

    def __init__(self, worker_id: int) -> None:
        self.rank = worker_id

    def _rank_prepare(self, job: Any) -> Any:
        from miniray.train.parallel.rank import ModelRank  # it needs torch

        self._member = ModelRank(self.rank, job)
        return self._member.prepare()

    def evaluate(self, data: Any = None) -> Any:
        return self._mine().evaluate(data)

    def get_weights(self) -> Any:
        return self._mine().weights()

    def set_weights(self, weights: Any) -> None:
        self._mine().part.load_weights(weights)

    def get_state(self) -> Any:
        return self._mine().own_state()

    def set_state(self, saved: Any) -> None:
        self._mine().load_own(saved)

    def set_lr(self, lr: float) -> None:
        for options in self._mine().part.optimizer.param_groups:
            options["lr"] = lr
