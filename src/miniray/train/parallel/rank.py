"""One rank of a pipeline, or of a model whose layers are sharded."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from miniray.train.lockstep.context import RankContext
from miniray.train.lockstep.health.status import EVALUATION
from miniray.train.lockstep.loop import StepLoop
from miniray.train.lockstep.mesh import (
    local,
    make_mesh,
    share_buffers,
)
from miniray.train.lockstep.replica import MicroBatch, StepOutput
from miniray.train.lockstep.schedule import Agreement
from miniray.train.parallel.assembly import assemble
from miniray.train.parallel.feed import Feed
from miniray.train.parallel.plan import planning
from miniray.train.parallel.plan.job import Job
from miniray.train.parallel.plan.planning import Plan
from miniray.train.parallel.samples import Samples
from miniray.train.parallel.stages import StepRecord
from miniray.train.parallel.state import PartState
from miniray.train.parallel.timeline import busy_seconds
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.context import find_device


class PartReplica:
    """A ``Replica`` that holds some stages of the model, or a shard of its layers.

    ``forward`` runs the whole schedule of a batch, forward and backward.
    """

    site = ""

    def __init__(self, job: Job, context: RankContext) -> None:
        self.job, self.layout, self.context = job, job.layout, context
        self.place = job.layout.place(context.rank)
        self.checks_losses = job.on_nonfinite == "error"
        self.logs_samples = self.place.tensor == 0
        self.samples = Samples(job, self.place)
        self.state = PartState(self)
        self.part: Any = None
        self._count = 0  # samples of the current step
        self._gradient_norm: float | None = None  # of the last step, if it is logged or clipped
        self._times: list[tuple[float, float]] = []  # busy and total seconds of each step
        self._last_step: tuple[list[Any], float] = ([], 0.0)  # the last one with a whole batch
        self._seconds = 0.0  # of all steps of the epoch, with loading

    def prepare(self) -> dict[str, Any]:
        """Open the loader; rank 0 plans. Raise an error for what is wrong with the user's input."""
        device = self.context.device = torch.device(find_device())
        if device.type == "cuda":
            torch.cuda.set_device(device)
        samples = self.samples
        samples.open()
        plan = None
        if self.context.rank == 0:
            with samples.random():
                plan = planning.make_plan(self.job, samples.loader, device)
            plan = dataclasses.replace(plan, steps=samples.steps)
        return {"plan": plan}

    def wrap(self, agreed: Plan) -> int | None:
        """Build this rank's part of the model after rank 0's plan."""
        layout, context, device = self.layout, self.context, self.context.device
        if context.facts.own_process:
            # On an error they print hundreds of lines per rank: the schedule of all ranks, and
            # problems of a plan, which its error names.
            for name in ("distributed.pipelining.schedules", "_subclasses.fake_tensor"):
                logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
        context.status.set_phase("building the model")
        self.plan = agreed
        self.mesh = make_mesh(device, layout.sizes)
        self.record = StepRecord(self._set_work, context.status.set_phase)
        self.part = assemble(self.job, agreed, self.place, self.mesh, device, self.record)
        stages = agreed.stages
        last = 0 if stages is None else stages.holder(len(stages.sizes) - 1)
        self._feed = Feed(layout, self.place, last, device)
        return agreed.steps

    def _set_work(self, work: str) -> None:
        self.context.status.set_phase(work)
        if self.context.recorder is not None:
            self.context.recorder.set_work(work)

    def count_epoch_steps(self) -> int | None:
        steps: int | None = self.plan.steps
        return steps

    def create_loop(self) -> StepLoop:
        """Return the loop that trains epochs."""
        return StepLoop(self, self.context)

    # -- an epoch ---------------------------------------------------------------------------------

    def start_epoch(self) -> Iterator[Iterable[MicroBatch]]:
        self.part.train()
        state, status = self.context.state, self.context.status
        return self._iter_steps(
            self.samples.batches(state.epoch, state.step_in_epoch, status.set_phase)
        )

    def _iter_steps(self, items: Iterator[Any] | None) -> Iterator[list[MicroBatch]]:
        """Yield one micro-batch per step, until the rank that loads has no more batches."""
        self._times, self._last_step = [], (self.record.spans, 0.0)
        start = time.perf_counter()
        first = self.context.state.step_in_epoch
        for step, batch in enumerate(self._feed.batches(items), first):
            self.context.status.set_phase("step", step=step)
            yield [MicroBatch(step, batch)]
            if self._count == self.plan.batch_size:
                self._last_step = (self.record.spans, self.record.began)
                self._times.append((busy_seconds(self.record.spans), self.record.wall))
        self._seconds = time.perf_counter() - start

    def epoch_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def zero_grad(self) -> None:
        self.part.optimizer.zero_grad(set_to_none=True)

    def micro_batch_context(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        del is_last
        return contextlib.nullcontext()

    def forward(self, batch: Any, number: int) -> StepOutput:
        self._count, inputs, target = batch
        loss = None
        self.record.begin(measure_memory=not self.record.peak_activations)
        if self._count:
            loss = self.part.runner.train(self._count, self.plan.batch_size, inputs, target)
        self.record.end()
        tokens = self._feed.tokens if self._count else 0
        return StepOutput(loss, {"loss": loss}, self._count, tokens)

    def backward(self, loss: Any, weight: float) -> None:
        """Do nothing: ``forward`` has run the backward passes."""

    def check_gradients(self) -> None:
        """Average the gradients over the copies of the model, and clip them."""
        part, layout = self.part, self.layout
        if layout.data > 1:
            data = self.mesh.get_group("data")
            average_over_copies(part.parameters, self._count, data, self.context.device)
        self._gradient_norm = None
        clip_norm = self.job.clip_norm
        if clip_norm is not None or self.context.is_next_step_logged(self.plan.steps):
            self._gradient_norm = compute_gradient_norm(
                part.parameters,
                self.mesh.get_group("tensor") if layout.tensor > 1 else None,
                self.mesh.get_group("pipeline") if layout.pipeline > 1 else None,
            )
            if clip_norm is not None and self._gradient_norm > clip_norm:
                scale_gradients(part.parameters, clip_norm / (self._gradient_norm + 1e-6))

    def step_optimizer(self) -> None:
        self.part.optimizer.step()

    def share_buffers(self) -> None:
        if self.layout.data > 1:  # all copies continue with the buffers of the first
            source = self.layout.rank(0, self.place.pipeline, self.place.tensor)
            share_buffers(self.part.modules.values(), source, self.mesh.get_group("data"))

    def end_epoch(self) -> None:
        self.share_buffers()
        if self.part.scheduler is not None:
            self.part.scheduler.step()

    def get_details(self) -> Mapping[str, Any]:
        """Return the timing and memory of the epoch.

        ``spans`` and ``began`` are those of the last step with a whole batch.
        """
        spans, began = self._last_step
        return {
            # The first step also connects the ranks and finds out shapes.
            "times": self._times[1:] or self._times,
            "seconds": self._seconds,
            "spans": [tuple(span) for span in spans],
            "began": began,
            "peak_activations": self.record.peak_activations,
        }

    def get_facts(self) -> dict[str, float]:
        facts = {"lr": float(self.part.optimizer.param_groups[0]["lr"])}
        if self._gradient_norm is not None:
            facts["grad_norm"] = self._gradient_norm
        return facts

    def configure_scheduler(self, total_steps: int | None) -> None:
        """Do nothing: ``scheduler=`` creates the scheduler."""

    def create_agreement(self) -> Agreement:
        context = self.context
        device = context.device if dist.get_backend() == "nccl" else "cpu"
        request = context.status.take_request
        return Agreement(not context.rank, context.state.step, request, device=device)

    # -- evaluation -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluation_context(self) -> Iterator[None]:
        training = [(module, module.training) for module in self.part.modules.values()]
        self.part.train(False)
        self.context.status.set_phase(EVALUATION, step=-1)
        before = self.samples.random.state
        yield
        for module, is_training in training:  # an epoch may be under way
            module.train(is_training)
        self.samples.random.state = before
        self.context.status.set_phase("idle")

    def evaluate(self, data: Any = None, max_batches: int | None = None) -> dict[str, Any]:
        """Return sums and counts over this copy's part of ``data``; none without the last stage.

        ``max_batches`` is ``limit_val_batches`` by default, or all of ``data``.
        """
        if data is None and max_batches is None:
            max_batches = self.job.limit_val_batches
        means = parts.Means()
        functions = {"loss": self.job.loss, **self.job.metrics}
        items = self.samples.evaluation(data, self.plan.batch_size)
        if items is not None:
            items = itertools.islice(items, max_batches)
        with torch.no_grad():
            for count, inputs, target in self._feed.batches(items):
                self.context.status.set_phase(EVALUATION, step=-1)
                output = self.part.runner.forward(inputs, count)
                if output is not None:
                    means.add({k: f(output, target) for k, f in functions.items()}, count)
        return means.sums()

    def check_validation(self, max_batches: int) -> None:
        with parts.preserve_state(self.part.modules.values(), self.samples.job.val_data):
            self.evaluate(None, max_batches)

    def set_lr(self, lr: float) -> None:
        for options in self.part.optimizer.param_groups:
            options["lr"] = lr

    @property
    def has_position(self) -> bool:
        return not self.samples.loads or self.samples.windows is not None


def average_over_copies(parameters: Iterable[Any], samples: int, group: Any, device: Any) -> None:
    """Average gradients over the samples of all copies. A collective of ``group``.

    A copy may have fewer samples than others in this step, or none.
    """
    count = torch.tensor([float(samples)], device=device)
    # One message per dtype, because many small messages are slower.
    by_type: dict[Any, list[Any]] = {count.dtype: [count]}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = local(parameter.grad)
        by_type.setdefault(gradient.dtype, []).append(gradient.mul_(samples))
    sums = {dtype: torch.cat([g.reshape(-1) for g in found]) for dtype, found in by_type.items()}
    for buffer in sums.values():
        dist.all_reduce(buffer, group=group)
    total = float(sums[count.dtype][0])
    for dtype, found in by_type.items():
        summed = sums[dtype].split([gradient.numel() for gradient in found])
        for gradient, part in zip(found, summed, strict=True):
            gradient.copy_(part.view_as(gradient).div_(total))


def compute_gradient_norm(
    parameters: Iterable[Any], tensor_group: Any, pipeline_group: Any
) -> float:
    """Return the norm of the gradients of all ranks together.

    A collective of both groups. A group is None if it has one rank.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = local(gradients[0]).device if gradients else torch.device("cpu")
    cut = torch.zeros(1, dtype=torch.float64, device=device)
    whole = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        square = local(gradient).detach().double().pow(2).sum()
        if _is_shard(gradient):
            cut += square
        else:
            whole += square  # replicated on all shards, so count it once
    if tensor_group is not None:
        dist.all_reduce(cut, group=tensor_group)
    total = cut + whole
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    return math.sqrt(float(total))


def scale_gradients(parameters: Iterable[Any], factor: float) -> None:
    """Multiply all gradients by a factor."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def _is_shard(tensor: Any) -> bool:
    """Return whether the tensor is sharded over ranks."""
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
