"""The job of a split model: what is trained, and the part of each rank.

A layout has replicas of the model × stages × shards of a layer, in this order. Rank ``r`` of a
layout of d replicas, p places and t shards is shard ``r % t`` of the stages at place
``r // t % p`` of replica ``r // (t · p)``. So the shards of a layer, which communicate most, are
neighbors, and replicas are farthest apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import miniray
from miniray.checks import check_int
from miniray.train.lockstep.context import RankContext, WorkerTraits
from miniray.train.lockstep.options import RunFacts

DIMENSIONS = ("data", "pipeline", "tensor")

#: Hints for names that aren't options of a trainer of split models.
SPLIT_HINTS: Mapping[str, str] = {
    "worker": "Pass model=, loss=, optimizer= and data=: no worker has the whole model.",
    "lr": "Set it in optimizer=, such as lambda ps: torch.optim.Adam(ps, lr=0.001).",
    "train_data": "Pass data=.",
    "train_loader": "Pass data=.",
    "val_loader": "Pass val_data=.",
    "lr_scheduler": "Use scheduler=.",
    "accumulate": "Use microbatches=.",
    "gradient_accumulation_steps": "Use microbatches=.",
    "accumulate_grad_batches": "Use microbatches=.",
}


class Place(NamedTuple):
    """Position of a rank in the layout."""

    data: int
    pipeline: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class Layout:
    """Numbers of replicas of the model, places in the pipeline, and shards of each layer."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        return {"data": self.data, "pipeline": self.pipeline, "tensor": self.tensor}

    def place(self, rank: int) -> Place:
        return Place(
            rank // (self.pipeline * self.tensor),
            rank // self.tensor % self.pipeline,
            rank % self.tensor,
        )

    def rank(self, data: int, pipeline: int, tensor: int) -> int:
        return (data * self.pipeline + pipeline) * self.tensor + tensor

    def copy_ranks(self, data: int) -> list[int]:
        """Return the ranks that hold one replica of the model together."""
        size = self.pipeline * self.tensor
        return list(range(data * size, (data + 1) * size))


def read_layout(parallel: Mapping[str, Any] | None, num_workers: int, default: str) -> Layout:
    """Return the layout of ``parallel``. Without it, all workers belong to ``default``.

    Raises ``ValueError`` if the product isn't the number of workers.
    """
    if parallel is None:
        return Layout(**{default: num_workers})
    if not isinstance(parallel, Mapping):
        raise ValueError(f'parallel= must be a dict like {{"data": 2}}, not {parallel!r}')
    unknown = [name for name in parallel if name not in DIMENSIONS]
    if unknown:
        known = ", ".join(map(repr, DIMENSIONS))
        raise ValueError(f"parallel= knows {known}, not {', '.join(map(repr, unknown))}")
    sizes = {name: check_int(f"parallel[{name!r}]", n, 1) for name, n in parallel.items()}
    layout = Layout(**sizes)
    if layout.world_size != num_workers:
        told = " × ".join(f"{name} {size}" for name, size in parallel.items())
        raise ValueError(
            f"parallel={dict(parallel)} takes {layout.world_size} workers ({told}), and "
            f"num_workers is {num_workers}; pass num_workers={layout.world_size}"
        )
    return layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job(RunFacts):
    """Settings of all ranks; see ``PipelineParallelTrainer`` and ``ModelParallelTrainer``.

    Raises ``TypeError`` or ``ValueError`` for invalid ones.
    """

    model: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    data: Any
    layout: Layout
    val_data: Any = None
    batch_size: int | None = None
    scheduler: Callable[[Any], Any] | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] = dataclasses.field(default_factory=dict)
    schedule: str = "gpipe"
    microbatches: int = 1
    stages_per_worker: int | None = None
    layers_per_stage: Sequence[int] | None = None
    memory_limit: float | None = None
    tensor_plan: Mapping[str, str] | None = None

    def create_replica(self, user: Any, traits: WorkerTraits, context: RankContext) -> Any:
        from miniray.train.parallel.rank import PartReplica  # it needs torch

        return PartReplica(self, context)

    def __post_init__(self) -> None:
        _check(self)

    def store_data(self, batch_size: int | None) -> Job:
        """Return the job with its data in the object store, once for all ranks."""
        return dataclasses.replace(
            self,
            data=_Stored(miniray.put(self.data)),
            val_data=_Stored(miniray.put(self.val_data)),
            batch_size=self.batch_size if batch_size is None else batch_size,
        )

    def fetch_data(self) -> Job:
        """Return the job with the data itself, on a rank that loads."""
        data, val_data = (
            miniray.get(value.ref) if isinstance(value, _Stored) else value
            for value in (self.data, self.val_data)
        )
        return dataclasses.replace(self, data=data, val_data=val_data)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Data in the object store."""

    ref: Any


def _check(job: Job) -> None:
    if isinstance(job.loss, type):
        made = job.loss.__name__
        raise TypeError(f"loss= must be a function of output and target, not a class: {made}()")
    if any(p.requires_grad for p in getattr(job.loss, "parameters", list)()):
        raise ValueError(
            "loss= has trainable parameters, but only model parameters are optimized. Move them "
            "into the last layer"
        )
    for name in ("loss", "optimizer", "scheduler"):
        value = getattr(job, name)
        if value is not None and not callable(value):
            like = " of parameters, like partial(Adam, lr=0.001)" * (name == "optimizer")
            raise TypeError(
                f"{name}= must be a function{like}, not {' '.join(repr(value).split()):.80}"
            )
    for name, value, example in (
        ("metrics", job.metrics, '"accuracy": f'),
        ("plan", job.tensor_plan, '"fc1": "colwise"'),
    ):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name}= must be a dict like {{{example}}}, not {value!r:.80}")
    for name, function in job.metrics.items():
        if not callable(function):
            raise TypeError(f"metrics[{name!r}] must be a function, not {function!r:.80}")
    model = job.model
    if isinstance(model, (str, bytes, Path)) or not (
        callable(model) or isinstance(model, Sequence)
    ):
        raise TypeError(
            f"model= must be a module, a list of layers, or a function, not {model!r:.80}"
        )
    sizes: Any = job.layers_per_stage
    limit: Any = job.memory_limit
    if sizes is not None and (isinstance(sizes, str) or not isinstance(sizes, Iterable)):
        raise TypeError(f"layers_per_stage= must be a list of numbers, not {sizes!r}")
    if limit is not None and not isinstance(limit, Real):
        raise TypeError(f"memory_limit= must be a number of bytes, not {limit!r}")
