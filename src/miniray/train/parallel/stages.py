"""The stages of a worker and their schedule. torch runs them, and this module records the steps.

Batches of the usual size use the schedule that the user chose. The last batch of an epoch can have
a different size, which torch's buffers don't support. It uses a plain schedule with a number of
microbatches that divides it. In both cases, the gradients are those of the mean over the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from miniray.train.lockstep.mesh import stages_through_host
from miniray.train.parallel.feed import recv_tensor, send_tensor
from miniray.train.parallel.plan.measure import SavedBytes, preserve_state
from miniray.train.parallel.plan.schedules import divisor_up_to
from miniray.train.parallel.plan.stage_plan import StagePlan
from miniray.train.parallel.timeline import Span
from miniray.train.workers.data.batches import move_batch


class StepRecord:
    """Spans of the current step, and the activations that are kept in it."""

    def __init__(self, at_work: Callable[[str], None], waiting: Callable[[str], None]) -> None:
        self._at_work, self._waiting = at_work, waiting
        self.spans: list[Span] = []
        self.began = 0.0
        self.wall = 0.0
        self.peak_activations = 0
        self.measures_memory = False
        self._kept: dict[tuple[int, int], int] = {}

    def begin(self, measure_memory: bool) -> None:
        self.spans = []
        self._kept = {}
        self.measures_memory = measure_memory
        self.began = time.perf_counter()

    def end(self) -> None:
        self.wall = time.perf_counter() - self.began

    def run(self, kind: str, stage: int, microbatch: int, what: Callable[[], Any]) -> Any:
        """Run one piece of work. Record when it ran, and report where this worker is."""
        where = f"stage {stage} {_SHORT[kind]} mb {microbatch}"
        self._at_work(where)
        begin = time.perf_counter() - self.began
        try:
            result = what()
        except Exception as error:
            raise _add_stage_context(error, where) from error.__cause__
        end = time.perf_counter() - self.began
        self.spans.append(Span(kind, stage, microbatch, begin, end))
        self._waiting(f"after {where}")
        return result

    def forward(self, stage: int, microbatch: int, module: Any, what: Callable[[], Any]) -> Any:
        """Call ``run``, and measure the activations that are kept for backward if requested."""

        def measured() -> Any:
            with SavedBytes(list(module.parameters())) as saved:
                output = what()
            self._kept[stage, microbatch] = saved.bytes
            self.peak_activations = max(self.peak_activations, sum(self._kept.values()))
            return output

        return self.run("forward", stage, microbatch, measured if self.measures_memory else what)

    def on_freed(self, stage: int, microbatch: int) -> None:
        self._kept.pop((stage, microbatch), None)


def _add_stage_context(error: Exception, where: str) -> Exception:
    """Return the error of the user's layer, which torch wraps, with the stage and microbatch."""
    if "failed to run forward" in str(error) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(f"in {where}")
    return error


_SHORT = {"forward": "fwd", "backward": "bwd", "weights": "wgt"}


class RecordedStage(PipelineStage):  # type: ignore[misc]
    """torch's stage, which also records its work."""

    record: StepRecord
    _done_at_once: frozenset[int] = frozenset()  # microbatches whose weights have gradients already

    def _get_init_p2p_neighbors_ops(self) -> Any:
        """Connect neighbors for NCCL. gloo connects all ranks, and can't send to its own rank."""
        is_gloo = dist.get_backend(self.group) == "gloo"
        return [] if is_gloo else super()._get_init_p2p_neighbors_ops()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Find shapes with a pass over zeros (until torch 2.13).

        Random numbers and running statistics are restored afterwards.
        """
        with torch.random.fork_rng(), preserve_state(self.submod):
            return super()._prepare_forward_infra(*args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return _copy_if_view(super().forward_maybe_with_nosync(*args, **kwargs))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        work = partial(super().forward_one_chunk, fwd_chunk_id, *args, **kwargs)
        return self.record.forward(self.stage_index, fwd_chunk_id, self.submod, work)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Compute only the gradients of inputs if the schedule requests it, or else all gradients.

        torch finds weights on the path from the inputs. If all earlier stages are frozen, no such
        path exists, and torch would silently skip the weights.
        """
        if not kwargs.get("full_backward", True) and not self.is_first:
            _, inputs = self.fwd_cache[bwd_chunk_id]
            if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
                kwargs["full_backward"] = True
                self._done_at_once |= {bwd_chunk_id}
        work = partial(super().backward_one_chunk, bwd_chunk_id, *args, **kwargs)
        result = self.record.run("backward", self.stage_index, bwd_chunk_id, work)
        if kwargs.get("full_backward", True):
            self.record.on_freed(self.stage_index, bwd_chunk_id)
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if bwd_chunk_id in self._done_at_once:
            self._done_at_once -= {bwd_chunk_id}
            return None
        work = partial(super().backward_weight_one_chunk, bwd_chunk_id, *args, **kwargs)
        result = self.record.run("weights", self.stage_index, bwd_chunk_id, work)
        self.record.on_freed(self.stage_index, bwd_chunk_id)
        return result


def _copy_if_view(tensor: Any) -> Any:
    """Return a tensor that isn't a view: zero-bubble schedules detach outputs in place.

    A Linear returns a view if its input has more than two dimensions.
    """
    return tensor.clone() if isinstance(tensor, torch.Tensor) and tensor._is_view() else tensor


