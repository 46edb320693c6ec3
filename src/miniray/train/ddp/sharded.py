"""``shard="full"``: each rank holds a shard of weights, gradients and optimizer state.

torch's FSDP2 (``fully_shard``) gathers a layer's weights when the layer is computed, forward and
backward, and frees them again. Gradients are averaged and sharded in one operation. So every rank
is needed for every step, evaluation and checkpoint.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from miniray.train.ddp.evaluation import ReplicaEvaluation
from miniray.train.ddp.replicated import ReplicatedModel
from miniray.train.ddp.state import ReplicatedState, ShardedState
from miniray.train.lockstep.context import WorkerTraits
from miniray.train.lockstep.mesh import (
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

    def _create_parts(self) -> tuple[ReplicatedState, ReplicaEvaluation]:
        return ShardedState(self), ShardedEvaluation(self)

    def write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles | None:
        weights = None if directory is None else self.state.get_weights()
        if self.context.rank:
            return None
        return write_model(self.user, self.user.model, directory, send_files, weights)

    def use_synced_models(self) -> None:
        """Do nothing: the worker has the model itself."""


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
