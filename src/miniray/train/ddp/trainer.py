"""``DDPTrainer``: gradients averaged over all workers in every step, by torch's DDP or FSDP.

``lockstep.trainer`` documents what happens when a rank fails.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from miniray.checks import check_bool, check_int, check_number, suggest_options
from miniray.train.ddp import checks as setup
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.snapshot import Keep
from miniray.train.lockstep.trainer import LockstepTrainer
from miniray.train.options import WORKER_HINTS
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.evaluate import combine, cut

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.lockstep.loop import EpochReport
    from miniray.train.options import LockstepKwargs


@suggest_options({**WORKER_HINTS, "data": WORKER_HINTS["train_loader"]})
class DDPTrainer(LockstepTrainer):
    """Trains one model on several workers with gradients averaged in every step.

    The worker has ``self.model``, ``self.optimizer``, ``self.train_loader`` and a
    ``training_step(batch, batch_idx)`` that returns the loss (a mean over the batch) or a dict with
    it; with ``self.val_loader`` and ``validation_step`` it can be evaluated. Or it is a worker of
    the parameter-server trainer, with ``train_epoch`` and ``self.model``: then the model's backward
    pass averages gradients, and nothing else changes.

    Args:
        num_workers: how many. ``batch_size`` of the loader is per worker.
        worker: a class, decorated with ``@miniray.remote`` or not; or override ``create_worker``.
        shard: ``"none"``: every worker has the whole model. ``"full"``: each keeps its part of
            weights, gradients and optimizer state, and gets the rest of a layer while it computes
            that layer (torch's FSDP); for workers with ``training_step``.
        uneven: what to do when samples do not divide by workers. ``"join"``: every sample once,
            weighted so that each counts the same; workers that run out early keep the others
            company. ``"pad"``: some samples twice. ``"drop"``: some not at all. ``"error"``:
            raise ``ValueError``.
        accumulate: micro-batches in an optimizer step.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"`` (with a gradient scaler).
        clip_norm: largest norm of the gradients of all parameters together.
        compile: ``torch.compile`` the model: True, a backend's name, or a dict of its options.
        on_nonfinite: ``"error"``: a loss that is NaN or infinite ends the run; or ``"ignore"``.
        models: attributes of the worker to average gradients of; for loops of one's own.
        group_backend: ``"gloo"``, ``"nccl"``, or ``"auto"``: NCCL where each worker has a GPU of
            its own, else gloo.
        hang_timeout: seconds in which no rank moves and the one that is waited for is idle; then
            the run ends and says which, and where. None: no limit.
        timeout: seconds the ranks wait for one another in a collective or barrier at most.
        max_failures: how often the ranks are started again after one died or hung. Then the state
            of the run is kept on the driver after each epoch.
        log_every: steps between two log records.
        eval_every_steps: steps between two evaluations.
        limit_train_batches, limit_val_batches: largest number of batches per rank, in an epoch and
            in an evaluation of ``val_loader``.
        overfit_batches: train on the same batches in every epoch, this many per rank, in order.
        find_unused_parameters, bucket_cap_mb, broadcast_buffers, gradient_as_bucket_view,
            static_graph: go to DistributedDataParallel.

    All other arguments are those of ``BaseTrainer``.
    """

    _kind = "ddp"

    def __init__(
        self,
        num_workers: int = 4,
        *,
        worker: Any = None,
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
        self._settings = setup.RankSettings(
            accumulate=check_int("accumulate", accumulate, 1),
            precision=precision,
            models=models if isinstance(models, str) else tuple(models),
            shard=shard,
            uneven=uneven,
            compile=compile,
            ddp_options=ddp_options,
        )
        super().__init__(num_workers, worker=worker, **options)
        kind = "replicated" if shard == "none" else "sharded"
        self._preloaded = (
            "tqdm.std",
            f"miniray.train.ddp.{kind}",
            *(("torch._dynamo.convert_frame",) if compile else ()),
        )
        self._steps_are_ours = self._has_own_evaluate = False

    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once.

        Workers may have different numbers of samples, or none. No collective is called, unless the
        model is sharded: then all workers take part, also those without samples.
        """
        epoch, group, count = self._epoch_for_errors(), self._get_ranks(), self.num_workers
        setup.check_can_evaluate(group.handles[0])
        rows = [(None, None) if data is None else cut(data, rank, count) for rank in range(count)]
        is_sharded = self._settings.shard == "full"
        ranks = [rank for rank, (_, samples) in enumerate(rows) if samples != 0 or is_sharded]
        attempt = partial(
            group.call_ranks,
            "evaluate",
            lambda rank: () if data is None else (rows[rank][0],),
            lambda rank: {**kwargs, "shard_id": rank, "num_shards": count},
            epoch,
            ranks=ranks,
            reports_progress=not self._has_own_evaluate,
        )
        # The user's own may change anything; ours draws random numbers.
        keep = Keep.ALL if self._has_own_evaluate else Keep.OWN
        scores = group.run(attempt, epoch=epoch, keep=keep)
        pairs = zip(ranks, scores, strict=True)
        return combine([(rank, rows[rank][1], score) for rank, score in pairs])

    def _summarize(self, reports: Sequence[EpochReport]) -> dict[str, Any]:
        results = [report.metrics for report in reports]
        if self._steps_are_ours and not any(result["num_samples"] for result in results):
            raise RuntimeError(
                "no rank's loader gave a batch in this epoch. A generator can be gone through once "
                "only: let self.train_loader be something that begins anew with every iter()"
            )
        return aggregate(results)

    # -- workers ----------------------------------------------------------------------------------

    def _prepare_ranks(self, group: LockstepGroup) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """Load the data, prepare the ranks and compare them."""
        worker, count = group.handles[0], self.num_workers
        methods = worker._info.list_methods()
        evaluates = self.options.eval_interval and type(self).evaluate is DDPTrainer.evaluate
        if evaluates:
            setup.check_can_evaluate(worker)
        if "training_step" not in methods and "train_epoch" not in methods:
            raise TypeError(
                f"worker class {worker._info.class_name} has neither "
                "training_step(batch, batch_idx) nor train_epoch(epoch)"
            )
        if "load_data_shard" in methods:
            group.call_ranks("load_data_shard", lambda i: (i, count), lambda _: self._kwargs)
        settings = dataclasses.replace(self._settings, **self._run_facts())
        facts = group.call_ranks("prepare_rank", lambda i: (i, count, settings))
        self._steps_are_ours = facts[0]["steps"]
        self._has_own_evaluate = "evaluate" in facts[0]["own_methods"]
        if evaluates and not self._has_own_evaluate:
            setup.check_val_loader(facts, self.options.eval_interval)
        if not self._steps_are_ours:
            setup.refuse_step_options(settings)
        return facts, setup.agree(facts, settings)

    # -- state ------------------------------------------------------------------------------------

    def _merge_weights(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def _merge_shared(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def _describe(self) -> dict[str, Any]:
        names = ("shard", "uneven", "accumulate", "precision", "ddp_options")
        own = {name: getattr(self._settings, name) for name in names}
        return {**super()._describe(), **own, "clip_norm": self.clip_norm}
