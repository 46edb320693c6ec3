"""``shard="full"``: a model whose weights, gradients and optimizer state are cut over all ranks.

torch's FSDP2 (``fully_shard``) does it: a layer's weights are gathered when it is computed, forward
and back, and given up again; gradients are averaged and cut in the same go. So every rank is needed
for every step, evaluation and checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from miniray.train import torch_parts as parts
from miniray.train.ranks.mesh import make_mesh
from miniray.train.ranks.whole import cut_numbers, put_weights, whole

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def check_worker(worker: Any) -> None:
    """Refuse a worker whose own code would see a part of the model and take it for the whole."""
    if worker._ddp_own_methods:
        raise TypeError(
            f'shard="full" does not go with {type(worker).__name__}.{worker._ddp_own_methods[0]}():'
            " no worker has the whole model. Leave it out, and miniray does that (evaluate: by "
            "validation_step)"
        )
    scalars = [name for name, p in worker.model.named_parameters() if not p.dim()]
    if scalars:
        raise ValueError(
            f'shard="full" cannot cut {", ".join(scalars[:5])}, which has no dimension; give it '
            "one: torch.nn.Parameter(torch.zeros(1))"
        )


def shard(
    model: nn.Module, device: Any, world_size: int, optimizers: Iterable[Any]
) -> ShardedModel:
    """Cut ``model`` in place, and let ``optimizers`` go on with what is left of it here.

    A collective: all ranks must call it. All begin with rank 0's weights.
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
                _moved(optimizer.state, before, parameters[names[id(before)]])
                for before in group["params"]
            ]
    return ShardedModel(model)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """What is gathered together: members of the model's outermost lists of layers.

    What shares a weight with something outside of it is left to the model's own group.
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
    """How many modules hold each parameter."""
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


def _moved(state: Any, before: Any, mine: Any) -> Any:
    """``mine``, with what an optimizer knows of the whole parameter, if anything."""
    if before in state:
        state[mine] = cut_numbers(mine, state.pop(before))
    return mine


class ShardedModel:
    """What ``StepLoop`` goes through; the worker has the model itself."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forwards = 0  # how often it was called with gradients on
        module.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.forwards += torch.is_grad_enabled()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients are added up on each rank; the next backward pass averages them."""
        root: Any = self.module
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)


def evaluate_in_step(worker: Any, rank: int, world_size: int, rows: Any) -> dict[str, Any]:
    """Sums and counts over ``rows`` (default: this rank's of ``val_loader``), with all ranks.

    A rank that has fewer batches goes through one of them again, or one of its training batches,
    and what comes of it does not count.
    """
    model = worker.model
    if rows is None:
        loader = parts.shard(worker._part("val_loader"), rank, world_size)
    else:
        loader = parts.loader_over(rows, worker.train_loader) if len(rows) else ()
    device = torch.device(worker.device)
    most = torch.tensor([len(loader)], device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    step = parts.step_of(getattr(worker, "validation_step", worker.training_step))
    means, batches, batch = parts.Means(), iter(loader), None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for number in range(int(most)):
                found = next(batches, None)
                if found is not None:
                    batch = parts.moved(found, device)
                elif batch is None:
                    batch = parts.moved(_any_batch(worker), device)
                values = parts.as_dict(step(batch, number), "validation_step")
                if found is not None:
                    means.add(values, parts.length(batch))
    finally:
        model.train(was_training)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()
    return means.sums()


def _any_batch(worker: Any) -> Any:
    """A batch to keep the others company with; random numbers stay as they were."""
    before = parts.random_state()
    try:
        return next(iter(worker.train_loader))
    finally:
        parts.set_random_state(before)


def get_weights(worker: Any, keep: bool) -> dict[str, Any]:
    """The model's ``state_dict`` in one piece where ``keep``, else nothing. A collective."""
    found = {}
    for name, value in worker.model.state_dict().items():
        full = whole(value)  # one at a time: a rank that does not keep them never has two
        if keep:
            found[name] = full
    return found


def set_weights(worker: Any, weights: Any) -> None:
    """Take this rank's part of ``weights``; ``ValueError`` where names or shapes differ."""
    targets = worker.model.state_dict()
    extra = [name for name in weights if name not in targets]
    if extra:
        raise ValueError(f"the weights do not fit the model, which has no {extra[0]}")
    put_weights(targets, weights)
