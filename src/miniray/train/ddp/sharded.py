"""``shard="full"``: a rank of a model whose weights, gradients and optimizer state are cut.

torch's FSDP2 (``fully_shard``) does it: a layer's weights are gathered when it is computed, forward
and back, and given up again; gradients are averaged and cut in the same go. So every rank is needed
for every step, evaluation and checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from miniray.train.ddp.checks import RankSettings
from miniray.train.ddp.rank import Rank
from miniray.train.lockstep.mesh import cut_numbers, make_mesh, put_weights, whole, whole_numbers
from miniray.train.lockstep.status import EVALUATION
from miniray.train.pretrained import SavedFiles, write_model
from miniray.train.workers import torch_utils as parts

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class ShardedRank(Rank):
    """What a rank with a part of the model does otherwise than ``Rank``."""

    def __init__(self, worker: Any, rank: int, world_size: int, settings: RankSettings) -> None:
        super().__init__(worker, rank, world_size, settings)
        if self.has_steps:  # else the driver refuses it in a moment
            _check_worker(worker)

    def _place_models(self) -> Any:
        """The device; each part of the model goes there when it is cut."""
        return torch.device(self.worker.device)

    def _wrap(self, optimizers: Any) -> dict[str, Any]:
        return {"model": _shard(self.worker.model, self.device, self.world_size, optimizers)}

    def evaluate(self, rows: Any) -> dict[str, Any]:
        """Sums and counts over ``rows`` (default: this rank's of ``val_loader``), with all ranks.

        A rank that has fewer batches goes through one of them again, or one of its training
        batches, and what comes of it does not count.
        """
        worker, model = self.worker, self.worker.model
        assert self.loop is not None
        self.pulse.at(EVALUATION, step=-1)
        if rows is None:
            loader = parts.shard(worker._part("val_loader"), self.rank, self.world_size)
        else:
            loader = parts.loader_over(rows, worker.train_loader) if len(rows) else ()
        most = torch.tensor([len(loader)], device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        step = parts.step_of(getattr(worker, "validation_step", worker.training_step))
        means, batches, batch = parts.Means(), iter(loader), None
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), self.loop.autocast():
                for number in range(int(most)):
                    found = next(batches, None)
                    if found is not None:
                        batch = parts.moved(found, self.device)
                    elif batch is None:
                        batch = parts.moved(_any_batch(worker), self.device)
                    values = parts.as_dict(step(batch, number), "validation_step")
                    if found is not None:
                        means.add(values, parts.length(batch))
        finally:
            model.train(was_training)
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()
        self.pulse.at("idle")
        return means.sums()

    # -- state, in one piece on rank 0 and nothing elsewhere. Collectives. -------------------------

    def get_weights(self) -> dict[str, Any]:
        found = {}
        for name, value in self.worker.model.state_dict().items():
            full = whole(value)  # one at a time: a rank that does not keep them never has two
            if not self.rank:
                found[name] = full
        return found

    def write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles | None:
        weights = None if directory is None else self.get_weights()
        if self.rank:
            return None
        return write_model(self.worker, self.worker.model, directory, send_files, weights)

    def set_weights(self, weights: Any) -> None:
        """Take this rank's part of ``weights``; ``ValueError`` where names or shapes differ."""
        targets = self.worker.model.state_dict()
        extra = [name for name in weights if name not in targets]
        if extra:
            raise ValueError(f"the weights do not fit the model, which has no {extra[0]}")
        put_weights(targets, weights)

    def shared_state(self) -> dict[str, Any] | None:
        found = super().shared_state()
        return None if self.rank else found

    def part_state(self, part: Any) -> dict[str, Any]:
        saved = super().part_state(part)
        numbers = saved.get("state")
        if not isinstance(numbers, Mapping):
            return saved  # a scheduler's
        return {**saved, "state": {index: whole_numbers(v) for index, v in numbers.items()}}

    def load_part(self, part: Any, saved: Mapping[str, Any]) -> None:
        """Each of an optimizer's numbers is cut as the parameter is that it belongs to."""
        if isinstance(part, torch.optim.Optimizer):
            parameters = [p for group in part.param_groups for p in group["params"]]
            numbers = {i: cut_numbers(parameters[int(i)], v) for i, v in saved["state"].items()}
            saved = {**saved, "state": numbers}
        super().load_part(part, saved)


def _check_worker(worker: Any) -> None:
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


def _shard(
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


def _any_batch(worker: Any) -> Any:
    """A batch to keep the others company with; random numbers stay as they were."""
    before = parts.random_state()
    try:
        return next(iter(worker.train_loader))
    finally:
        parts.set_random_state(before)
