"""``shard="full"``: each rank holds a shard of weights, gradients and optimizer state.

torch's FSDP2 (``fully_shard``) gathers a layer's weights when the layer is computed, forward and
backward, and frees them again. Gradients are averaged and sharded in one operation. So every rank
is needed for every step, evaluation and checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from miniray.train.ddp.evaluation import ReplicaEvaluation
from miniray.train.ddp.replicated import ReplicatedModel
from miniray.train.lockstep.context import WorkerTraits
from miniray.train.lockstep.mesh import (
    gather_full,
    gather_optimizer_values,
    get_local_optimizer,
    load_local_optimizer,
    load_tensors,
    load_weights,
    make_mesh,
    shard_optimizer_values,
)
from miniray.train.pretrained import SavedFiles, write_model
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data.batches import count_samples, move_batch

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ShardedReplica(ReplicatedModel):
    """A ``Replica`` that holds a shard of the model; every rank is needed to gather it."""

    def prepare(self) -> dict[str, Any]:
        facts = super().prepare()
        if self.traits.has_steps:  # else the driver raises an error for the options
            _check_worker(self.user, self.traits)
        return facts

    def _place_models(self) -> Any:
        """Return the device; the parts of the model move there when they are sharded."""
        return torch.device(self.user.device)

    def _wrap_models(self, optimizers: Any) -> dict[str, Any]:
        context = self.context
        model = _shard(self.user.model, context.device, context.world_size, optimizers)
        return {"model": model}

    def _create_evaluation(self) -> ReplicaEvaluation:
        return ShardedEvaluation(self)

    def use_synced_models(self) -> None:
        """Do nothing: the worker has the model itself."""

    # -- state: whole on rank 0 and nothing on other ranks. Collectives. ---------------------------

    def get_weights(self) -> dict[str, Any]:
        found = {}
        for name, value in self.user.model.state_dict().items():
            full = gather_full(value)  # one at a time: a rank that does not keep them never has two
            if not self.context.rank:
                found[name] = full
        return found

    def write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles | None:
        weights = None if directory is None else self.get_weights()
        if self.context.rank:
            return None
        return write_model(self.user, self.user.model, directory, send_files, weights)

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


class ShardedEvaluation(ReplicaEvaluation):
    """Evaluates a sharded model. All ranks take part in every batch."""

    def close(self) -> None:
        super().close()
        for part in self.user.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def load(self, data: Any, shard_id: int, num_shards: int) -> Any:
        if data is not None and not len(data):
            return ()
        return super().load(data, shard_id, num_shards)

    def add_batches(self, batches: Any, most: int | None) -> dict[str, Any]:
        """Evaluate together with all ranks.

        A rank that has fewer batches repeats one of them, or uses one of its training batches,
        without counting the result.
        """
        device = self.context.device
        own = len(batches) if most is None else min(len(batches), most)
        count = torch.tensor([own], device=device)
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        found_here = _pad(itertools.islice(batches, own))
        means, step, batch = parts.Means(), self.validation_step, None
        with torch.no_grad():
            for number, found in zip(range(int(count)), found_here, strict=False):
                self.context.status.touch()  # a slow loader doesn't hang
                if found is not None:
                    batch = move_batch(found, device)
                elif batch is None:
                    batch = move_batch(_load_any_batch(self.user), device)
                values = self.validate(step, batch, number)
                if found is not None:
                    means.add(values, count_samples(batch))
        return means.sums()


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


def _check_worker(worker: Any, traits: WorkerTraits) -> None:
    """Raise an error if the worker's own code would use a shard as the whole model."""
    if traits.own_methods:
        raise TypeError(
            f'shard="full" doesn\'t support {type(worker).__name__}.{traits.own_methods[0]}(), '
            "because no worker has the whole model. Remove the method to use miniray's. To "
            "customize evaluation, implement validation_step()"
        )
    scalars = [name for name, p in worker.model.named_parameters() if not p.dim()]
    if scalars:
        raise ValueError(
            f'shard="full" can\'t shard {", ".join(scalars[:5])}, which has no dimensions. Use a '
            "tensor with one element: torch.nn.Parameter(torch.zeros(1))"
        )


def _shard(
    model: nn.Module, device: Any, world_size: int, optimizers: Iterable[Any]
) -> ShardedModel:
    """Shard ``model`` in place, and let ``optimizers`` train this rank's part.

    A collective: all ranks must call it. All start with rank 0's weights.
    """
    _share_weights(model, device)
    names = {id(p): name for name, p in model.named_parameters()}
    mesh = make_mesh(device, {"data": world_size})
    for part in layers_of(model):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = dict(model.named_parameters())
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                _move_state(optimizer.state, before, parameters[names[id(before)]])
                for before in group["params"]
            ]
    return ShardedModel(model)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one by one: items of the outermost lists of layers.

    A module that shares a weight with one outside of it isn't included.
    """
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, _LISTS) and next(child.parameters(), None) is not None:
                found.append(child)
            else:
                look(child)

    look(model)
    total = _uses(model)
    return [part for part in found if all(total[p] == n for p, n in _uses(part).items())]


def _uses(module: nn.Module) -> dict[int, int]:
    """Return how many modules hold each parameter, by id."""
    uses: dict[int, int] = {}
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses


def _share_weights(model: nn.Module, device: Any) -> None:
    """Give all ranks rank 0's weights and buffers; one at a time, in case they go to a GPU."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            there = tensor.detach().to(device)
            dist.broadcast(there, src=0)
            tensor.copy_(there)


def _move_state(state: Any, before: Any, mine: Any) -> Any:
    """Return ``mine``, and give it the optimizer's state of the whole parameter, if any."""
    if before in state:
        state[mine] = shard_optimizer_values(mine, state.pop(before))
    return mine


class ShardedModel:
    """The model as the replica sees it; the worker has the model itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forwards = 0  # how often it was called with gradients on
        module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += torch.is_grad_enabled()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without averaging; see ``DDP.no_sync``."""
        root: Any = self.module
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)


def _pad(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, and then None forever."""
    return itertools.chain(batches, itertools.repeat(None))


def _load_any_batch(worker: Any) -> Any:
    """Return a batch to run in collectives with other ranks. Random numbers are restored."""
    before = parts.random_state()
    try:
        return next(iter(worker.train_loader))
    finally:
        parts.set_random_state(before)
