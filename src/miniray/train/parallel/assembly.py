"""Build a rank's part of the model, and convert its state from and to that of the full model.

All ranks build their parts at the same time according to the plan of rank 0. The parts depend only
on the job, the plan and the place of the rank, because any other difference could cause a hang.

Weights and optimizer states are saved with the names and shapes of the full model. Checkpoints
therefore don't depend on the layout: they can be loaded with any layout, on one worker, or into the
original model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from miniray.train.lockstep.health.status import is_consequence
from miniray.train.lockstep.loop import check_scheduler
from miniray.train.lockstep.mesh import (
    gather_full,
    gather_optimizer_values,
    get_local_optimizer,
    load_local_optimizer,
    load_tensors,
    load_weights,
    shard_optimizer_values,
)
from miniray.train.parallel.plan.job import Job, Place
from miniray.train.parallel.plan.layers import read_layers, whole_model
from miniray.train.parallel.plan.planning import Plan
from miniray.train.parallel.plan.tensor_plan import apply_plan, check_same
from miniray.train.parallel.stages import PipelineRunner, StepRecord, TracedRunner, WholeRunner
from miniray.train.workers.data.batches import move_batch

#: Settings of an optimizer that depend on the layout, not on the run.
_OF_THE_LAYOUT = ("foreach", "fused")


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of the model on one rank, with its runner and optimizer."""

    runner: Any
    parameters: list[Any]
    optimizer: Any
    scheduler: Any = None

    @property
    def modules(self) -> dict[int, Any]:
        """Modules by stage."""
        found: dict[int, Any] = self.runner.modules
        return found

    def train(self, mode: bool = True) -> None:
        for module in self.modules.values():
            module.train(mode)

    def weights(self) -> dict[int, dict[str, Any]]:
        """Return ``{stage: {name: full weight}}``. A collective if layers are sharded."""
        return {
            stage: {name: gather_full(value) for name, value in module.state_dict().items()}
            for stage, module in self.modules.items()
        }

    def load_weights(self, weights: Mapping[str, Any]) -> None:
        """Load this part of the full model's weights.

        Raises:
            ValueError: A weight is missing or has a different shape.
        """
        for module in self.modules.values():
            load_weights(module.state_dict(), weights)

    def optimizer_state(self) -> dict[str, Any]:
        """Return ``{"groups": settings, "state": {name: full values}}``. See ``weights``."""
        names = self.names()
        numbers = self.optimizer.state.items()
        return {
            "groups": self._get_groups(),
            "state": {names[p]: gather_optimizer_values(v) for p, v in numbers},
        }

    def load_optimizer(self, saved: Mapping[str, Any]) -> None:
        """Load this part of the state that ``optimizer_state`` of all parts returned."""
        mine = self.optimizer.param_groups
        if len(saved["groups"]) != len(mine):
            raise ValueError(
                f"the state has {len(saved['groups'])} parameter groups, but this optimizer has "
                f"{len(mine)}"
            )
        for group, settings in zip(mine, saved["groups"], strict=True):
            group.update({k: v for k, v in settings.items() if k not in _OF_THE_LAYOUT})
        for parameter, name in self.names().items():
            values = saved["state"].get(name)
            if values is not None:
                # Copy the saved values, because optimizers change them in place.
                self.optimizer.state[parameter] = copy.deepcopy(
                    shard_optimizer_values(parameter, values)
                )

    def get_local(self, take: Callable[[Any], Any]) -> dict[str, Any]:
        """Return this rank's parts of weights, buffers and the optimizer. Not a collective."""
        weights = {
            stage: {name: take(value) for name, value in module.state_dict().items()}
            for stage, module in self.modules.items()
        }
        saved, names = get_local_optimizer(self.optimizer, take), self._list_names()
        return {
            "weights": weights,
            "buffers": dict(self._iter_buffers()),
            "optimizer": {
                "groups": self._get_groups(),
                "state": {names[i]: values for i, values in saved["state"].items()},
            },
        }

    def load_local(self, saved: Mapping[str, Any]) -> None:
        """Restore ``get_local`` of the same rank in the same layout."""
        for stage, module in self.modules.items():
            load_tensors(module.state_dict().items(), saved["weights"][stage])
        load_tensors(self._iter_buffers(), saved["buffers"])
        optimizer = saved["optimizer"]
        numbers = {
            i: optimizer["state"][name]
            for i, name in self._list_names().items()
            if name in optimizer["state"]
        }
        groups = [
            {**settings, "params": group["params"]}
            for settings, group in zip(
                optimizer["groups"], self.optimizer.state_dict()["param_groups"], strict=True
            )
        ]
        load_local_optimizer(self.optimizer, {"state": numbers, "param_groups": groups})

    def _iter_buffers(self) -> Iterator[tuple[str, Any]]:
        for stage, module in self.modules.items():
            for name, buffer in module.named_buffers():
                yield f"{stage}.{name}", buffer

    def _get_groups(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def _list_names(self) -> dict[int, str]:
        """Return the names of the parameters by their number in the optimizer's state."""
        names = self.names()
        owned = [p for group in self.optimizer.param_groups for p in group["params"]]
        return {i: names[p] for i, p in enumerate(owned) if p in names}

    def names(self) -> dict[Any, str]:
        """Return the name of each parameter in the whole model."""
        return {p: name for m in self.modules.values() for name, p in m.named_parameters()}


def assemble(
    job: Job, plan: Plan, place: Place, mesh: Any, device: Any, record: StepRecord
) -> Part:
    """Build this rank's part of the model. A collective."""
    runner = _make_runner(job, plan, place, mesh, device, record)
    if plan.tensor is not None:
        _split_tensors(runner, plan, mesh, device)
    modules = runner.modules.values()
    parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
    optimizer = _make_optimizer(job, plan, parameters, device)
    scheduler = None if job.scheduler is None else job.scheduler(optimizer)
    check_scheduler(scheduler, "scheduler=")
    # Shards of a layer draw the same random numbers, so that replicated weights stay equal.
    torch.manual_seed(job.seed + 7919 * (place.data * job.layout.pipeline + place.pipeline))
    return Part(runner, parameters, optimizer, scheduler)


def _make_runner(
    job: Job, plan: Plan, place: Place, mesh: Any, device: Any, record: StepRecord
) -> Any:
    layout = job.layout
    if layout.pipeline == 1:
        model = whole_model(job.model, job.seed).to(device)
        return WholeRunner(model, job.microbatches, job.loss, record)
    layers = read_layers(job.model, job.seed)
    modules = layers.stages(plan.stages.bounds, plan.stages.mine(place.pipeline), plan.sample)
    for module in modules.values():
        module.to(device)
    ranks = [
        layout.rank(place.data, plan.stages.holder(stage), place.tensor)
        for stage in range(len(plan.stages.sizes))
    ]
    kind = TracedRunner if layers.traced else PipelineRunner
    pipeline = mesh.get_group("pipeline")
    runner = kind(modules, plan.stages, ranks, pipeline, job.loss, device, record)
    if isinstance(runner, TracedRunner):
        # Pass a function: keeping these layers would keep the full model in memory.
        runner.trace_with(lambda: read_layers(job.model, job.seed), plan.sample)
    return runner


def _split_tensors(runner: Any, plan: Plan, mesh: Any, device: Any) -> None:
    """Shard the weights, and check that the output of the model is unchanged."""
    inputs = move_batch(plan.sample, device)
    kept = torch.get_rng_state()
    for module in runner.modules.values():
        module.eval()
    with torch.no_grad():
        before = runner.forward(inputs, len(inputs[0]))
        for module in runner.modules.values():
            names = {name for name, _ in module.named_modules()}
            apply_plan(module, plan.tensor.within(names), mesh["tensor"])
        try:
            after = runner.forward(inputs, len(inputs[0]))
        except (RuntimeError, ValueError) as error:
            if is_consequence(error):
                raise
            raise ValueError(
                f"the plan doesn't fit the model, because its forward pass fails ({error})\n"
                f"{plan.tensor.table()}"
            ) from error
    if before is not None:
        check_same(before, after, plan.tensor)
    torch.set_rng_state(kept)


def _make_optimizer(job: Job, plan: Plan, parameters: list[Any], device: Any) -> Any:
    # torch's optimizers need at least one parameter, but a stage may have none.
    nothing = torch.nn.Parameter(torch.empty(0, device=device))
    optimizer = job.optimizer(parameters or [nothing])
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "optimizer= must be a function of a list of parameters that returns a torch "
            f"optimizer, not a {type(optimizer).__name__}"
        )
    if plan.tensor is not None:
        for options in optimizer.param_groups:
            # foreach implementations don't support lists with sharded and regular tensors.
            options["foreach"] = False
    return optimizer
