"""What the driver tells every rank of a split model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miniray.train.parallel.layout import Layout
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
