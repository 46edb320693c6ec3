"""Data parallelism: every rank trains on its own samples, and gradients are averaged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from miniray.train.ddp import checks
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.parallelism import RunSettings
from miniray.train.lockstep.snapshots.state import Keep
from miniray.train.run.result import TrainResult
from miniray.train.run.tensors.shards import merge_shards
from miniray.train.train_kwargs import KwargRules
from miniray.train.workers.aggregate import aggregate
from miniray.train.workers.data.shards import DataRef
from miniray.train.workers.evaluate import combine, cut

if TYPE_CHECKING:
    from miniray.train.lockstep.replica import EpochReport


class DataParallelism:
    """The ``Parallelism`` of ``DDPTrainer``."""

    kind = "ddp"

    def __init__(
        self, settings: checks.RankSettings, data: DataRef, *, min_workers: int | None = None
    ) -> None:
        self.settings, self._data, self.min_workers = settings, data, min_workers
        #: Not to ``train_epoch``, which is called with the epoch only.
        methods = ("__init__", "setup", "load_data_shard", "evaluate")
        used = ("batch_size",) if data.data.data is not None else ()
        self.kwargs = KwargRules(worker_methods=methods, used=used)
        self._steps_are_ours = self._has_own_evaluate = False
        #: Whether all ranks have a validation step and data for it.
        self.can_validate = False

    @property
    def modules(self) -> Sequence[str]:
        kind = "replicated" if self.settings.shard == "none" else "sharded"
        compiler = ("torch._dynamo.convert_frame",) if self.settings.compile else ()
        return ("tqdm.std", f"miniray.train.ddp.{kind}", *compiler)

    @property
    def is_sharded(self) -> bool:
        return self.settings.shard == "full"

    def prepare(
        self, group: LockstepGroup, settings: RunSettings
    ) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """Load the data, prepare the ranks and compare them."""
        worker, count = group.handles[0], group.count
        methods = worker._info.list_methods()
        if settings.eval_interval:
            checks.check_can_evaluate(worker)
        if "training_step" not in methods and "train_epoch" not in methods:
            raise TypeError(
                f"worker class {worker._info.class_name} has neither "
                "training_step(batch, batch_idx) nor train_epoch(epoch)"
            )
        if self._data.data:
            given = self._data.get()
            group.call_ranks("assign_data", lambda i: (given, i, count), lambda _: settings.kwargs)
        elif "load_data_shard" in methods:
            group.call_ranks("load_data_shard", lambda i: (i, count), lambda _: settings.kwargs)
        rank_settings = dataclasses.replace(self.settings, **settings.facts)
        facts = group.call_ranks("prepare_rank", lambda i: (i, count, rank_settings))
        self._steps_are_ours = facts[0]["steps"]
        self._has_own_evaluate = "evaluate" in facts[0]["own_methods"]
        self.can_validate = all(fact["validates"] and fact["val_loader"] for fact in facts)
        if settings.eval_interval and not self._has_own_evaluate:
            checks.check_val_loader(facts, settings.eval_interval)
        if self.min_workers is not None and self.min_workers < count:
            checks.check_divisible(facts)
        if not self._steps_are_ours:
            checks.check_no_step_options(rank_settings)
        return facts, checks.check_agreement(facts, rank_settings)

    def summarize(self, reports: Sequence[EpochReport]) -> dict[str, Any]:
        results = [report.metrics for report in reports]
        if self._steps_are_ours and not any(result["num_samples"] for result in results):
            raise RuntimeError(
                "no rank's loader gave a batch in this epoch. A generator can be iterated only "
                "once: set self.train_loader to an iterable that starts again with every iter()"
            )
        return aggregate(results)

    def evaluate(
        self, group: LockstepGroup, data: Any, kwargs: Mapping[str, Any], epoch: int | None
    ) -> dict[str, Any]:
        """Evaluate on all ranks.

        Ranks may have different numbers of samples, or none. No collective is called, unless the
        model is sharded: then all ranks take part, also those without samples.
        """
        checks.check_can_evaluate(group.handles[0])
        # The user's own may change anything; ours draws random numbers.
        keep = Keep.ALL if self._has_own_evaluate else Keep.OWN
        attempt = partial(self._evaluate_once, group, data, kwargs, epoch)
        return combine(group.run(attempt, epoch=epoch, keep=keep))

    def _evaluate_once(
        self, group: LockstepGroup, data: Any, kwargs: Mapping[str, Any], epoch: int | None
    ) -> list[tuple[int, Any, Any]]:
        """Return rank, number of samples and scores of each rank that takes part."""
        count = group.count  # may differ after a restart
        rows = [(None, None) if data is None else cut(data, rank, count) for rank in range(count)]
        is_sharded = self.settings.shard == "full"
        ranks = [rank for rank, (_, samples) in enumerate(rows) if samples != 0 or is_sharded]
        is_together = data is None and not self._has_own_evaluate
        scores = group.call_ranks(
            "evaluate_together" if is_together else "evaluate",
            lambda rank: () if data is None else (rows[rank][0],),
            lambda rank: {**kwargs, "shard_id": rank, "num_shards": count},
            epoch,
            ranks=ranks,
            reports_progress=not self._has_own_evaluate,
        )
        return [(rank, rows[rank][1], score) for rank, score in zip(ranks, scores, strict=True)]

    def merge_weights(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def merge_shared(self, parts: Sequence[Any]) -> Any:
        return parts[0]

    def merge_local(self, shared: Any, own: Sequence[Any]) -> tuple[Any, Any]:
        state = {**shared, **merge_shards(own)}
        weights = {**shared.get("weights", {}), **state.pop("weights")}
        return weights, state

    def list_replicas(self, count: int) -> list[list[int]]:
        return [[*range(count)]] if self.settings.shard == "none" else []

    def describe_part(self, rank: int) -> str | None:
        del rank
        return None

    def describe(self) -> dict[str, Any]:
        names = ("shard", "uneven", "accumulate", "precision", "ddp_options")
        return {name: getattr(self.settings, name) for name in names}

    def get_result(self) -> tuple[type[TrainResult], dict[str, Any]]:
        return TrainResult, {}
