"""Base of the trainers whose ranks hold parts of the model.

``lockstep.trainer`` documents what happens when a rank fails. The error also names the part of the
model that the rank held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import miniray
from miniray.checks import check_int
from miniray.tracebacks import hides_frames
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.options import choose_backend
from miniray.train.lockstep.snapshot import Keep
from miniray.train.lockstep.trainer import LockstepTrainer
from miniray.train.parallel import timeline
from miniray.train.parallel.plan.job import SPLIT_HINTS, Job, Layout
from miniray.train.parallel.plan.schedules import SCHEDULES
from miniray.train.parallel.timeline import ParallelResult
from miniray.train.run.result import TrainResult
from miniray.train.workers.evaluate import combine

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from miniray.train.lockstep.loop import EpochReport
    from miniray.train.options import LockstepKwargs


class ModelWorker:
    """The worker class of these trainers: the replica holds the model, so it is empty."""


class SplitModelTrainer(LockstepTrainer):
    """See the module. The arguments are described at ``PipelineParallelTrainer``."""

    _kind = "parallel"
    _kwargs_methods = ()
    _option_hints = _train_hints = SPLIT_HINTS
    _preloaded = (
        *("tqdm.std", "miniray.train.parallel.rank"),
        "torch.distributed.tensor.parallel",
    )

    def __init__(
        self,
        layout: Layout,
        *,
        model: Any = None,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: Callable[[Any], Any] | None = None,
        data: Any = None,
        val_data: Any = None,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        lr_scheduler: Callable[[Any], Any] | None = None,
        schedule: str,
        microbatches: int,
        stages_per_worker: int | None = None,
        layers_per_stage: Sequence[int] | None = None,
        memory_limit: float | None = None,
        plan: Mapping[str, str] | None = None,
        **options: Unpack[LockstepKwargs],
    ) -> None:
        # Not required by the signature: the error for a misspelled name has to come first.
        required = {"model": model, "loss": loss, "optimizer": optimizer, "data": data}
        missing = ", ".join(f"{name}=" for name, value in required.items() if value is None)
        if missing:
            raise TypeError(f"{type(self).__name__}() needs {missing}")
        job = Job(
            **required,
            layout=layout,
            val_data=val_data,
            metrics={} if metrics is None else metrics,
            lr_scheduler=lr_scheduler,
            schedule=schedule,
            microbatches=check_int("microbatches", microbatches, 1),
            stages_per_worker=stages_per_worker,
            layers_per_stage=layers_per_stage,
            memory_limit=memory_limit,
            tensor_plan=plan,
        )
        if options.get("eval_interval") and val_data is None:
            raise ValueError("eval_interval= evaluates on val_data=, which is not given")
        super().__init__(layout.world_size, worker=ModelWorker, **options)
        self.layout = layout
        self.plan: Any = None
        self._job = job
        self._one_machine = True
        self._epoch_record: dict[str, Any] = {}

    # -- an epoch ---------------------------------------------------------------------------------

    def _summarize(self, reports: Sequence[EpochReport]) -> dict[str, Any]:
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
            # One copy and one shard speak for all: the others do the same at the same time.
            row = [results[layout.rank(0, place, 0)] for place in range(layout.pipeline)]
            stages = self.plan.stages
            summary["bubble"] = timeline.measured_bubble(row)
            summary["bubble_formula"] = stages.bubble
            self._epoch_record = {
                "schedule": stages.schedule_name,
                "microbatches": stages.microbatches,
                "bubble": summary["bubble"],
                "bubble_formula": stages.bubble,
                "peak_activation_bytes": [r["peak_activations"] for r in row],
                "workers": self._on_one_clock(row),
            }
            assert self.run is not None
            timeline.save(self.run.path, self._epoch_record)
        return summary

    def _on_one_clock(self, row: list[Mapping[str, Any]]) -> list[Any]:
        """The workers' spans since the first of them began; since each began, on several machines.

        There is one such clock for all processes of a machine, but not for all machines.
        """
        first = min(r["began"] for r in row)
        shifts = [r["began"] - first if self._one_machine else 0.0 for r in row]
        return [
            [(kind, stage, mb, begin + shift, end + shift) for kind, stage, mb, begin, end in spans]
            for shift, spans in zip(shifts, (r["spans"] for r in row), strict=True)
        ]

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The loss and ``metrics`` over ``data`` (default: ``val_data``), every sample once.

        All ranks take part: the model is in all of them.
        """
        group = self._get_ranks()
        if data is None and self._job.val_data is None:
            raise TypeError("there is nothing to evaluate on: pass data=, or val_data= before")
        epoch = self._epoch_for_errors()
        given = miniray.put(data) if data is not None else None
        attempt = partial(
            group.call_ranks, "evaluate", lambda _: (given,), epoch=epoch, reports_progress=True
        )
        results = group.run(attempt, epoch=epoch, keep=Keep.OWN)
        mine = [
            (rank, None, sums)
            for rank, sums in enumerate(results)
            if not self.layout.place(rank).tensor and len(sums) > 1
        ]
        return combine(mine)

    def _describe_part(self, rank: int) -> str | None:
        """``stage 1 (layers 3-5)``: what part of the model is lost with a rank."""
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

    # -- workers ----------------------------------------------------------------------------------

    def _prepare_ranks(self, group: LockstepGroup) -> tuple[Sequence[Mapping[str, Any]], Any]:
        """Open the loaders and let rank 0 plan."""
        sizes = self._sizes_before() or self._job.layers_per_stage
        job = dataclasses.replace(self._job, layers_per_stage=sizes, **self._run_facts())
        facts = group.call_ranks("prepare_rank", lambda i: (i, self.num_workers, job))
        self.plan = facts[0]["plan"]
        self._show_plan()
        self._one_machine = len({fact["host"] for fact in facts}) == 1
        if self.layout.tensor > 1 and facts[0]["gpu"] is not None:
            _check_gpus(choose_backend(self._group_backend, facts))
        return facts, miniray.put(self.plan)

    def _sizes_before(self) -> list[int] | None:
        """The stages as they were cut before a restart or in the run that is resumed, if they fit.

        Times differ a little whenever they are measured, and random numbers belong to a rank: cut
        otherwise, a model with dropout would not go on with the same bits.
        """
        if self._job.layers_per_stage is not None or self.layout.pipeline == 1:
            return None
        if self.plan is not None:
            return list(self.plan.stages.sizes)
        before = (self._loaded or {}).get("parallel", {}).get("stages")
        per_worker = self._job.stages_per_worker or SCHEDULES[self._job.schedule].default
        here = {"places": self.layout.pipeline, "per_worker": per_worker}
        if before is None or any(before[key] != value for key, value in here.items()):
            return None
        return list(before["sizes"])

    def _show_plan(self) -> None:
        assert self.run is not None
        text = "\n\n".join(self.plan.tables())
        if text:
            (self.run.path / "plan.txt").write_text(text + "\n", "utf-8")
            if self.options.progress and not self.failures:
                print(text, flush=True)

    # -- state ------------------------------------------------------------------------------------

    def _merge_weights(self, parts: Sequence[Any]) -> Any:
        """Return a ``state_dict`` of the model, in the order of its stages."""
        by_stage: dict[int, Mapping[str, Any]] = {}
        for part in parts:
            by_stage.update(part)
        return {name: value for _, part in sorted(by_stage.items()) for name, value in part.items()}

    def _merge_shared(self, parts: Sequence[Any]) -> dict[str, Any]:
        found = [part for part in parts if part is not None]
        numbers: dict[str, Any] = {}
        for part in found:
            numbers.update(part["optimizer"]["state"])
        optimizer = {"groups": found[0]["optimizer"]["groups"], "state": numbers}
        stages = None if self.plan.stages is None else self.plan.stages.state()
        return {**found[0], "optimizer": optimizer, "stages": stages}

    def _describe(self) -> dict[str, Any]:
        layout = self.layout
        return {
            **super()._describe(),
            "parallel": layout.sizes,
            "schedule": self._job.schedule if layout.pipeline > 1 else None,
            "microbatches": self._job.microbatches,
            "clip_norm": self.clip_norm,
        }

    def _make_result(self, wall_time: float, *_: Any, **__: Any) -> TrainResult:
        return super()._make_result(
            wall_time,
            ParallelResult,
            plan="\n\n".join(self.plan.tables()),
            peak_activation_bytes=self._epoch_record.get("peak_activation_bytes", ()),
        )


def _check_gpus(backend: str) -> None:
    if backend == "gloo":
        raise ValueError(
            "workers that share a GPU, or talk over gloo, cannot cut layers that are on it: "
            "torch's sharded tensors need NCCL there. Give each worker a GPU of its own "
            '(resources_per_worker={"num_gpus": 1}) or none at all, or deal out whole layers '
            '(split="layers", or a pipeline)'
        )
