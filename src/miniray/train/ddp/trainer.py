"""``DDPTrainer``: gradients averaged over all workers in every step, by torch's DDP or FSDP.

``lockstep.trainer`` documents what happens when a rank fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_bool, check_int, check_number, suggest_options
from miniray.train import pretrained
from miniray.train.ddp.checks import RankSettings, check_min_workers
from miniray.train.ddp.parallelism import DataParallelism
from miniray.train.lockstep.trainer import LockstepTrainer
from miniray.train.options import DATA_HINTS
from miniray.train.workers.data.shards import DataRef, TrainData

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.options import LockstepKwargs


@suggest_options(DATA_HINTS)
class DDPTrainer(LockstepTrainer):
    """Train one model on several workers with gradients averaged in every step.

    The worker has ``self.model``, ``self.optimizer``, ``self.train_loader`` and a
    ``training_step(batch, batch_idx)`` that returns the loss (a mean over the batch) or a dict with
    it. For evaluation, it also has ``self.val_loader`` and ``validation_step``. Workers of
    ``DataParallelTrainer`` with ``train_epoch`` and ``self.model`` are also supported. The backward
    pass of their model then averages gradients, and nothing else changes.

    Args:
        num_workers: Number of workers. ``batch_size`` of the loader is per worker.
        worker: A class, decorated with ``@miniray.remote`` or not; or override ``create_worker``.
        shard: ``"none"``: every worker has the whole model. ``"full"``: each keeps a shard of
            weights, gradients and optimizer state, and gathers the rest of a layer while it
            computes that layer (torch's FSDP); for workers with ``training_step``.
        data: The training data: a torch ``Dataset`` or ``DataLoader``, a dataset or loader of
            ``miniray.data``, or a Hugging Face dataset. Each worker gets the loader over its own
            rows as ``self.train_loader``, or the shard as ``data`` of its ``load_data_shard``. The
            position is part of checkpoints. Batches are tensors.
        val_data: The same for ``evaluate``, as ``self.val_loader``.
        batch_size: Rows per batch of each worker, if ``data`` has no batch size.
            ``train(batch_size=)`` wins.
        uneven: Behavior if the number of samples isn't divisible by the number of workers.
            ``"join"``: every sample once, weighted so that each counts the same; workers that run
            out early repeat a batch with a weight of 0. ``"pad"``: some samples twice. ``"drop"``:
            skip some. ``"error"``: raise ``ValueError``.
        accumulate: Micro-batches per optimizer step.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (with a gradient scaler).
        clip_norm: Maximum norm of the gradients of all parameters together.
        compile: ``torch.compile`` the model: True, the name of a backend, or a dict of options.
        on_nonfinite: If a loss is NaN or infinite, raise (``"error"``) or train with it
            (``"ignore"``).
        on_divergence: ``"error"``: with every checkpoint, ranks compare checksums of their weights,
            and ``WeightsDivergedError`` ends the run if they differ; or ``"warn"``, which only
            leaves out that checkpoint. With ``shard="full"`` there is nothing to compare.
        models: Attributes of the worker whose gradients are averaged, for custom loops.
        group_backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: NCCL if each worker has a separate
            GPU, else gloo.
        hang_timeout: Seconds without progress of any rank after which the run ends with an error
            that names the rank that the others wait for. None: no limit.
        timeout: Seconds that ranks wait for each other in a collective or barrier.
        max_failures: Restarts of all ranks after one dies or hangs. Then the driver keeps the state
            after each epoch, and the ranks write snapshots.
        min_workers: Continue on fewer workers, at least this many, if a lost rank can't be placed
            again within 30 seconds, or if it is lost twice in a row at the same state. Workers are
            added again, up to ``num_workers``, at the next checkpoint or epoch for which the engine
            has resources. The global batch size changes with the number of workers. Without
            ``max_failures``, up to ``2 * (num_workers - min_workers)`` losses are repaired. Needs
            ``worker=`` and ``shard="none"``.
        snapshot_every: Steps between two snapshots inside an epoch, from which ranks restart.
            ``"auto"`` chooses an interval at which copies take 0.5 % of the time at most. None: a
            lost rank costs the steps since the last epoch or pause.
        log_every: Steps between two log records.
        eval_every_steps: Steps between two evaluations.
        sanity_batches: Batches of ``val_loader`` per rank on which ``validation_step`` runs before
            the first step of a run, so that an error in it is raised at once. The scores are
            discarded, and the run has the same bits as without. 0: none.
        limit_train_batches, limit_val_batches: Maximum number of batches per rank, in an epoch and
            in an evaluation of ``val_loader``.
        overfit_batches: Train on the same batches in every epoch, this many per rank, in order.
        find_unused_parameters, bucket_cap_mb, broadcast_buffers, gradient_as_bucket_view,
            static_graph: Options of DistributedDataParallel.

    All other arguments are those of ``BaseTrainer``.
    """

    def __init__(
        self,
        num_workers: int = 4,
        *,
        min_workers: int | None = None,
        worker: Any = None,
        data: Any = None,
        val_data: Any = None,
        batch_size: int | None = None,
        shard: Literal["none", "full"] = "none",
        uneven: Literal["join", "pad", "drop", "error"] = "join",
        accumulate: int = 1,
        precision: Literal["fp32", "bf16", "fp16"] = "fp32",
        compile: bool | str | Mapping[str, Any] = False,
        models: Sequence[str] = ("model",),
        find_unused_parameters: bool | None = None,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool | None = None,
        **options: Unpack[LockstepKwargs],
    ) -> None:
        flags = {
            "find_unused_parameters": find_unused_parameters,
            "broadcast_buffers": broadcast_buffers,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }
        ddp_options: dict[str, Any] = {
            name: check_bool(name, value) for name, value in flags.items() if value is not None
        }
        if bucket_cap_mb is not None:
            ddp_options["bucket_cap_mb"] = check_number(
                "bucket_cap_mb", bucket_cap_mb, 0, open_low=True
            )
        settings = RankSettings(
            accumulate=check_int("accumulate", accumulate, 1),
            precision=precision,
            models=models if isinstance(models, str) else tuple(models),
            shard=shard,
            uneven=uneven,
            compile=compile,
            ddp_options=ddp_options,
        )
        num_workers = check_int("num_workers", num_workers, 1)
        if min_workers is not None:
            min_workers = check_min_workers(min_workers, num_workers, settings)
        given = TrainData.create(data, val_data, batch_size, num_workers)
        self._data = DataRef(given)
        parallelism = DataParallelism(settings, self._data, min_workers=min_workers)
        super().__init__(num_workers, parallelism, worker=worker, **options)

    def shutdown(self) -> None:
        super().shutdown()
        self._data.close()

    def save_pretrained(self, path: str | Path) -> Path:
        ranks = self._get_ranks()  # all take part: each may hold a part of the weights
        return pretrained.save_pretrained(
            path, lambda *args: ranks.call("write_pretrained", lambda _: args)[0]
        )
