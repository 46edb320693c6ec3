"""One rank of a split model: what happens in the worker's process, and in which order.

A rank goes through ``prepare`` (rank 0 measures, plans and refuses what cannot be, before anybody
waits for anybody), ``join``, one ``epoch`` after the other, ``leave``; see ``ranks.member``.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from miniray.core import session
from miniray.train.lockstep.member import Member, check_loss, share_buffers
from miniray.train.lockstep.mesh import local, make_mesh
from miniray.train.lockstep.status import EVALUATION
from miniray.train.parallel.assembly import assemble
from miniray.train.parallel.feed import Feed
from miniray.train.parallel.plan import planning
from miniray.train.parallel.plan.job import Job
from miniray.train.parallel.plan.planning import Plan
from miniray.train.parallel.samples import Samples
from miniray.train.parallel.stages import StepRecord
from miniray.train.parallel.timeline import busy_seconds
from miniray.train.workers import torch_utils as parts


class ModelRank(Member):
    """The rank of a worker; see the module."""

    def __init__(self, rank: int, job: Job) -> None:
        super().__init__(rank, job.layout.world_size, job)
        self.job, self.layout = job, job.layout
        self.place = job.layout.place(rank)
        mine = torch.cuda.is_available() and session.get_gpu_ids()
        self.device = torch.device("cuda:0" if mine else "cpu")
        self.samples = Samples(job, self.place)
        self.part: Any = None

    def prepare(self) -> dict[str, Any]:
        """Who this is; and on rank 0 the plan. Raises what is wrong with the user's input."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        samples = self.samples
        samples.open()
        plan = None
        if self.rank == 0:
            with samples.random():
                plan = planning.make_plan(self.job, samples.loader, self.device)
        return {**self.whereabouts(), "plan": plan}

    def join(self, spec: Any, plan: Plan, one_machine: bool) -> int | None:
        """Join the group and build this rank's part of the model; returns an epoch's steps."""
        layout = self.layout
        if self.facts.own_process:
            # On any error they print hundreds of lines a rank: the whole schedule of all ranks, and
            # what is wrong with a plan, which is said once, in its error.
            for name in ("distributed.pipelining.schedules", "_subclasses.fake_tensor"):
                logging.getLogger(f"torch.{name}").setLevel(logging.CRITICAL)
        self.enter(spec, one_machine)
        if self.recorder is not None:
            self.recorder.explicit_losses = True  # of the batch, not of a microbatch
        self.pulse.at("building the model")
        self.plan = plan
        self.mesh = make_mesh(self.device, layout.sizes)
        self.record = StepRecord(self._tell_work, self.pulse.at)
        self.part = assemble(self.job, plan, self.place, self.mesh, self.device, self.record)
        last = 0 if plan.stages is None else plan.stages.holder(len(plan.stages.sizes) - 1)
        self._feed = Feed(layout, self.place, last, self.device)
        self.pulse.at("idle")
        return self.samples.steps

    def _tell_work(self, what: str) -> None:
        self.pulse.at(what)
        if self.recorder is not None:
            self.recorder.set_work(what)

    # -- an epoch ---------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> dict[str, Any]:
        pulse = self.pulse
        pulse.at("starting the loader")
        self.part.train()
        items = self.samples.batches(epoch, pulse.at)
        self.barrier("before-iteration")
        means, times, spans, began = parts.Means(), [], self.record.spans, 0.0
        loop_began = time.perf_counter()
        for step, (count, inputs, target) in enumerate(self._feed.batches(items)):
            pulse.at("step", step=step)
            loss = self._step(step, count, inputs, target)
            if loss is not None:
                means.add({"loss": loss}, count)
            if count == self.plan.batch_size:
                spans, began = self.record.spans, self.record.began
                times.append((busy_seconds(spans), self.record.wall))
        seconds = time.perf_counter() - loop_began
        pulse.at("end of the epoch")
        if self.layout.data > 1:  # all copies go on with the first one's
            source = self.layout.rank(0, self.place.pipeline, self.place.tensor)
            share_buffers(self.part.modules.values(), source, self.mesh.get_group("data"))
        self.barrier("epoch-end")
        if self.part.scheduler is not None:
            self.part.scheduler.step()
        pulse.at("idle")
        return {
            "means": means.means(),
            # The first step also connects the ranks and finds out shapes.
            "times": times[1:] or times,
            "seconds": seconds,  # of all steps, loading included: benchmarks ask for it
            "spans": [tuple(span) for span in spans],  # of the last step with a whole batch
            "began": began,
            "peak_activations": self.record.peak_activations,
        }

    def _step(self, number: int, count: int, inputs: Any, target: Any) -> Any:
        part, record = self.part, self.record
        part.optimizer.zero_grad(set_to_none=True)
        record.begin(measure_memory=not record.peak_activations)
        loss = None
        if count:
            loss = part.runner.train(count, self.plan.batch_size, inputs, target)
        record.end()
        if loss is not None:
            self._check(loss, number)
        self.pulse.at("gradients")
        if self.layout.data > 1:
            data = self.mesh.get_group("data")
            average_over_copies(part.parameters, count, data, self.device)
        if self.job.clip_norm is not None:
            clip(
                part.parameters,
                self.job.clip_norm,
                self.mesh.get_group("tensor") if self.layout.tensor > 1 else None,
                self.mesh.get_group("pipeline") if self.layout.pipeline > 1 else None,
            )
        self.pulse.at("optimizer")
        part.optimizer.step()
        return loss

    def _check(self, loss: Any, number: int) -> None:
        value = loss.item()
        if self.recorder is not None:
            self.recorder.set_loss(value, "")
        check_loss(value, self.job.on_nonfinite, self.rank, number, self.pulse.epoch)

    def evaluate(self, data: Any) -> dict[str, Any]:
        """Sums and counts over this copy's part of ``data``; nothing where it has no last stage."""
        self.part.train(False)
        means = parts.Means()
        functions = {"loss": self.job.loss, **self.job.metrics}
        items = self.samples.evaluation(data, self.plan.batch_size)
        self.pulse.at(EVALUATION, step=-1)
        with torch.no_grad():
            for count, inputs, target in self._feed.batches(items):
                self.pulse.at(EVALUATION, step=-1)
                output = self.part.runner.forward(inputs, count)
                if output is not None:
                    means.add({k: f(output, target) for k, f in functions.items()}, count)
        self.pulse.at("idle")
        return means.sums()

    # -- state ------------------------------------------------------------------------------------

    def weights(self) -> dict[int, dict[str, Any]]:
        """This rank's stages in one piece; nothing where another rank says the same."""
        if self.place.data:
            return {}
        found = self.part.weights()
        return {} if self.place.tensor else found

    def shared_state(self) -> dict[str, Any] | None:
        """The optimizer's state of this rank's weights, and what all ranks share."""
        if self.place.data:
            return None
        found = self.part.optimizer_state()
        if self.place.tensor:
            return None
        scheduler = None if self.part.scheduler is None else self.part.scheduler.state_dict()
        return {"optimizer": found, "scheduler": scheduler, "seed": self.job.seed}

    def load_shared(self, shared: Any) -> None:
        self.part.load_optimizer(shared["optimizer"])
        if self.part.scheduler is not None and shared["scheduler"] is not None:
            self.part.scheduler.load_state_dict(shared["scheduler"])
        self.samples.set_order(shared["seed"])

    def own_state(self) -> dict[str, Any]:
        """This rank's random numbers, and where its loader is."""
        return {"random": parts.random_state(), **self.samples.state()}

    def load_own(self, saved: Any) -> None:
        self.samples.load(saved)
        parts.set_random_state(saved["random"])


def average_over_copies(parameters: Iterable[Any], samples: int, group: Any, device: Any) -> None:
    """Make gradients those of the mean over all copies' samples. A collective of ``group``.

    A copy may have fewer samples than others in this step, or none.
    """
    count = torch.tensor([float(samples)], device=device)
    # One message for each type of number: small ones cost more than their bytes.
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


def clip(parameters: Iterable[Any], most: float, tensor_group: Any, pipeline_group: Any) -> None:
    """Scale gradients so that the norm of all of them, on all ranks, is ``most`` at the most.

    A collective of both groups (None: there is nobody else).
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
            whole += square  # every shard's rank has the same: it counts once
    if tensor_group is not None:
        dist.all_reduce(cut, group=tensor_group)
    total = cut + whole
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    norm = math.sqrt(float(total))
    if norm > most:
        for gradient in gradients:
            local(gradient).mul_(most / (norm + 1e-6))


def _is_shard(tensor: Any) -> bool:
    """Whether other ranks have other parts of it."""
    return any(placement.is_shard() for placement in getattr(tensor, "placements", ()))
