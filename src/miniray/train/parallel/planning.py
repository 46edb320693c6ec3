"""What rank 0 finds out before the ranks meet: batch size, costs, plans; and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from miniray.train import torch_parts as parts
from miniray.train.evaluate import shard_bounds
from miniray.train.parallel import tensor
from miniray.train.parallel.feed import split_batch
from miniray.train.parallel.job import Job, Plan
from miniray.train.parallel.layers import ListedLayers, build_model, dict_of, read_layers
from miniray.train.parallel.measure import check_output, measure
from miniray.train.parallel.plan import plan_stages
from miniray.train.parallel.schedules import SCHEDULES


def make_loader(data: Any, argument: str, batch_size: int | None = None) -> Any:
    """The loader that the user means: one, a function that makes it, or rows with a batch size."""
    made = data() if callable(data) and not isinstance(data, (DataLoader, Dataset)) else data
    if isinstance(made, DataLoader) or (
        isinstance(made, Iterable) and not isinstance(made, (Dataset, list, tuple))
    ):
        return made
    if batch_size is not None and isinstance(made, (Dataset, list, tuple)):
        return parts.loader_over(made, _Like(batch_size))
    raise TypeError(
        f"{argument}= must be a torch DataLoader, an iterable of batches, or a function that "
        f"returns one, not {made!r:.80}"
    )


@dataclasses.dataclass(frozen=True)
class _Like:
    """What ``loader_over`` takes over from another loader."""

    batch_size: int


def evaluation_share(loader: Any, copy: int, copies: int) -> Any:
    """The part of an evaluation that one copy of the model does: every row is in one part."""
    if not isinstance(loader, DataLoader) or not hasattr(loader.dataset, "__len__"):
        raise TypeError(
            f"an evaluation on {copies} copies of the model needs a torch DataLoader over a "
            "dataset with a length"
        )
    rows = range(*shard_bounds(len(loader.dataset), copy, copies))
    return DataLoader(
        Subset(loader.dataset, rows), batch_size=loader.batch_size, collate_fn=loader.collate_fn
    )


def whole_model(built: Any, seed: int) -> nn.Module:
    """The model as one module, with the names its weights have in checkpoints."""
    if isinstance(built, nn.Module):
        return built
    layers = ListedLayers([str(i) for i in range(len(built))], built, seed)
    return nn.Sequential(dict_of((name, layers.build(i)) for i, name in enumerate(layers.names)))


def make_plan(job: Job, loader: Any, windows: Any, device: Any) -> Plan:
    """Look at a batch, measure the layers, decide. Raises what is wrong with the user's input."""
    first = next(iter(loader), None)
    if first is None:
        raise ValueError("data= gives no batch at all")
    inputs, target = split_batch(first)
    batch_size = len(target)
    _check_microbatches(job, batch_size)
    share = batch_size // job.microbatches
    sample, wanted = parts.moved((tuple(value[:share] for value in inputs), target[:share]), device)
    stages = sharded = None
    if job.layout.pipeline > 1:
        layers = read_layers(job.model, job.seed)
        if layers.traced:
            _check_even(loader, batch_size)
        stages = plan_stages(
            measure(layers, sample, wanted, job.loss, device),
            SCHEDULES[job.schedule],
            job.layout,
            microbatches=job.microbatches,
            stages_per_worker=job.stages_per_worker,
            layers_per_stage=job.layers_per_stage,
            memory_limit=job.memory_limit,
        )
    if job.layout.tensor > 1 or job.layout.pipeline == 1:
        model = whole_model(build_model(job.model, job.seed), job.seed).to(device)
        if job.layout.pipeline == 1:
            _check_model(model, sample, wanted, job.loss)
        if job.layout.tensor > 1:
            sharded = tensor.make_plan(model, job.tensor_plan, job.layout.tensor)
    return Plan(stages, sharded, batch_size, parts.moved(sample, "cpu"))


def _check_microbatches(job: Job, batch_size: int) -> None:
    if batch_size % job.microbatches:
        fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"microbatches={job.microbatches} does not divide the batch of {batch_size} samples; "
            f"{', '.join(map(str, fitting))} would, or another batch_size"
        )


def _check_even(loader: Any, batch_size: int) -> None:
    plan = getattr(getattr(loader, "batch_sampler", None), "plan", None)
    if plan is not None and any(n != batch_size * plan.world_size for n in plan.sizes):
        raise ValueError(
            f"the last batch of an epoch has {plan.sizes[-1]} samples instead of "
            f"{batch_size * plan.world_size}, and a model that torch has traced takes batches of "
            "one size only; pass drop_last=True to the DataLoader, or the model as a list of layers"
        )


def _check_model(model: nn.Module, sample: Any, target: Any, loss: Any) -> None:
    """One forward pass: what comes out must be a tensor, and the loss of it a number."""
    import torch

    from miniray.train.parallel.measure import untouched

    with torch.random.fork_rng(), untouched(model):
        output = model(*sample)
        check_output(output, f"the model ({type(model).__name__})")
        value = loss(output, target)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise TypeError(
            f"loss(output, target) must return one number, a tensor; it returned {value!r:.80}"
        )
