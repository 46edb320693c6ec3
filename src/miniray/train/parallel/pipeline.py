"""``PipelineParallelTrainer``: a model in stages, one or more per worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_choice, check_int, suggest_options
from miniray.train.lockstep.trainer import LockstepTrainer
from miniray.train.parallel.plan.job import SPLIT_HINTS, read_layout
from miniray.train.parallel.plan.schedules import SCHEDULES
from miniray.train.parallel.split import ModelParts, ModelWorker, create_split

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.options import ParallelKwargs


@suggest_options(SPLIT_HINTS, extends=ModelParts)
class PipelineParallelTrainer(LockstepTrainer):
    """Train a model that is divided into stages, one or more on each worker.

    The gradients are those of the mean over the whole batch, as on one worker. Pass the parts of
    the training instead of a worker class, because no worker has the whole model.

    Args:
        num_workers: Number of workers. All of them are places in the pipeline, unless ``parallel``
            is passed.
        model: A list of layers (each takes the output of the previous one), or of functions that
            return them and are called only where the layer is needed; an ``nn.Sequential``; any
            module that torch can trace, which is divided between the members of its longest list
            of modules; or a function that returns one of these.
        loss: ``loss(output, target)``, a mean over samples.
        optimizer: A function of a list of parameters, ``lambda ps: torch.optim.Adam(ps)``. It is
            called on every worker with the parameters of this worker.
        data: The training data, of a kind that ``DDPTrainer`` accepts, or a function that returns
            it. A batch is ``(input, ..., target)``, or a dict of columns of which the last one is
            the target. Only workers with the first stage load it.
        batch_size: Rows per batch of each replica of the model, if ``data`` is a dataset.
            ``train(batch_size=)`` wins.
        val_data: The same for ``evaluate`` and ``eval_interval``.
        metrics: Functions of output and target besides the loss, such as ``{"accuracy": ...}``.
            They return means over samples.
        schedule: ``"1f1b"``, ``"gpipe"``, ``"interleaved"`` or ``"zero_bubble"``; see
            ``miniray.train.parallel.plan.schedules``.
        microbatches: Number of equal parts of a batch.
        stages_per_worker: Stages per worker with ``"interleaved"``, 2 by default.
        layers_per_stage: Number of layers of each stage. By default, the layers are measured, and
            the slowest stage is as fast as possible.
        memory_limit: Bytes that a worker may use for weights, gradients, an optimizer with two
            numbers per weight, and activations.
        parallel: ``{"data": 2, "pipeline": 2, "tensor": 1}``: replicas of the pipeline, its stages,
            and shards of its layers. The product is ``num_workers``.
        plan: How layers are sharded; see ``ModelParallelTrainer``.
        scheduler: A function that returns the scheduler of an optimizer. It is stepped after
            each epoch.
        clip_norm: Maximum norm of the gradients of all parameters together.
        on_nonfinite, group_backend, hang_timeout, timeout, max_failures,
            snapshot_every: see ``DDPTrainer``.

    All other arguments are those of ``BaseTrainer``. The result has ``bubble`` and
    ``bubble_formula``, ``peak_activation_bytes`` and ``plot_pipeline()``.
    """

    def __init__(
        self,
        num_workers: int = 2,
        *,
        schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b",
        microbatches: int = 4,
        stages_per_worker: int | None = None,
        parallel: Mapping[str, int] | None = None,
        plan: Mapping[str, str] | None = None,
        **options: Unpack[ParallelKwargs],
    ) -> None:
        layout = read_layout(parallel, num_workers, "pipeline")
        check_choice("schedule", schedule, SCHEDULES)
        chosen = SCHEDULES[schedule]
        if stages_per_worker is not None:
            stages_per_worker = check_int("stages_per_worker", stages_per_worker, 1)
        if stages_per_worker is not None and chosen.fixed not in (None, stages_per_worker):
            raise ValueError(
                f"schedule={schedule!r} has {chosen.fixed} stages per worker, not "
                f'{stages_per_worker}. To set the number, use schedule="interleaved"'
            )
        if plan is not None and layout.tensor == 1:
            raise ValueError('plan= needs sharded layers: pass parallel={"tensor": N, ...}')
        split, others = create_split(
            type(self).__name__,
            layout,
            options,
            schedule=schedule,
            microbatches=microbatches,
            stages_per_worker=stages_per_worker,
            plan=plan,
        )
        super().__init__(num_workers, split, worker=ModelWorker, **others)
        self._split = split
        problem = chosen.problem(layout.pipeline, microbatches)
        if problem is not None and layout.pipeline > 1:
            raise ValueError(problem)

    @property
    def plan(self) -> Any:
        """The ``Plan`` that divides the model over the workers. None before ``train``."""
        return self._split.plan
