"""The state of a rank that holds some stages of a model, or a shard of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from miniray.train.lockstep.mesh import compute_checksums

if TYPE_CHECKING:
    from miniray.train.parallel.rank import PartReplica


class PartState:
    """The ``ReplicaState`` of a ``PartReplica``."""

    def __init__(self, replica: PartReplica) -> None:
        self.replica = replica

    def get_weights(self) -> dict[int, dict[str, Any]]:
        """Return this rank's stages, whole; nothing if a different rank returns the same."""
        if self.replica.place.data:
            return {}
        weights: dict[int, dict[str, Any]] = self.replica.part.weights()
        return {} if self.replica.place.tensor else weights

    gather_weights = get_weights

    def set_weights(self, weights: Any) -> None:
        self.replica.part.load_weights(weights)

    def gather_shared(self) -> dict[str, Any] | None:
        """Return the optimizer's state of this rank's weights, and what all ranks share."""
        replica = self.replica
        if replica.place.data:
            return None
        optimizer = replica.part.optimizer_state()
        if replica.place.tensor:
            return None
        return {"optimizer": optimizer, **self._get_progress()}

    def _get_progress(self) -> dict[str, Any]:
        replica = self.replica
        scheduler = replica.part.scheduler
        return {
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "seed": replica.job.seed,
            "position": replica.context.state.state_dict(),
        }

    def _load_progress(self, saved: Mapping[str, Any]) -> None:
        replica = self.replica
        if replica.part.scheduler is not None and saved["scheduler"] is not None:
            replica.part.scheduler.load_state_dict(saved["scheduler"])
        replica.context.state.load_state_dict(saved.get("position", {}))

    def load_shared(self, shared: Any) -> None:
        self.replica.part.load_optimizer(shared["optimizer"])
        self.replica.samples.set_order(shared["seed"])
        self._load_progress(shared)

    def get_checksums(self) -> dict[str, int]:
        return compute_checksums((name, p) for p, name in self.replica.part.names().items())

    def get_local_state(self, take: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return nothing that all ranks share, and this rank's stages or shards."""
        return None, {**self._get_progress(), **self.replica.part.get_local(take)}

    def load_local_state(self, shared: Any, own: Any) -> None:
        self.replica.part.load_local(own)
        self._load_progress(own)

    def get_data_state(self) -> dict[str, Any]:
        return self.replica.samples.state()

    def load_data_state(self, state: Any) -> None:
        self.replica.samples.load(state)
