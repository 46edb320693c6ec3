"""The actor that is a rank of a split model: what the driver calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they need torch
    from miniray.train.parallel.rank import ModelRank


class ModelWorker:
    """Holds a part of the model. Made by the trainers; there is nothing to derive from it."""

    def __init__(self, worker_id: int) -> None:
        self.rank = worker_id
        self._own: ModelRank | None = None

    def _prepare(self, job: Any) -> dict[str, Any]:
        from miniray.train.parallel.rank import ModelRank

        self._own = ModelRank(self.rank, job)
        return self._own.prepare()

    def _join(self, spec: Any, plan: Any, one_machine: bool) -> int | None:
        return self._mine().join(spec, plan, one_machine)

    def _epoch(self, epoch: int) -> dict[str, Any]:
        return self._mine().epoch(epoch)

    def evaluate(self, data: Any = None) -> dict[str, Any]:
        return self._mine().evaluate(data)

    def get_weights(self) -> dict[int, dict[str, Any]]:
        return self._mine().weights()

    def set_weights(self, weights: Any) -> None:
        self._mine().load_weights(weights)

    def _shared_state(self) -> dict[str, Any] | None:
        return self._mine().shared_state()

    def _load_shared(self, shared: Any) -> None:
        self._mine().load_shared(shared)

    def get_state(self) -> dict[str, Any]:
        return self._mine().own_state()

    def set_state(self, saved: Any) -> None:
        self._mine().load_own(saved)

    def set_lr(self, lr: float) -> None:
        self._mine().set_lr(lr)

    def _ddp_leave(self) -> None:
        if self._own is not None:
            self._own.leave()

    def _mine(self) -> ModelRank:
        assert self._own is not None, "the worker is no rank yet"
        return self._own
