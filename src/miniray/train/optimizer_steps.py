"""Optimizer steps of a ``TorchWorker``: accumulated gradients, mixed precision and clipping."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from miniray.checks import check_choice, check_int, check_number
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data.batches import count_samples
from miniray.train.workers.group import WorkerGroup

Precision = Literal["fp32", "bf16", "fp16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """Options of ``DataParallelTrainer`` for workers derived from ``TorchWorker``.

    It is a ``WorkerSetup`` that passes them to the workers.
    """

    precision: Precision = "fp32"
    accumulate: int = 1
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, ("fp32", "bf16", "fp16"))
        check_int("accumulate", self.accumulate, 1)
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, 0, open_low=True)

    @property
    def given(self) -> dict[str, Any]:
        """Options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def start(self, group: WorkerGroup) -> None:
        """Pass the options to all workers. Raise ``ValueError`` if they would ignore them."""
        if not self.given:
            return
        if not group.has("set_step_options"):
            raise create_ignored_error(self, group.handles[0]._info.class_name)
        group.call("set_step_options", lambda _: (self,), {})

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Pass the options to a replacement."""
        if self.given:
            group.set_up_call(worker_id, "set_step_options", self)


def create_ignored_error(options: OptimizerOptions, worker: str) -> ValueError:
    """Return the error for a worker class that takes its optimizer steps itself."""
    return ValueError(
        f"{', '.join(options.given)} need workers derived from TorchWorker that don't override "
        f"train_epoch() or optimize(): {worker} takes its optimizer steps itself"
    )


class WeightedBatch(NamedTuple):
    """A batch of an optimizer step.

    Attributes:
        batch: The batch.
        weight: Factor of its loss. Each sample of the step counts the same.
        is_last: Whether it is the last batch of the step.
    """

    batch: Any
    weight: float
    is_last: bool


class OptimizerSteps:
    """Takes the optimizer steps of a worker as its options say.

    Args:
        worker: The ``TorchWorker``, whose ``model``, ``optimizer`` and ``scheduler`` are used.
        options: The options of the trainer.
    """

    def __init__(self, worker: Any, options: OptimizerOptions) -> None:
        import torch

        self._worker, self._options = worker, options
        device = parts.device_of(worker.model)
        self._device_type = "cpu" if device is None else torch.device(device).type
        is_scaled = options.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self._device_type, enabled=is_scaled)
        self._norm: Any = None

    @property
    def _scheduler_interval(self) -> str | None:
        return parts.get_scheduler_interval(self._worker)

    @property
    def accumulate(self) -> int:
        """Batches per optimizer step. The last step of an epoch can have fewer."""
        return self._options.accumulate

    def start_step(self) -> None:
        """Clear the gradients. ``optimize`` of the worker does it otherwise."""
        if self._options.given:
            self._worker.optimizer.zero_grad()

    def weigh_batches(self, window: Sequence[Any]) -> Iterator[WeightedBatch]:
        """Yield the batches of a step."""
        counts = [count_samples(batch) for batch in window]
        for number, (batch, count) in enumerate(zip(window, counts, strict=True), 1):
            yield WeightedBatch(batch, count / sum(counts), number == len(window))

    def autocast(self) -> Any:
        """Return a context in which the model computes with ``precision``."""
        return create_autocast(self._options.precision, self._device_type)

    def train_on(self, loss: Any, weight: float, is_last: bool) -> None:
        """Add the gradients of ``weight * loss``. Update the parameters after the last batch."""
        worker = self._worker
        if not self._options.given:
            worker.optimize(loss)
        else:
            self.scaler.scale(loss * weight).backward()
            if is_last:
                self._step()
        if is_last and self._scheduler_interval == "step":
            parts.step_schedule(worker.scheduler)

    def end_epoch(self, loss: float | None) -> None:
        """Step a scheduler that goes by epochs; ``loss`` is the mean over the epoch."""
        if self._scheduler_interval == "epoch":
            parts.step_scheduler(self._worker.scheduler, loss)

    def measure(self) -> dict[str, float]:
        """Return learning rate, gradient norm and memory after a step."""
        found = parts.measure_step(self._worker.model, self._worker.optimizer)
        return found if self._norm is None else {**found, "grad_norm": float(self._norm)}

    def _step(self) -> None:
        import torch

        optimizer = self._worker.optimizer
        if self._options.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            parameters = self._worker.model.parameters()
            norm = torch.nn.utils.clip_grad_norm_(parameters, self._options.clip_norm)
            self._norm = norm  # before clipping; reading it would wait for a GPU
        self.scaler.step(optimizer)
        self.scaler.update()


def create_autocast(precision: str, device_type: str) -> Any:
    """Return a context in which a model computes with ``precision``."""
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in dtypes:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtypes[precision])
