"""The steps of an epoch on one rank, for workers with a ``training_step``.

Whatever cannot be the same on all ranks is refused where it happens, with rank and step, and never
met by going on alone: a rank that skips a backward pass leaves the others waiting for its
gradients. So a step that returns no loss, a loss that is not finite, a parameter without a gradient
and a loader that ends early are errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from miniray.train import torch_parts as parts
from miniray.train.ranks.member import check_loss, check_scheduler
from miniray.train.ranks.plan import Window
from miniray.train.ranks.pulse import PulseThread

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECK_EVERY = 50  # steps between two looks at losses on a GPU: each look waits for it


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """How steps are made; see ``DDPTrainer``."""

    accumulate: int = 1
    precision: str = "fp32"
    clip_norm: float | None = None
    on_nonfinite: str = "error"
    find_unused_parameters: bool = False


NOT_CALLED = (
    "{0} must call {1}(...) itself: calling its parts ({1}.encoder(x)) gives gradients that are "
    "not averaged, and the ranks' models drift apart"
)


class StepLoop:
    """Runs the windows of an epoch. ``steps`` counts optimizer steps over the whole run."""

    def __init__(
        self, worker: Any, model: Any, options: StepOptions, pulse: PulseThread, device: Any
    ) -> None:
        self.worker = worker
        self.model = model
        self.options = options
        self.pulse = pulse
        self.device = device
        self.steps = 0
        self._user_step = parts.step_of(worker.training_step)
        #: When ``worker.scheduler`` is stepped: after each "epoch" or "step"; None without one.
        self.scheduler_interval = scheduler_interval(worker)
        self._dtype = PRECISIONS[options.precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
        self._unchecked: list[tuple[int, Any]] = []
        self._last: tuple[int, Any] | None = None  # the batch that was trained on last

    def run(self, batches: Iterable[Any], windows: Iterable[Window] | None) -> dict[str, Any]:
        """Train on ``batches``; without ``windows`` until they end, alone if need be.

        Returns means over this rank's samples, and how many there were.
        """
        means = parts.Means()
        iterator = enumerate(batches)
        known = windows is not None
        with contextlib.ExitStack() as stack:
            joined = False
            for number, window in enumerate(windows if windows is not None else _endless()):
                if window.join and not joined:
                    # Over the ranks that still take part: what there is, is averaged.
                    stack.enter_context(self.model.join(divide_by_initial_world_size=False))
                    joined = True
                if not window.weights:
                    break  # leaving the block keeps the others company until they are done
                self.pulse.at("data", step=number)
                first = next(iterator, None)
                if first is None and not known:
                    break
                self._step(number, window.weights, itertools.chain((first,), iterator), means)
        self._check_losses()
        return means.means()

    def _step(
        self, number: int, weights: tuple[float, ...], batches: Iterator[Any], means: parts.Means
    ) -> None:
        worker, pulse, model = self.worker, self.pulse, self.model
        optimizer = worker.optimizer
        optimizer.zero_grad(set_to_none=True)
        for place, weight in enumerate(weights):
            pulse.at("data")
            item = next(batches, None) if weight else self._last
            if item is None:
                raise RuntimeError(
                    f"rank {pulse.rank} ran out of data at step {number}: its loader gave fewer "
                    "batches than its len() says"
                )
            self._last = item
            index, batch = item
            batch = parts.moved(batch, self.device)
            is_last = place == len(weights) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                pulse.at("forward")
                calls = model.forwards
                with self.autocast():
                    loss, metrics = read_output(self._user_step(batch, index), pulse.rank)
                if model.forwards == calls:
                    raise RuntimeError(NOT_CALLED.format("training_step()", "self.model"))
                if weight:
                    self._look_at(loss, number)
                    means.add(metrics, parts.length(batch))
                pulse.at("backward")
                weighted = loss if weight == 1.0 else loss * weight
                self.scaler.scale(weighted).backward()
        pulse.at("optimizer")
        if not self.options.find_unused_parameters:
            self._check_gradients(model)
        if self.options.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.module.parameters(), self.options.clip_norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.steps += 1
        if self.scheduler_interval == "step":
            worker.scheduler.step()

    def autocast(self) -> Any:
        """Inside, the model computes in the precision that was asked for; in evaluations too."""
        if self._dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._dtype)

    # -- what must not pass -----------------------------------------------------------------------

    def _look_at(self, loss: Any, number: int) -> None:
        if self.options.on_nonfinite == "ignore" or self.scaler.is_enabled():
            return  # with fp16 the scaler finds overflows and leaves out the step, on all ranks
        self._unchecked.append((number, loss.detach()))
        if self.device.type == "cpu" or len(self._unchecked) >= _CHECK_EVERY:
            self._check_losses()

    def _check_losses(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for number, loss in unchecked:
            check_loss(loss.item(), "error", self.pulse.rank, number, self.pulse.epoch)

    def _check_gradients(self, model: Any) -> None:
        missing = [
            name
            for name, parameter in model.module.named_parameters()
            if parameter.grad is None and parameter.requires_grad
        ]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(
                f"rank {self.pulse.rank} has no gradient for {shown} at step {self.pulse.step}: "
                "the loss does not depend on it there, and other ranks wait for it. Use it in the "
                "loss, take it out (requires_grad_(False)), or pass find_unused_parameters=True"
            )


def scheduler_interval(worker: Any) -> str | None:
    """When ``worker.scheduler`` is stepped; ``ValueError`` where that cannot be done."""
    scheduler = getattr(worker, "scheduler", None)
    if scheduler is None:
        return None
    check_scheduler(scheduler, "self.scheduler")
    interval: str = getattr(worker, "scheduler_interval", "epoch")
    if interval not in ("epoch", "step"):
        raise ValueError(f'scheduler_interval must be "epoch" or "step", not {interval!r}')
    return interval


def _endless() -> Iterator[Window]:
    return itertools.repeat(Window((1.0,), join=True))


def read_output(output: Any, rank: int) -> tuple[Any, dict[str, Any]]:
    """(the loss, all numbers to report) of what a step returned."""
    metrics = dict(output) if isinstance(output, Mapping) else {"loss": output}
    loss = metrics.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"{type(output).__name__} {output!s:.80}"
        if isinstance(loss, float):
            what += ". Return the tensor itself, without .item()"
        elif isinstance(loss, torch.Tensor):
            what = f"a tensor of shape {tuple(loss.shape)}. Return its mean()"
        elif output is None:
            what = (
                "None. A rank cannot leave out a step: the others wait for its gradients. Return a "
                "loss times 0 instead"
            )
        raise TypeError(
            f"training_step() on rank {rank} must return the loss, a tensor of one number, or a "
            f'dict with it as "loss"; it returned {what}'
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"the loss of rank {rank} has no gradient: it was detached, or depends on no parameter "
            "that is trained. A rank cannot leave out a step: the others wait for its gradients. "
            "Return a loss times 0 instead"
        )
    return loss.reshape(()), metrics
