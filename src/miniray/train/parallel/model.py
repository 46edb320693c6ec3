"""``ModelParallelTrainer``: every layer sharded over workers, or whole layers on each worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_int, suggest_options
from miniray.train.lockstep.trainer import LockstepTrainer
from miniray.train.parallel.plan.job import SPLIT_HINTS, Layout, read_layout
from miniray.train.parallel.split import ModelParts, ModelWorker, create_split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.options import ParallelKwargs


@suggest_options(
    {**SPLIT_HINTS, "schedule": "Pass it to PipelineParallelTrainer."}, extends=ModelParts
)
class ModelParallelTrainer(LockstepTrainer):
    """Train a model whose weights are sharded over workers, which compute the same batch together.

    Args:
        num_workers: Number of workers. ``tensor_parallel`` of them share a replica of the model.
            The others, if any, have further replicas, which get different samples.
        model: Any ``nn.Module``, or a function that returns one. The function is called on every
            worker, with the same random numbers.
        tensor_parallel: Number of shards of each layer. By default, the number of workers.
        plan: How each module is sharded, such as ``{"layers.*.attn.q": "colwise",
            "layers.*.attn.out": "rowwise"}``. ``*`` stands for one part of a name, ``**`` for
            several. Styles are ``"colwise"``, ``"rowwise"``, ``"colwise_gather"`` and
            ``"replicate"``; see ``miniray.train.parallel.plan.tensor_plan``. By default, a plan is
            derived from the types and names of the modules. The plan is printed. If the sharded
            model computes a different output, ``train`` raises ``ValueError`` before training.
        split: ``"tensor"``, or ``"layers"`` for models whose layers can't be sharded: each worker
            gets some of the layers and waits while the others compute. This saves memory, but no
            time; a ``PipelineParallelTrainer`` saves both.
        parallel: ``{"data": 2, "tensor": 2}`` instead of ``tensor_parallel``.
        loss, optimizer, data, val_data, batch_size, metrics, microbatches, scheduler, clip_norm,
            memory_limit: see ``PipelineParallelTrainer``.

    All other arguments are those of ``PipelineParallelTrainer`` and ``BaseTrainer``.
    """

    def __init__(
        self,
        num_workers: int = 2,
        *,
        tensor_parallel: int | None = None,
        plan: Mapping[str, str] | None = None,
        split: Literal["tensor", "layers"] = "tensor",
        parallel: Mapping[str, int] | None = None,
        microbatches: int = 1,
        **options: Unpack[ParallelKwargs],
    ) -> None:
        layout = _layout(num_workers, tensor_parallel, split, parallel, plan)
        split_model, others = create_split(
            type(self).__name__,
            layout,
            options,
            schedule="gpipe",
            microbatches=microbatches,
            plan=plan,
        )
        super().__init__(num_workers, split_model, worker=ModelWorker, **others)
        self._split = split_model

    @property
    def plan(self) -> Any:
        """The ``Plan`` that divides the model over the workers. None before ``train``."""
        return self._split.plan


def _layout(
    num_workers: int,
    tensor_parallel: int | None,
    split: str,
    parallel: Mapping[str, int] | None,
    plan: Mapping[str, str] | None,
) -> Layout:
    if split not in ("tensor", "layers"):
        raise ValueError(f'split must be "tensor" or "layers", not {split!r}')
    if split == "layers":
        if tensor_parallel is not None or plan is not None:
            raise ValueError('split="layers" shards no layers. Remove tensor_parallel and plan')
        return read_layout(parallel, num_workers, "pipeline")
    if parallel is not None:
        if tensor_parallel is not None:
            raise ValueError("pass either tensor_parallel or parallel, not both")
        return read_layout(parallel, num_workers, "tensor")
    shards = check_int(
        "tensor_parallel", num_workers if tensor_parallel is None else tensor_parallel, 1
    )
    if num_workers % shards:
        fitting = [n for n in range(1, num_workers + 1) if num_workers % n == 0]
        raise ValueError(
            f"num_workers={num_workers} isn't divisible by tensor_parallel={shards}. Use "
            f"{', '.join(map(str, fitting))}"
        )
    return Layout(data=num_workers // shards, tensor=shards)
