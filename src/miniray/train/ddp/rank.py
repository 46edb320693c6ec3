"""One rank of a DDP run: everything that happens in the worker's process.

A rank goes through ``describe`` (the driver compares what all ranks say, before they can wait for
one another), ``join``, one ``epoch`` after the other, ``leave``; see ``ranks.member``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from miniray.train import group
from miniray.train import torch_parts as parts
from miniray.train.ddp import model as models
from miniray.train.ddp import state
from miniray.train.ddp.loop import NOT_CALLED, StepLoop, StepOptions, scheduler_interval
from miniray.train.ranks import data
from miniray.train.ranks.member import Member, RunFacts
from miniray.train.ranks.plan import Window, counted_windows
from miniray.train.ranks.pulse import EVALUATION


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankSettings(RunFacts):
    """What the driver tells every rank; see ``DDPTrainer``."""

    steps: StepOptions
    models: tuple[str, ...] = ("model",)
    shard: str = "none"
    uneven: str = "join"
    compile: Any = False
    ddp_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Rank(Member):
    """The rank that ``worker``, the user's object, is. See the module."""

    is_sharded = False

    def __init__(self, worker: Any, rank: int, world_size: int, settings: RankSettings) -> None:
        super().__init__(rank, world_size, settings)
        self.worker, self.settings = worker, settings
        self.has_steps: bool = worker._ddp_steps
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not hasattr(worker, name):
                setattr(worker, name, value)
        self.modules = {name: self._module(name) for name in settings.models}
        self.device = self._place_models()
        self.plan: Any = None
        self.loop: StepLoop | None = None
        self._windows: list[Window] | None = None
        self._step_counts: dict[str, int] = {}
        if self.has_steps:
            self._take_loader()

    # -- before the ranks meet --------------------------------------------------------------------

    def _module(self, name: str) -> Any:
        module = getattr(self.worker, name, None)
        if isinstance(module, torch.nn.Module) and any(
            p.requires_grad for p in module.parameters()
        ):
            return module
        found = [k for k, v in vars(self.worker).items() if isinstance(v, torch.nn.Module)]
        there = f"it has: {', '.join(found)}" if found else "it has no torch module at all"
        raise TypeError(
            f"{type(self.worker).__name__}.{name} must be a torch.nn.Module with parameters to "
            f"train, made in __init__ or load_data_shard ({there}); "
            'DDPTrainer(models=("generator", "discriminator")) takes others'
        )

    def _place_models(self) -> Any:
        """The device; workers with an epoch loop of their own have chosen one already."""
        if not self.has_steps:
            return next(next(iter(self.modules.values())).parameters()).device
        device = torch.device(self.worker.device)
        for module in self.modules.values():
            module.to(device)
        return device

    def _take_loader(self) -> None:
        worker, settings = self.worker, self.settings
        for needed in ("train_loader", "optimizer"):
            if getattr(worker, needed, None) is None:
                raise TypeError(
                    f"{type(worker).__name__} has training_step() but no self.{needed}; make it in "
                    "__init__ (or in load_data_shard)"
                )
        self._check_optimizer()
        scheduler_interval(worker)
        data.check_loader(worker.train_loader, "self.train_loader")
        worker.train_loader, self.plan = data.own_share(
            worker.train_loader,
            self.rank,
            self.world_size,
            accumulate=settings.steps.accumulate,
            uneven=settings.uneven,
            seed=settings.seed,
            sharded=worker._ddp_sharded,
        )
        if getattr(worker, "val_loader", None) is not None:
            data.check_loader(worker.val_loader, "self.val_loader")

    def _check_optimizer(self) -> None:
        """Refuse one that trains something else: of a model that was replaced after it was made."""
        mine = {id(p) for module in self.modules.values() for p in module.parameters()}
        groups = getattr(self.worker.optimizer, "param_groups", ())
        if groups and not any(id(p) in mine for group in groups for p in group["params"]):
            raise ValueError(
                f"self.optimizer has no parameter of self.{', self.'.join(self.modules)}, which "
                "would not be trained; make the optimizer after the model is what it will be"
            )

    def describe(self) -> dict[str, Any]:
        """What the driver wants to know before ranks may wait for one another."""
        return {
            **self.whereabouts(),
            "models": [
                (f"{name}.{parameter}", shape, dtype)
                for name, module in self.modules.items()
                for parameter, shape, dtype in models.signature(module)
            ],
            "steps": self.has_steps,
            "planned": self.plan is not None,
            "batches": data.length(self.worker.train_loader) if self.has_steps else None,
            "own_methods": self.worker._ddp_own_methods,
            "val_loader": getattr(self.worker, "val_loader", None) is not None,
        }

    # -- together ---------------------------------------------------------------------------------

    def join(
        self,
        spec: group.ProcessGroupSpec,
        counts: Sequence[int] | None,
        one_machine: bool,
    ) -> int | None:
        """Join the group and wrap the models; returns the optimizer steps of an epoch, if known."""
        settings = self.settings
        self.enter(spec, one_machine)
        self.pulse.at("wrapping the model")
        optimizers = parts.stateful(self.worker, optimizers_only=True)
        synced = self._wrap(optimizers.values())
        for name, optimizer in optimizers.items():
            self._step_counts[name] = 0
            optimizer.register_step_post_hook(self._counter(name))
        if self.has_steps:
            self.loop = StepLoop(self.worker, synced, settings.steps, self.pulse, self.device)
        if self.plan is not None:
            self._windows = list(self.plan.windows(self.rank, in_step=self.is_sharded))
        elif counts is not None:
            accumulate = settings.steps.accumulate
            self._windows = counted_windows(counts, self.rank, accumulate, settings.uneven)
        self.pulse.at("idle")
        return None if self._windows is None else len(self._windows)

    def _wrap(self, optimizers: Any) -> Any:
        """Make the models' backward passes average gradients; what ``StepLoop`` goes through."""
        settings = self.settings
        for name, module in self.modules.items():
            wrapped = models.wrap(module, self.device, settings.compile, settings.ddp_options)
            setattr(self.worker, name, wrapped)
        return getattr(self.worker, settings.models[0])

    def _counter(self, name: str) -> Any:
        def count(*_: Any) -> None:
            self._step_counts[name] += 1

        return count

    def _epoch(self, epoch: int) -> dict[str, Any]:
        pulse = self.pulse
        result: dict[str, Any]
        if self.loop is None:
            self.barrier("before-epoch")
            pulse.at("train_epoch")
            with self._joining():
                result = self.worker.train_epoch(epoch)
            for name in self.modules:
                if not getattr(self.worker, name).forwards and any(self._step_counts.values()):
                    raise RuntimeError(NOT_CALLED.format("train_epoch()", f"self.{name}"))
            joined = self._joins()
        else:
            pulse.at("starting the loader")
            for name in self.modules:
                getattr(self.worker, name).train()
            data.set_epoch(self.worker.train_loader, epoch)
            # Its processes are started here, before the barrier: nobody waits for them inside.
            batches = iter(self.worker.train_loader)
            self.barrier("before-iteration")
            result = self.loop.run(batches, self._windows)
            joined = self._windows is None or any(window.join for window in self._windows)
        pulse.at("end of the epoch")
        if joined:
            self._catch_up()
        self.barrier("epoch-end")
        if self.world_size > 1:
            for module in self.modules.values():
                models.share_buffers(module)
        if self.loop is not None and self.loop.scheduler_interval == "epoch":
            self.worker.scheduler.step()
        pulse.at("idle")
        return result

    def _joins(self) -> bool:
        """Whether an epoch of the user's own is run inside of ``DDP.join``."""
        return self.settings.uneven == "join" and self.world_size > 1 and len(self.modules) == 1

    def _joining(self) -> Any:
        if not self._joins():
            return contextlib.nullcontext()
        model = getattr(self.worker, self.settings.models[0])
        return model.join(divide_by_initial_world_size=False)

    def _catch_up(self) -> None:
        """Ranks that ran out of data have the model, by DDP.join, but not the optimizer's memory.

        Without it their next steps would differ, and the ranks' models drift apart unseen.
        """
        mine = sum(self._step_counts.values())
        counts: list[Any] = [None] * self.world_size
        dist.all_gather_object(counts, mine)
        most = max(counts)
        if min(counts) == most:
            return
        source = counts.index(most)
        shared = models.share_object(self.shared_state() if self.rank == source else None, source)
        if mine != most:
            self.load_shared(shared)
        self._step_counts = dict.fromkeys(self._step_counts, 0)

    # -- state ------------------------------------------------------------------------------------

    def shared_state(self) -> dict[str, Any] | None:
        return state.shared_state(self)

    def load_shared(self, shared: Any) -> None:
        state.load_shared(self, shared)

    # -- evaluation -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the worker's models are the plain ones: nothing that is called waits for others.

        For evaluation, where ranks may have different numbers of samples, or none.
        """
        wrapped = {name: getattr(self.worker, name) for name in self.modules}
        for name, module in self.modules.items():
            setattr(self.worker, name, module)
        self.pulse.at(EVALUATION, step=-1)
        try:
            with contextlib.nullcontext() if self.loop is None else self.loop.autocast():
                yield
        finally:
            self.pulse.at("idle")
            for name, model in wrapped.items():
                setattr(self.worker, name, model)
