"""The actor that is a rank of a split model: what the driver calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from miniray.train.ranks.worker import MemberMethods

if TYPE_CHECKING:  # they need torch
    from miniray.train.parallel.rank import ModelRank


class ModelWorker(MemberMethods):
    """Holds a part of the model. Made by the trainers; there is nothing to derive from it."""

    _member: ModelRank | None

    def __init__(self, worker_id: int) -> None:
        self.rank = worker_id
        self._member = None

    def _rank_prepare(self, job: Any) -> dict[str, Any]:
        from miniray.train.parallel.rank import ModelRank

        self._member = ModelRank(self.rank, job)
        return self._member.prepare()

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        return self._mine().evaluate(data)

    def get_weights(self) -> dict[int, dict[str, Any]]:
        return self._mine().weights()

    def set_weights(self, weights: Any) -> None:
        self._mine().load_weights(weights)

    def get_state(self) -> dict[str, Any]:
        return self._mine().own_state()

    def set_state(self, saved: Any) -> None:
        self._mine().load_own(saved)

    def set_lr(self, lr: float) -> None:
        self._mine().set_lr(lr)

    def _mine(self) -> ModelRank:
        rank: ModelRank = super()._mine()
        return rank
