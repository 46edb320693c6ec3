"""Plan on rank 0, before the ranks join the process group: batch size, costs, stages, shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from miniray.train.parallel.feed import split_batch
from miniray.train.parallel.plan import tensor_plan as tensor
from miniray.train.parallel.plan.job import Job
from miniray.train.parallel.plan.layers import read_layers, whole_model
from miniray.train.parallel.plan.measure import check_output, check_value, measure, preserve_state
from miniray.train.parallel.plan.schedules import SCHEDULES
from miniray.train.parallel.plan.stage_plan import StagePlan, plan_stages
from miniray.train.workers.data.batches import move_batch
from miniray.train.workers.data.planned import planned


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plan of rank 0, which all ranks use."""

    stages: Any
    tensor: Any
    batch_size: int
    sample: Any  # inputs of one microbatch, on which the sharded model is compared
    steps: int | None = None  # of an epoch, if known

    def tables(self) -> list[str]:
        return [plan.table() for plan in (self.stages, self.tensor) if plan is not None]


def make_plan(job: Job, loader: Any, device: Any) -> Plan:
    """Load a batch, measure the layers and plan. Raise an error for invalid parts of the user."""
    with torch.no_grad():  # for the recorder: no epoch of training
        first = next(iter(loader), None)
    if first is None:
        raise ValueError("data= yields no batches")
    inputs, target = split_batch(first)
    batch_size = len(target)
    _check_microbatches(job, batch_size)
    share = batch_size // job.microbatches
    sample, wanted = move_batch((tuple(value[:share] for value in inputs), target[:share]), device)
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
    return Plan(stages, sharded, batch_size, move_batch(sample, "cpu"))


def _check_microbatches(job: Job, batch_size: int) -> None:
    if batch_size % job.microbatches:
        fitting = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
        raise ValueError(
            f"batches of {batch_size} samples can't be divided into microbatches="
            f"{job.microbatches}. Use {', '.join(map(str, fitting))}, or a different batch_size"
        )


def _check_shared(layers: Any, stages: StagePlan) -> None:
    """Raise ``ValueError`` for a weight of several stages: each would train a separate copy."""
    holders: dict[int, tuple[int, str]] = {}
    for stage, (low, high) in enumerate(stages.bounds):
        for index in range(low, high):
            for name, weight in layers.weights_of(index):
                other, first = holders.setdefault(id(weight), (stage, name))
                if other != stage:
                    raise ValueError(
                        f"{first} and {name} are one weight, in stages {other} and {stage}, which "
                        "would each train a separate copy. Use separate weights, keep both layers "
                        "in one stage (layers_per_stage=), or shard the layers instead "
                        "(ModelParallelTrainer)"
                    )


def _check_traced(job: Job, loader: Any, batch_size: int) -> None:
    if job.layout.tensor > 1:
        raise TypeError(
            "layers of a model that torch has traced into stages can't be sharded; "
            'pass the model as a list of layers, or leave out "tensor" in parallel='
        )
    own = planned(loader)
    usual = batch_size * job.layout.data
    if own is not None and own.plan.sizes[-1] != usual:
        raise ValueError(
            f"the last batch of an epoch has {own.plan.sizes[-1]} samples instead of {usual}, and "
            "a model that torch has traced requires batches of equal size. Pass drop_last=True to "
            "the DataLoader, or the model as a list of layers"
        )


def _check_model(model: nn.Module, sample: Any, target: Any, loss: Any) -> None:
    """Raise ``TypeError`` unless the model returns a tensor, and its loss is a number."""
    with torch.random.fork_rng(), preserve_state(model):
        output = model(*sample)
        check_output(output, f"the model ({type(model).__name__})")
        check_value(loss(output, target))
