"""Model parallelism: each rank holds some stages of the model, or shards of its layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import miniray
from miniray.checks import check_int
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.options import choose_backend
from miniray.train.lockstep.parallelism import RunSettings
from miniray.train.lockstep.snapshots.state import Keep
from miniray.train.parallel import timeline
from miniray.train.parallel.plan.job import SPLIT_HINTS, Job, Layout
from miniray.train.parallel.plan.schedules import SCHEDULES
from miniray.train.parallel.timeline import ParallelResult
from miniray.train.run.result import TrainResult
from miniray.train.run.tensors.shards import merge_shards
from miniray.train.train_kwargs import KwargRules
from miniray.train.workers.evaluate import combine

if TYPE_CHECKING:
    from miniray.train.lockstep.replica import EpochReport


class ModelWorker:
    """The worker class of these trainers: the replica holds the model, so it is empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The parts of a training as options of a trainer; see ``PipelineParallelTrainer``."""

    model: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None
    data: Any = None
    val_data: Any = None
    batch_size: int | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    scheduler: Callable[[Any], Any] | None = None
    layers_per_stage: Sequence[int] | None = None
    memory_limit: float | None = None


class ModelSplit:
    """The ``Parallelism`` of ``PipelineParallelTrainer`` and ``ModelParallelTrainer``."""

    kind = "parallel"
    kwargs = KwargRules(worker_methods=(), used=("batch_size",), hints=SPLIT_HINTS)
    min_workers = None
    modules = ("tqdm.std", "miniray.train.parallel.rank", "torch.distributed.tensor.parallel")

    def __init__(self, job: Job) -> None:
        self.job, self.layout = job, job.layout
        self.plan: Any = None
        self._run_dir = Path()
        self._one_machine = True
        self._epoch_record: dict[str, Any] = {}

    @property
    def can_validate(self) -> bool:
        return self.job.val_data is not None

    def summarize(self, reports: Sequence[EpochReport]) -> dict[str, Any]:
        layout = self.layout
        told = [r.metrics for i, r in enumerate(reports) if not layout.place(i).tensor]
        results = [report.details for report in reports]
        weighted = [
            (rank, means["num_samples"], means)
            for rank, means in enumerate(told)
            if "loss" in means
        ]
        summary = combine(weighted)
        peaks = [r["peak_activations"] for r in results]
        summary["peak_activation_bytes"] = max(peaks)
        if layout.pipeline > 1:
            # One replica and one shard: the others do the same at the same time.
            row = [results[layout.rank(0, place, 0)] for place in range(layout.pipeline)]
            stages = self.plan.stages
            summary["bubble"] = timeline.measure_bubble(row)
            summary["bubble_formula"] = stages.bubble
            self._epoch_record = {
                "schedule": stages.schedule_name,
                "microbatches": stages.microbatches,
                "bubble": summary["bubble"],
                "bubble_formula": stages.bubble,
                "peak_activation_bytes": [r["peak_activations"] for r in row],
                "workers": self._on_one_clock(row),
            }
            timeline.save(self._run_dir, self._epoch_record)
        return summary

    def _on_one_clock(self, row: list[Mapping[str, Any]]) -> list[Any]:
        """Return the workers' spans since the first one began, or since each began on its machine.

        The processes of a machine share this clock. Different machines don't.
        """
        first = min(r["began"] for r in row)
        shifts = [r["began"] - first if self._one_machine else 0.0 for r in row]
        return [
            [(kind, stage, mb, begin + shift, end + shift) for kind, stage, mb, begin, end in spans]
            for shift, spans in zip(shifts, (r["spans"] for r in row), strict=True)
        ]

    def evaluate(
        self, group: LockstepGroup, data: Any, kwargs: Mapping[str, Any], epoch: int | None
    ) -> dict[str, Any]:
        """Return the loss and ``metrics`` over ``data``, by default ``val_data``.

        All ranks take part: each holds a part of the model.
        """
        del kwargs
        if data is None and self.job.val_data is None:
            raise TypeError("evaluate() needs data: pass data=, or val_data= to the trainer")
        method: str = "evaluate_together"
        arguments: tuple[Any, ...] = ()
        if data is not None:
            method, arguments = "evaluate", (miniray.put(data),)
        attempt = partial(
            group.call_ranks, method, lambda _: arguments, epoch=epoch, reports_progress=True
        )
        results = group.run(attempt, epoch=epoch, keep=Keep.OWN)
        mine = [
            (rank, None, sums)
            for rank, sums in enumerate(results)
            if not self.layout.place(rank).tensor and len(sums) > 1
        ]
        return combine(mine)

    def list_replicas(self, count: int) -> list[list[int]]:
        by_part: dict[tuple[int, int], list[int]] = {}
        for rank in range(count):
            _, stage, shard = self.layout.place(rank)
            by_part.setdefault((stage, shard), []).append(rank)
        return [*by_part.values()]

    def describe_part(self, rank: int) -> str | None:
        """Return the part of a rank, such as ``stage 1 (layers 3-5)``."""
        if self.plan is None:
            return None
        place = self.layout.place(rank)
        words = []
        if self.layout.pipeline > 1:
            stages = self.plan.stages
            words += [f"stage {s} ({stages.layers_of(s)})" for s in stages.mine(place.pipeline)]
        if self.layout.tensor > 1:
            words.append(f"shard {place.tensor} of {self.layout.tensor}")
        if self.layout.data > 1:
            words.append(f"copy {place.data} of the model")
        return ", ".join(words) or "the model"

    @property
    def is_sharded(self) -> bool:
        return True

    def prepare(
        self, group: LockstepGroup, settings: RunSettings
    ) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """Open the loaders and let rank 0 plan."""
        sizes = self._find_sizes(settings.loaded) or self.job.layers_per_stage
        job = dataclasses.replace(self.job, layers_per_stage=sizes, **settings.facts)
        job = job.store_data(settings.kwargs.get("batch_size"))
        facts = group.call_ranks("prepare_rank", lambda i: (i, group.count, job))
        self.plan = facts[0]["plan"]
        self._run_dir = group.run_dir
        self._write_plan(prints=group.shows_progress and not group.budget.failures)
        self._one_machine = len({fact["host"] for fact in facts}) == 1
        if self.layout.tensor > 1 and facts[0]["gpu"] is not None:
            _check_gpus(choose_backend(group.backend, facts))
        return facts, miniray.put(self.plan)

    def _find_sizes(self, loaded: Mapping[str, Any] | None) -> list[int] | None:
        """Return the sizes of stages before a restart, or in the run that is resumed, if they fit.

        Measured times vary, and random numbers belong to a rank: with different stages, a model
        with dropout would not continue with the same bits.
        """
        if self.job.layers_per_stage is not None or self.layout.pipeline == 1:
            return None
        if self.plan is not None:
            return list(self.plan.stages.sizes)
        before = (loaded or {}).get("stages")
        per_worker = self.job.stages_per_worker or SCHEDULES[self.job.schedule].default
        here = {"places": self.layout.pipeline, "per_worker": per_worker}
        if before is None or any(before[key] != value for key, value in here.items()):
            return None
        return list(before["sizes"])

    def _write_plan(self, prints: bool) -> None:
        text = "\n\n".join(self.plan.tables())
        if text:
            (self._run_dir / "plan.txt").write_text(text + "\n", "utf-8")
            if prints:
                print(text, flush=True)

    def merge_weights(self, parts: Sequence[Any]) -> Any:
        """Return a ``state_dict`` of the model, in the order of its stages."""
        by_stage: dict[int, Mapping[str, Any]] = {}
        for part in parts:
            by_stage.update(part)
        return {name: value for _, part in sorted(by_stage.items()) for name, value in part.items()}

    def merge_shared(self, parts: Sequence[Any]) -> dict[str, Any]:
        found = [part for part in parts if part is not None]
        numbers: dict[str, Any] = {}
        for part in found:
            numbers.update(part["optimizer"]["state"])
        optimizer = {"groups": found[0]["optimizer"]["groups"], "state": numbers}
        stages = None if self.plan.stages is None else self.plan.stages.state()
        return {**found[0], "optimizer": optimizer, "stages": stages}

    def merge_local(self, shared: Any, own: Sequence[Any]) -> tuple[Any, Any]:
        del shared
        state = merge_shards(own)
        weights = self.merge_weights([state.pop("weights")])
        del state["buffers"]
        return weights, self.merge_shared([state])

    def describe(self) -> dict[str, Any]:
        return {
            "parallel": self.layout.sizes,
            "schedule": self.job.schedule if self.layout.pipeline > 1 else None,
            "microbatches": self.job.microbatches,
        }

    def get_result(self) -> tuple[type[TrainResult], dict[str, Any]]:
        peaks = self._epoch_record.get("peak_activation_bytes", ())
        plan = "\n\n".join(self.plan.tables())
        return ParallelResult, {"plan": plan, "peak_activation_bytes": peaks}


def create_split(
    trainer: str,
    layout: Layout,
    options: Mapping[str, Any],
    *,
    schedule: str,
    microbatches: int,
    stages_per_worker: int | None = None,
    plan: Mapping[str, str] | None = None,
) -> tuple[ModelSplit, dict[str, Any]]:
    """Return the split that ``options`` describe, and the options that aren't ``ModelParts``."""
    names = {field.name for field in dataclasses.fields(ModelParts)}
    if options.get("batch_size") is not None:
        check_int("batch_size", options["batch_size"], 1)
    parts = ModelParts(**{name: value for name, value in options.items() if name in names})
    # Not required by the signature: the error for a misspelled name has to come first.
    required = ("model", "loss", "optimizer", "data")
    missing = ", ".join(f"{name}=" for name in required if getattr(parts, name) is None)
    if missing:
        raise TypeError(f"{trainer}() needs {missing}")
    if options.get("eval_interval") and parts.val_data is None:
        raise ValueError("eval_interval= requires val_data=")
    given: dict[str, Any] = {name: getattr(parts, name) for name in names}
    job = Job(
        **{**given, "metrics": {} if parts.metrics is None else parts.metrics},
        layout=layout,
        schedule=schedule,
        microbatches=check_int("microbatches", microbatches, 1),
        stages_per_worker=stages_per_worker,
        tensor_plan=plan,
    )
    return ModelSplit(job), {name: v for name, v in options.items() if name not in names}


def _check_gpus(backend: str) -> None:
    if backend == "gloo":
        raise ValueError(
            "workers that share a GPU, or communicate with gloo, can't shard layers on GPUs: "
            "torch's sharded tensors need NCCL there. Give each worker a separate GPU "
            '(resources_per_worker={"num_gpus": 1}) or none, or assign whole layers '
            '(split="layers", or a pipeline)'
        )
