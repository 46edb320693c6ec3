"""The job that all ranks are given, and what rank 0 finds out of it before they meet.

Batch size, costs, plans; and what it refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from miniray.data.parts import part_bounds
from miniray.train import torch_parts as parts
from miniray.train.parallel import tensor
from miniray.train.parallel.feed import split_batch
from miniray.train.parallel.layers import read_layers, whole_model
from miniray.train.parallel.layout import Layout
from miniray.train.parallel.measure import check_output, check_value, measure, untouched
from miniray.train.parallel.plan import StagePlan, plan_stages
from miniray.train.parallel.schedules import SCHEDULES
from miniray.train.ranks import data as sharing
from miniray.train.ranks.member import RunFacts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(RunFacts):
    """See ``PipelineParallelTrainer`` and ``ModelParallelTrainer`` for what each means."""

    model: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    data: Any
    layout: Layout
    val_data: Any = None
    lr_scheduler: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = dataclasses.field(default_factory=dict)
    schedule: str = "gpipe"
    microbatches: int = 1
    stages_per_worker: int | None = None
    layers_per_stage: Sequence[int] | None = None
    memory_limit: float | None = None
    tensor_plan: Mapping[str, str] | None = None
    clip_norm: float | None = None
    on_nonfinite: str = "error"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What rank 0 has found out and all ranks go by."""

    stages: Any
    tensor: Any
    batch_size: int
    sample: Any  # one micro-batch of inputs; what the split model's output is compared on

    def tables(self) -> list[str]:
        return [plan.table() for plan in (self.stages, self.tensor) if plan is not None]


def make_loader(data: Any, argument: str, batch_size: int | None = None) -> Any:
    """The loader that the user means: one, a function that makes it, or rows with a batch size.

    Without a batch size it is for training: what can be gone through once only is refused.
    """
    made = data() if callable(data) and not isinstance(data, (DataLoader, Dataset)) else data
    rows = isinstance(made, (Dataset, list, tuple, Mapping))
    if rows and batch_size is not None:
        return parts.loader_over(made, SimpleNamespace(batch_size=batch_size))
    if batch_size is None and isinstance(made, Iterator):
        raise TypeError(
            f"{argument}= gives a {type(made).__name__}, which has batches for one epoch only; let "
            "it be something that begins anew with every iter(), as a DataLoader does"
        )
    if isinstance(made, Iterable) and not rows:
        return made
    raise TypeError(
        f"{argument}= must be a torch DataLoader or another iterable of batches (rows need a "
        f"DataLoader around them), or a function that returns one, not {made!r:.80}"
    )


def check_can_be_cut(loader: Any, argument: str, copies: int) -> None:
    """``TypeError`` for batches that cannot be dealt out to copies of the model."""
    what = f"a {type(loader).__name__}"
    if isinstance(loader, DataLoader):
        what = sharing.own_way(loader)
    if what:
        raise TypeError(
            f"{argument}= has {what}, which cannot be dealt out to {copies} copies of the model; "
            "pass a torch DataLoader over a dataset with a length, in order or shuffled"
        )


def evaluation_share(loader: Any, copy: int, copies: int) -> Any:
    """The part of an evaluation that one copy of the model does: every row is in one part."""
    if copies == 1:
        return loader
    check_can_be_cut(loader, "val_data", copies)
    rows = range(*part_bounds(len(loader.dataset), copy, copies))
    return DataLoader(
        Subset(loader.dataset, rows), batch_size=loader.batch_size, collate_fn=loader.collate_fn
    )


def make_plan(job: Job, loader: Any, device: Any) -> Plan:
    """Look at a batch, measure the layers, decide. Raises what is wrong with the user's input."""
    with torch.no_grad():  # for the recorder: no epoch of training
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
            _check_traced(job, loader, batch_size)
        stages = plan_stages(
            measure(layers, sample, wanted, job.loss, device),
            SCHEDULES[job.schedule],
            job.layout,
            microbatches=job.microbatches,
            stages_per_worker=job.stages_per_worker,
            layers_per_stage=job.layers_per_stage,
            memory_limit=job.memory_limit,
        )
        _check_shared(layers, stages)
    if job.layout.tensor > 1 or job.layout.pipeline == 1:
        model = whole_model(job.model, job.seed).to(device)
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


def _check_shared(layers: Any, stages: StagePlan) -> None:
    """Refuse a weight that several stages have: each would train a copy of its own."""
    holders: dict[int, tuple[int, str]] = {}
    for stage, (low, high) in enumerate(stages.bounds):
        for index in range(low, high):
            for name, weight in layers.weights_of(index):
                other, first = holders.setdefault(id(weight), (stage, name))
                if other != stage:
                    raise ValueError(
                        f"{first} and {name} are one weight, in stages {other} and {stage}, which "
                        "would each train a copy of their own; let each layer have its own, keep "
                        "both in one stage (layers_per_stage=), or cut the layers instead "
                        "(ModelParallelTrainer)"
                    )


def _check_traced(job: Job, loader: Any, batch_size: int) -> None:
    if job.layout.tensor > 1:
        raise TypeError(
            "the layers of a model that torch has traced into stages cannot be cut themselves; "
            'pass the model as a list of layers, or leave out "tensor" in parallel='
        )
    plan = getattr(getattr(loader, "batch_sampler", None), "plan", None)
    if plan is not None and any(n != batch_size * plan.world_size for n in plan.sizes):
        raise ValueError(
            f"the last batch of an epoch has {plan.sizes[-1]} samples instead of "
            f"{batch_size * plan.world_size}, and a model that torch has traced takes batches of "
            "one size only; pass drop_last=True to the DataLoader, or the model as a list of layers"
        )


def _check_model(model: nn.Module, sample: Any, target: Any, loss: Any) -> None:
    """One forward pass: what comes out must be a tensor, and the loss of it a number."""
    with torch.random.fork_rng(), untouched(model):
        output = model(*sample)
        check_output(output, f"the model ({type(model).__name__})")
        check_value(loss(output, target))