class ThroughHost(torch.nn.Module):  # type: ignore[misc]
    """A stage on a GPU whose inputs and outputs are in host memory, from which gloo sends.

    The output of the last stage stays on the GPU, for the loss.
    """

    def __init__(self, module: torch.nn.Module, device: Any, is_last: bool) -> None:
        super().__init__()
        self.module, self._device, self._is_last = module, device, is_last

    def forward(self, *inputs: Any) -> Any:
        output = self.module(*move_batch(inputs, self._device))
        return output if self._is_last else output.cpu()


class PipelineRunner:
    """The stages of one worker. All workers of a replica of the model must make the same calls.

    Args:
        modules: The modules by stage.
        ranks: The global rank that holds each stage of this replica and shard.
    """

    def __init__(
        self,
        modules: dict[int, torch.nn.Module],
        plan: StagePlan,
        ranks: Sequence[int],
        group: Any,
        loss: Any,
        device: Any,
        record: StepRecord,
    ) -> None:
        self.modules, self.plan, self.ranks = modules, plan, list(ranks)
        self.is_first = 0 in modules
        self.is_last = len(plan.sizes) - 1 in modules
        self.record = record
        self._group, self._device = group, device
        self._loss = lambda output, target: _copy_if_view(loss(output, target))
        self._schedules: dict[int, Any] = {}  # by the number of samples

    def train(self, count: int, usual: int, inputs: Any, target: Any) -> Any:
        """Train a batch of ``count`` samples. Return the loss on the rank with the last stage."""
        schedule = self._schedule(count, usual=count == usual)
        losses: list[Any] = []
        given: dict[str, Any] = {"return_outputs": False}
        if self.is_last:
            given.update(target=target, losses=losses)
        schedule.step(*(inputs if self.is_first else ()), **given)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    def _schedule(self, count: int, usual: bool) -> Any:
        if count not in self._schedules:
            total, stages = len(self.plan.sizes), []
            through_host = stages_through_host(self._device)
            sent_from = torch.device("cpu") if through_host else self._device
            for index, module in sorted(self.modules.items()):
                if through_host:
                    module = ThroughHost(module, self._device, index == total - 1)
                stage = RecordedStage(module, index, total, sent_from, group=self._group)
                stage.record = self.record
                stages.append(stage)
            most = self.plan.microbatches
            microbatches = most if usual else divisor_up_to(count, most)
            made = self.plan.schedule.make(stages, microbatches, self._loss, usual)
            self._schedules[count] = made
        return self._schedules[count]

    def forward(self, inputs: Any, count: int) -> Any:
        """Return the output of the model on the rank with the last stage, else None."""
        del count
        return self._through(self.modules, inputs)

    def _through(self, modules: Mapping[int, torch.nn.Module], value: Any) -> Any:
        last = len(self.plan.sizes) - 1
        for stage, module in sorted(modules.items()):
            if stage > 0 and self.ranks[stage - 1] != dist.get_rank():
                value = (recv_tensor(self.ranks[stage - 1], self._device),)
            output = module(*value)
            if stage == last:
                return output
            if self.ranks[stage + 1] == dist.get_rank():
                value = (output,)
            else:
                send_tensor(output, self.ranks[stage + 1])
        return None


class TracedRunner(PipelineRunner):
    """Stages that torch has traced, with the mode and the number of samples of the trace.

    They always use dropout and the statistics of the batch. Evaluations therefore use separately
    traced stages with the same weights. The last microbatch is padded with copies of a sample.
    """

    _evaluating: Any = None

    def trace_with(self, layers: Callable[[], Any], sample: Any) -> None:
        """Set the function that returns the layers, for microbatches like ``sample``."""
        self._layers, self._sample = layers, sample

    def forward(self, inputs: Any, count: int) -> Any:
        if self._evaluating is None:
            self._evaluating = self._layers().create_evaluation_stages(
                self.plan.bounds, self.modules, self._sample, self._device
            )
        size = len(self._sample[0])
        outputs = [
            self._through(self._evaluating, inputs and [_rows(v, low, size) for v in inputs])
            for low in range(0, count, size)
        ]
        return torch.cat(outputs)[:count] if self.is_last else None


def _rows(values: Any, low: int, size: int) -> Any:
    """Return ``size`` rows from ``low`` on. If there are fewer, repeat the last one."""
    return values[torch.arange(low, low + size).clamp(max=len(values) - 1)]


class WholeRunner:
    """A model in one stage, which computes the microbatches one after the other."""

    def __init__(
        self, model: torch.nn.Module, microbatches: int, loss: Any, record: StepRecord
    ) -> None:
        self.modules = {0: model}
        self.microbatches = microbatches
        self.record = record
        self._loss = loss

    def train(self, count: int, usual: int, inputs: Any, target: Any) -> Any:
        del usual
        model, parts = self.modules[0], divisor_up_to(count, self.microbatches)
        losses = []
        for index in range(parts):
            rows = slice(index * count // parts, (index + 1) * count // parts)

            def forward(rows: Any = rows) -> Any:
                return self._loss(model(*(value[rows] for value in inputs)), target[rows])

            loss = self.record.forward(0, index, model, forward)
            self.record.run("backward", 0, index, (loss / parts).backward)
            self.record.on_freed(0, index)
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def forward(self, inputs: Any, count: int) -> Any:
        del count
        return self.modules[0](*inputs)
