"""The steps of an epoch on one rank, for workers with a ``training_step``.

Whatever cannot be the same on all ranks is refused where it happens, with rank and step, and never
met by going on alone: a rank that skips a backward pass leaves the others waiting for its
gradients. So a step that returns no loss, a loss that is not finite, a parameter without a gradient
and a loader that ends early are errors.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.algorithms.join import Join

from miniray.doctor import sites
from miniray.doctor.instrument_training import observe_loss
from miniray.train.ddp.checks import RankSettings
from miniray.train.lockstep.member import check_loss, check_scheduler
from miniray.train.lockstep.plan import Window
from miniray.train.lockstep.status import PulseThread
from miniray.train.workers import torch_utils as parts

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_CHECK_EVERY = 50  # steps between two looks at losses on a GPU: each look waits for it


NOT_CALLED = (
    "{0} must call {1}(...) itself: calling its parts ({1}.encoder(x)) gives gradients that are "
    "not averaged, and the ranks' models drift apart"
)


class StepLoop:
    """Runs the windows of an epoch. ``steps`` counts optimizer steps over the whole run."""

    def __init__(
        self,
        worker: Any,
        models: Mapping[str, Any],
        settings: RankSettings,
        pulse: PulseThread,
        device: Any,
        recorder: Any = None,
    ) -> None:
        self.worker, self.models, self.settings = worker, models, settings
        self.pulse, self.device, self.recorder = pulse, device, recorder
        if recorder is not None:
            recorder.explicit_losses = True  # backward is called on a weighted loss
        self.steps = 0
        self._user_step = parts.step_of(worker.training_step)
        self._site = sites.definition_site(worker.training_step)
        #: When ``worker.scheduler`` is stepped: after each "epoch" or "step"; None without one.
        self.scheduler_interval = scheduler_interval(worker)
        self._dtype = PRECISIONS[settings.precision]
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.precision == "fp16")
        self._unchecked: list[tuple[int, Any]] = []
        self._last: tuple[int, Any] | None = None  # the batch that was trained on last

    def run(self, batches: Iterable[Any], windows: Iterable[Window] | None) -> dict[str, Any]:
        """Train on ``batches``; without ``windows`` until they end, alone if need be.

        Returns means over this rank's samples, and how many there were.
        """
        means = parts.Means()
        items = enumerate(batches)
        if windows is not None:
            for number, weights in enumerate(windows):
                self._step(number, weights, items, means)
        else:
            # Over the ranks that still take part: what there is, is averaged. Leaving the block
            # keeps the others company until they are done.
            with Join([*self.models.values()], divide_by_initial_world_size=False):
                for number in itertools.count():
                    self.pulse.at("data", step=number)
                    item = next(items, None)
                    if item is None:
                        break
                    self._step(number, (1.0,), iter((item,)), means)
        self._check_losses()
        return means.means()

    def _step(
        self, number: int, weights: Window, batches: Iterator[Any], means: parts.Means
    ) -> None:
        worker, pulse, models = self.worker, self.pulse, self.models.values()
        optimizer = worker.optimizer
        calls = {name: model.forwards for name, model in self.models.items()}
        optimizer.zero_grad(set_to_none=True)
        for place, weight in enumerate(weights):
            pulse.at("data", step=number)
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
            with contextlib.ExitStack() as stack:
                for model in models if not is_last else ():
                    stack.enter_context(model.no_sync())
                pulse.at("forward")
                before = sum(model.forwards for model in models)
                with self.autocast():
                    loss, metrics = read_output(self._user_step(batch, index), pulse.rank)
                if sum(model.forwards for model in models) == before:
                    self._refuse_parts(next(iter(self.models)))
                if weight:
                    if self.recorder is not None:
                        observe_loss(self.recorder, loss, self._site)
                    self._look_at(loss, number)
                    means.add(metrics, parts.length(batch))
                pulse.at("backward")
                weighted = loss if weight == 1.0 else loss * weight
                self.scaler.scale(weighted).backward()
        pulse.at("optimizer")
        self._check_gradients(calls)
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            parameters = [p for model in models for p in model.module.parameters()]
            torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip_norm)
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
        if self.settings.on_nonfinite == "ignore" or self.scaler.is_enabled():
            return  # with fp16 the scaler finds overflows and leaves out the step, on all ranks
        self._unchecked.append((number, loss.detach()))
        if self.device.type == "cpu" or len(self._unchecked) >= _CHECK_EVERY:
            self._check_losses()

    def _check_losses(self) -> None:
        unchecked, self._unchecked = self._unchecked, []
        for number, loss in unchecked:
            check_loss(loss.item(), "error", self.pulse.rank, number, self.pulse.epoch)

    def _refuse_parts(self, name: str) -> None:
        raise RuntimeError(NOT_CALLED.format("training_step()", f"self.{name}"))

    def _check_gradients(self, calls: Mapping[str, int]) -> None:
        """All of a model's where it was called in this step (``calls``: before it), else none."""
        for name, model in self.models.items():
            parameters = {k: p for k, p in model.module.named_parameters() if p.requires_grad}
            missing = [key for key, parameter in parameters.items() if parameter.grad is None]
            if model.forwards == calls[name]:
                if len(missing) < len(parameters):
                    self._refuse_parts(name)
                continue
            if not missing or self.settings.ddp_options.get("find_unused_parameters"):
                continue
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
