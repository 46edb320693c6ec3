"""What the trainers of split models have in common.

They are DDP trainers whose ranks differ. How ranks are called, watched, ended at the first failure
and started again is the same, and so is what that costs: without a restart the run ends with one
error, the cause's, which names the rank and what part of the model it held; with ``max_failures`` a
rank that died or hung costs the epoch it was in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import miniray
from miniray.core import session, startup
from miniray.errors import ActorDiedError, TaskError, WorkerTimeoutError
from miniray.train import ddp_setup
from miniray.train.base import BaseTrainer
from miniray.train.ddp import DDPTrainer
from miniray.train.ddp_watch import Watch
from miniray.train.evaluate import combine
from miniray.train.group import GroupHost
from miniray.train.parallel import timeline
from miniray.train.parallel.layout import Layout
from miniray.train.parallel.result import ParallelResult
from miniray.train.parallel.worker import ModelWorker

#: Seconds to import: torch's sharded tensors and schedules.
_PRELOADED = "miniray.train.parallel.rank torch.distributed.tensor.parallel"
_OPTIONS = (
    *("name", "run_dir", "seed", "resume", "worker_timeout", "progress", "callbacks"),
    *("resources_per_worker", "backend", "eval_interval", "keep_last", "keep_best"),
)


class SplitModelTrainer(DDPTrainer):
    """See the module. ``job`` holds what the ranks are told besides layout, seed and directory."""

    def __init__(
        self,
        layout: Layout,
        *,
        job: Mapping[str, Any],
        clip_norm: float | None,
        on_nonfinite: str,
        group_backend: str,
        hang_timeout: float,
        timeout: float,
        max_failures: int,
        options: Mapping[str, Any],
    ) -> None:
        unknown = [name for name in options if name not in _OPTIONS]
        if unknown:
            raise TypeError(f"{type(self).__name__}() does not know {', '.join(unknown)}")
        _check_callables(job)
        super().__init__(
            layout.world_size,
            worker=ModelWorker,
            clip_norm=clip_norm,
            on_nonfinite=on_nonfinite,
            group_backend=group_backend,
            hang_timeout=hang_timeout,
            timeout=timeout,
            max_failures=max_failures,
            **options,
        )
        self.layout = layout
        self.plan: Any = None
        self._parts = dict(job)
        self._one_machine = True
        self._epoch_record: dict[str, Any] = {}

    # -- an epoch ---------------------------------------------------------------------------------

    def train_epoch(self, epoch: int, **kwargs: Any) -> dict[str, Any]:
        """Train an epoch on all ranks together."""
        before = self.failures
        results = self._retried(
            epoch, lambda: self._call_ranks("_epoch", lambda _: (epoch,), epoch, watched=True)
        )
        result = self._summary(results)
        if self.failures > before:
            result["restarts"] = self.failures - before
        self._keep_state()
        return result

    def _summary(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        from miniray.train.parallel.rank import measured_bubble

        layout = self.layout
        told = [r["means"] for i, r in enumerate(results) if not layout.place(i).tensor]
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
            summary["bubble"] = measured_bubble(row)
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

    def _on_one_clock(self, row: list[dict[str, Any]]) -> list[Any]:
        """The workers' spans since the first of them began; since each began, on several machines.

        There is one such clock for all processes of a machine, but not for all machines.
        """
        first = min(r["began"] for r in row)
        shifts = [r["began"] - first if self._one_machine else 0.0 for r in row]
        return [
            [(kind, stage, mb, begin + shift, end + shift) for kind, stage, mb, begin, end in spans]
            for shift, spans in zip(shifts, (r["spans"] for r in row), strict=True)
        ]

    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """The loss and ``metrics`` over ``data`` (default: ``val_data``), every sample once.

        All ranks take part: the model is in all of them.
        """
        if self._group is None:
            raise RuntimeError("there are no workers before train()")
        if data is None and self._parts["val_data"] is None:
            raise TypeError("there is nothing to evaluate on: pass data=, or val_data= before")
        epoch = self.epoch if self.history or self.epoch else None
        given = miniray.put(data) if data is not None else None

        def attempt() -> list[Any]:
            return self._call_ranks("evaluate", lambda _: (given,), epoch, watched=True)

        results = self._retried(epoch, attempt)
        mine = [
            (rank, None, sums)
            for rank, sums in enumerate(results)
            if not self.layout.place(rank).tensor and len(sums) > 1
        ]
        return combine(mine)

    def _call_ranks(
        self,
        method: str,
        arguments: Callable[[int], tuple[Any, ...]],
        epoch: int | None = None,
        **options: Any,
    ) -> list[Any]:
        try:
            return super()._call_ranks(method, arguments, epoch, **options)
        except (ActorDiedError, WorkerTimeoutError) as error:
            rank = getattr(error, "rank", None)
            if rank is None or self.plan is None or isinstance(error, TaskError):
                raise
            told = type(error)(f"{self._held_by(rank)}: {error}")
            vars(told).update(vars(error))
            raise told from None

    def _held_by(self, rank: int) -> str:
        """``stage 1 (layers 3-5)``: what part of the model is lost with a rank."""
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

    def _create(self, worker_id: int) -> Any:
        return BaseTrainer._create(self, worker_id)  # not as DDP does: there is no class to adapt

    def create_worker(self, worker_id: int, **kwargs: Any) -> Any:
        """One worker; what all of them need of torch is loaded once, where the engine can."""
        env = dict(startup.environment() or {})
        env[startup.PRELOAD] = f"{env.get(startup.PRELOAD, '')} {_PRELOADED}"
        with startup.actors_with(env=env):
            return super().create_worker(worker_id, **kwargs)

    def _set_up_all(self) -> None:
        """Rank 0 plans and refuses; then the group: in this order nobody can hang."""
        self._broken = False
        job = self._job()
        facts = self._call_ranks("_prepare", lambda _: (job,))
        self.plan = facts[0]["plan"]
        self._show_plan()
        hosts = {fact["host"] for fact in facts}
        self._one_machine = len(hosts) == 1
        self._host = GroupHost(
            self.num_workers,
            backend=ddp_setup.choose_backend(self._group_backend, facts),
            name="parallel",
            timeout=self._timeout,
            other_machines=len(hosts) > 1 or session.engine().capabilities.multi_node,
        )
        spec, plan = self._host.spec, miniray.put(self.plan)
        assert self.run is not None
        self._watch = Watch(self._host, self._hang_timeout, self.run.path)
        joined = self._call_ranks("_join", lambda _: (spec, plan, self._one_machine))
        self._steps = joined[0]
        if self._kept is not None:
            self._apply(self._kept)
        elif self._loaded is None:
            self._keep_state()

    def _job(self) -> Any:
        from miniray.train.parallel.job import Job

        assert self.run is not None
        parts = dict(self._parts)
        sizes = self._sizes_before()
        if sizes is not None:
            parts["layers_per_stage"] = sizes
        return Job(
            **parts,
            layout=self.layout,
            seed=self._shuffle_seed if self._seed is None else self._seed,  # type: ignore[arg-type]
            clip_norm=self.clip_norm,
            on_nonfinite=self._on_nonfinite,
            run_dir=str(self.run.path.absolute()),
            attempt=self.failures,
            own_process=session.engine().capabilities.processes,
        )

    def _sizes_before(self) -> list[int] | None:
        """The stages as they were cut before a restart or in the run that is resumed, if they fit.

        Times differ a little whenever they are measured, and random numbers belong to a rank: cut
        otherwise, a model with dropout would not go on with the same bits.
        """
        if self._parts["layers_per_stage"] is not None or self.layout.pipeline == 1:
            return None
        if self.plan is not None:
            return list(self.plan.stages.sizes)
        before = (self._loaded or {}).get("extra", {}).get("parallel", {}).get("stages")
        per_worker = self._parts["stages_per_worker"] or self._schedule().default
        here = {"places": self.layout.pipeline, "per_worker": per_worker}
        if before is None or any(before[key] != value for key, value in here.items()):
            return None
        return list(before["sizes"])

    def _schedule(self) -> Any:
        from miniray.train.parallel.schedules import SCHEDULES

        return SCHEDULES[self._parts["schedule"]]

    def _show_plan(self) -> None:
        assert self.run is not None
        text = "\n\n".join(self.plan.tables())
        if text:
            (self.run.path / "plan.txt").write_text(text + "\n", "utf-8")
            if self._progress and not self.failures:
                print(text, flush=True)

    # -- state ------------------------------------------------------------------------------------

    def model_weights(self) -> Any:
        """The weights of the whole model in one piece, by the names of its ``state_dict``."""
        from miniray.train.parallel.state import merged_weights

        return merged_weights(self._call_ranks("get_weights", lambda _: ()))

    def _shared(self) -> dict[str, Any]:
        from miniray.train.parallel.plan import state_of
        from miniray.train.parallel.state import merged_optimizer

        parts = [p for p in self._call_ranks("_shared_state", lambda _: ()) if p is not None]
        optimizer = merged_optimizer([part["optimizer"] for part in parts])
        stages = None if self.plan.stages is None else state_of(self.plan.stages)
        return {**parts[0], "optimizer": optimizer, "stages": stages}

    def _extra_state(self) -> dict[str, Any]:
        return {"parallel": self._shared()}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        shared = miniray.put(state["parallel"])
        self._call_ranks("_load_shared", lambda _: (shared,))
        self._keep_state()

    def _keep_state(self) -> None:
        """Fetch what a restart of the ranks would need, if there may be one."""
        if self._most_failures <= self.failures:
            self._kept = None
            return
        self._kept = {
            "weights": self.model_weights(),
            "shared": self._shared(),
            "own": self._call_ranks("get_state", lambda _: ()),
        }

    def _apply(self, kept: Mapping[str, Any]) -> None:
        weights, shared = miniray.put(kept["weights"]), miniray.put(kept["shared"])
        self._call_ranks("set_weights", lambda _: (weights,))
        self._call_ranks("_load_shared", lambda _: (shared,))
        self._call_ranks("set_state", lambda rank: (kept["own"][rank],))

    def _describe(self) -> dict[str, Any]:
        layout = self.layout
        return {
            **BaseTrainer._describe(self),
            "parallel": {
                "data": layout.data,
                "pipeline": layout.pipeline,
                "tensor": layout.tensor,
            },
            "schedule": self._parts["schedule"] if layout.pipeline > 1 else None,
            "microbatches": self._parts["microbatches"],
            "clip_norm": self.clip_norm,
        }

    def _make_result(self, wall_time: float) -> ParallelResult:
        assert self.run is not None
        newest = self.checkpoints.newest() if self.checkpoints is not None else None
        return ParallelResult(
            history=list(self.history),
            epochs=self.epoch,
            wall_time=wall_time,
            run_dir=self.run.path,
            checkpoint=newest,
            plan="\n\n".join(self.plan.tables()),
            peak_activation_bytes=self._epoch_record.get("peak_activation_bytes", ()),
        )


def _check_callables(job: Mapping[str, Any]) -> None:
    for name in ("loss", "optimizer"):
        if not callable(job[name]):
            raise TypeError(f"{name}= must be a function, not {job[name]!r:.80}")
    for name, function in job["metrics"].items():
        if not callable(function):
            raise TypeError(f"metrics[{name!r}] must be a function, not {function!r:.80}")
    model = job["model"]
    if isinstance(model, (str, bytes, Path)) or not (
        callable(model) or isinstance(model, Sequence)
    ):
        raise TypeError(
            f"model= must be a module, a list of layers, or a function, not {model!r:.80}"
        )
    microbatches = job["microbatches"]
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ValueError(f"microbatches must be an int >= 1, not {microbatches!r}")
