"""The state of a replica: weights, optimizers, buffers and position, whole or one rank's part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from miniray.ps import to_host
from miniray.train.lockstep.mesh import (
    compute_checksums,
    gather_full,
    gather_optimizer_values,
    get_local_optimizer,
    load_local_optimizer,
    load_tensors,
    load_weights,
    shard_optimizer_values,
)
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data.loaders import get_loader_state, load_loader_state

if TYPE_CHECKING:
    from miniray.train.ddp.replicated import ReplicatedModel


class ReplicatedState:
    """The ``ReplicaState`` of a rank that holds whole models."""

    def __init__(self, replica: ReplicatedModel) -> None:
        self.replica, self.user, self.context = replica, replica.user, replica.context

    def get_weights(self) -> dict[str, Any]:
        """Return the model's ``state_dict``; of several, with the models' names before each key."""
        weights: dict[str, Any] = to_host(self._whole_model().state_dict())
        return weights

    def set_weights(self, weights: Any) -> None:
        self._whole_model().load_state_dict(weights)

    def gather_weights(self) -> dict[str, Any] | None:
        return None if self.context.rank else self.get_weights()

    def gather_shared(self) -> dict[str, Any] | None:
        return None if self.context.rank else self.get_shared()

    def get_checksums(self) -> dict[str, int]:
        ignored = {
            f"{name}.{key}"
            for name, module in self.replica.modules.items()
            for key in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        }
        parameters = self._iter_named_parameters()
        return compute_checksums((k, p) for k, p in parameters if k not in ignored)

    def _whole_model(self) -> Any:
        model = self.replica.modules.get("model") if len(self.replica.modules) == 1 else None
        return model or torch.nn.ModuleDict(self.replica.modules)

    def get_shared(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks.

        It is the same whether the model is sharded or not: tensors are saved whole.
        """
        owned = parts.stateful(self.user)
        return {
            "parts": {name: self.get_part_state(part) for name, part in owned.items()},
            "buffers": {key: buffer.detach().cpu() for key, buffer in self._iter_buffers()},
            **self._get_progress(),
        }

    def _get_progress(self) -> dict[str, Any]:
        found = self.replica.epoch_data
        planned = None if found is None else found.planned
        return {
            "scaler": self.replica.scaler.state_dict(),
            "position": self.context.state.state_dict(),
            "order": None if planned is None else planned.seed,
            "data": None if found is None else found.get_position(self.context.state),
        }

    def load_shared(self, shared: Any) -> None:
        """Restore ``get_shared``. Raise ``ValueError`` if the worker has different parts."""
        owned = parts.stateful(self.user)
        if set(owned) != set(shared["parts"]):
            raise ValueError(
                f"the state has {sorted(shared['parts'])}, this {type(self.user).__name__} has "
                f"{sorted(owned)}"
            )
        for name, part in owned.items():
            self.load_part_state(part, shared["parts"][name])
        for key, buffer in self._iter_buffers():
            if key in shared["buffers"]:
                buffer.copy_(shared["buffers"][key])
        self._load_progress(shared)

    def _load_progress(self, shared: Any) -> None:
        if shared["scaler"]:
            self.replica.scaler.load_state_dict(shared["scaler"])
        self.context.state.load_state_dict(shared.get("position", {}))
        if self.replica.epoch_data is not None:
            if self.replica.epoch_data.planned is not None and shared["order"] is not None:
                self.replica.epoch_data.planned.seed = shared["order"]
            self.replica.epoch_data.load_position(shared.get("data"), self.context.state)

    def get_local_state(self, take: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return weights and optimizers, and this rank's buffers.

        Inside an epoch, running statistics are those of each rank's own batches.
        """
        owned, model = parts.stateful(self.user), self._whole_model()
        weights = model.state_dict()
        names = [name for name, _ in model.named_buffers(remove_duplicate=False)]
        mine = {name: weights.pop(name) for name in names if name in weights}
        shared = {
            "weights": dict(weights),
            "parts": {name: self.get_part_state(part) for name, part in owned.items()},
            **self._get_progress(),
        }
        return shared, {"weights": mine, "buffers": dict(self._iter_buffers())}

    def load_local_state(self, shared: Any, own: Any) -> None:
        self._whole_model().load_state_dict({**shared["weights"], **own["weights"]})
        load_tensors(self._iter_buffers(), own["buffers"])
        for name, part in parts.stateful(self.user).items():
            self.load_part_state(part, shared["parts"][name])
        self._load_progress(shared)

    def _iter_named_parameters(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.replica.modules.items():
            for key, parameter in module.named_parameters():
                yield f"{name}.{key}", parameter

    def _iter_buffers(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.replica.modules.items():
            for key, buffer in module.named_buffers():
                yield f"{name}.{key}", buffer

    def get_part_state(self, part: Any) -> dict[str, Any]:
        """Return the state of an optimizer or a scheduler."""
        state: dict[str, Any] = part.state_dict()
        return state

    def load_part_state(self, part: Any, state: Mapping[str, Any]) -> None:
        part.load_state_dict(state)

    def get_data_state(self) -> dict[str, Any]:
        if self.replica.epoch_data is not None:
            return self.replica.epoch_data.get_own_state(self.context.state)
        return {"loader": get_loader_state(getattr(self.user, "train_loader", None))}

    def load_data_state(self, state: Mapping[str, Any]) -> None:
        if self.replica.epoch_data is not None:
            self.replica.epoch_data.load_own_state(state)
        else:
            load_loader_state(getattr(self.user, "train_loader", None), state["loader"])


class ShardedState(ReplicatedState):
    """The ``ReplicaState`` of a rank that holds a shard of the model.

    Whole state is gathered on rank 0, by collectives. The other ranks return nothing.
    """

    def get_weights(self) -> dict[str, Any]:
        found = {}
        for name, value in self.user.model.state_dict().items():
            full = gather_full(value)  # one at a time: a rank that does not keep them never has two
            if not self.context.rank:
                found[name] = full
        return found

    def set_weights(self, weights: Any) -> None:
        """Load this rank's part of ``weights``. Raise ``ValueError`` if names or shapes differ."""
        targets = self.user.model.state_dict()
        extra = [name for name in weights if name not in targets]
        if extra:
            raise ValueError(f"the weights do not fit the model, which has no {extra[0]}")
        load_weights(targets, weights)

    def gather_weights(self) -> dict[str, Any] | None:
        weights = self.get_weights()
        return None if self.context.rank else weights

    def gather_shared(self) -> dict[str, Any] | None:
        shared = self.get_shared()
        return None if self.context.rank else shared

    def get_local_state(self, take: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return the position, and this rank's shards of parameters and optimizers."""
        own = {
            "weights": {k: take(v) for k, v in self.user.model.state_dict().items()},
            "buffers": dict(self._iter_buffers()),
            "parts": {k: _get_local(part, take) for k, part in parts.stateful(self.user).items()},
        }
        return self._get_progress(), own

    def load_local_state(self, shared: Any, own: Any) -> None:
        load_tensors(self.user.model.state_dict().items(), own["weights"])
        load_tensors(self._iter_buffers(), own["buffers"])
        for name, part in parts.stateful(self.user).items():
            _load_local(part, own["parts"][name])
        self._load_progress(shared)

    def get_part_state(self, part: Any) -> dict[str, Any]:
        saved = super().get_part_state(part)
        numbers = saved.get("state")
        if not isinstance(numbers, Mapping):
            return saved  # a scheduler's
        return {
            **saved,
            "state": {index: gather_optimizer_values(v) for index, v in numbers.items()},
        }

    def load_part_state(self, part: Any, state: Mapping[str, Any]) -> None:
        """Restore a scheduler, or an optimizer, whose tensors are sharded as their parameters."""
        if isinstance(part, torch.optim.Optimizer):
            parameters = [p for group in part.param_groups for p in group["params"]]
            numbers = {
                i: shard_optimizer_values(parameters[int(i)], v) for i, v in state["state"].items()
            }
            state = {**state, "state": numbers}
        super().load_part_state(part, state)


def _get_local(part: Any, take: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the state of a scheduler, or this rank's part of an optimizer's state."""
    if isinstance(part, torch.optim.Optimizer):
        return get_local_optimizer(part, take)
    state: dict[str, Any] = part.state_dict()
    return state


def _load_local(part: Any, saved: Mapping[str, Any]) -> None:
    if isinstance(part, torch.optim.Optimizer):
        load_local_optimizer(part, saved)
    else:
        part.load_state_dict(saved)
