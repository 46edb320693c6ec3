"""One rank of a DDP run: everything that happens in the worker's process.

A rank goes through ``describe`` (the driver compares what all ranks say, before they can wait for
one another), ``join``, one ``epoch`` after the other, ``leave``; see ``ranks.member``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from miniray.ps import to_host
from miniray.train.ddp import model as models
from miniray.train.ddp.checks import RankSettings
from miniray.train.ddp.loop import NOT_CALLED, StepLoop, scheduler_interval
from miniray.train.lockstep import data
from miniray.train.lockstep import process_group as group
from miniray.train.lockstep.member import Member, share_buffers
from miniray.train.lockstep.plan import Window, counted_windows
from miniray.train.lockstep.status import EVALUATION
from miniray.train.pretrained import SavedFiles, write_model
from miniray.train.workers import torch_utils as parts


class Rank(Member):
    """The rank that ``worker``, the user's object, is. See the module."""

    def __init__(self, worker: Any, rank: int, world_size: int, settings: RankSettings) -> None:
        super().__init__(rank, world_size, settings)
        self.worker, self.settings = worker, settings
        self.has_steps: bool = worker._ddp_steps
        self.modules = {name: self._module(name) for name in settings.models}
        self.device = self._place_models()
        self.loop: StepLoop | None = None
        self._windows: list[Window] | None = None  # of an epoch; None where nobody knows
        self._step_counts: dict[str, int] = {}
        if self.has_steps:
            self._take_loader()
        elif not worker._ddp_sharded and hasattr(worker, "train_loader"):
            worker.train_loader = data.shard_data(worker.train_loader, rank, world_size)
        self._check_optimizers()

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
        scheduler_interval(worker)
        data.check_loader(worker.train_loader, "self.train_loader")
        worker.train_loader = data.own_share(
            worker.train_loader,
            self.rank,
            self.world_size,
            accumulate=settings.accumulate,
            uneven=settings.uneven,
            seed=settings.seed,
            sharded=worker._ddp_sharded,
        )
        if getattr(worker, "val_loader", None) is not None:
            data.check_loader(worker.val_loader, "self.val_loader")

    def _check_optimizers(self) -> None:
        """Refuse one that trains something else, whose gradients nobody would average.

        Of a model that was replaced after it was made, or of one that the trainer is not told of.
        """
        mine = set(self._together().parameters())
        known = " and ".join(f"self.{name}" for name in self.modules)
        for name, optimizer in parts.stateful(self.worker, optimizers_only=True).items():
            trained = {p for group in optimizer.param_groups for p in group["params"]}
            others = {p for p in trained - mine if p.requires_grad}
            if not others:
                continue
            owners = [
                key
                for key, module in vars(self.worker).items()
                if isinstance(module, torch.nn.Module) and others & set(module.parameters())
            ]
            if not owners and not trained & mine:
                raise ValueError(
                    f"self.{name} has no parameter of {known}, which would not be trained by it; "
                    "make the optimizer after the model is what it will be"
                )
            whose = f" but of self.{' and self.'.join(owners)}" if owners else ""
            told = f", or pass models={(*self.modules, *owners)!r}" if owners else ""
            raise ValueError(
                f"self.{name} has parameters that are not {known}'s{whose}: their gradients would "
                "not be averaged, and the workers' copies drift apart. Make them a part of "
                f"self.{next(iter(self.modules))}{told}"
            )

    @property
    def planned(self) -> data.PlannedBatches | None:
        return data.planned(getattr(self.worker, "train_loader", None))

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
            "planned": self.planned is not None,
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
            self.loop = StepLoop(
                self.worker, synced, settings, self.pulse, self.device, self.recorder
            )
        if self.planned is not None:
            self._windows = self.planned.windows()
        elif counts is not None:
            self._windows = counted_windows(counts, self.rank, settings.accumulate, settings.uneven)
        self.pulse.at("idle")
        return None if self._windows is None else len(self._windows)

    def _wrap(self, optimizers: Any) -> dict[str, Any]:
        """Make the models' backward passes average gradients; what ``StepLoop`` goes through."""
        settings = self.settings
        wrapped = {
            name: models.wrap(module, self.device, settings.compile, settings.ddp_options)
            for name, module in self.modules.items()
        }
        vars(self.worker).update(wrapped)
        return wrapped

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
            joined = (
                self.settings.uneven == "join" and self.world_size > 1 and len(self.modules) == 1
            )
            synced = [getattr(self.worker, name) for name in self.modules]
            with Join(synced, enable=joined, divide_by_initial_world_size=False):
                result = self.worker.train_epoch(epoch)
            for name in self.modules:
                if not getattr(self.worker, name).forwards and any(self._step_counts.values()):
                    raise RuntimeError(NOT_CALLED.format("train_epoch()", f"self.{name}"))
        else:
            pulse.at("starting the loader")
            for name in self.modules:
                getattr(self.worker, name).train()
            data.set_epoch(self.worker.train_loader, epoch)
            # Its processes are started here, before the barrier: nobody waits for them inside.
            batches = iter(self.worker.train_loader)
            self.barrier("before-iteration")
            result = self.loop.run(batches, self._windows)
            joined = self._windows is None
        pulse.at("end of the epoch")
        if joined:
            self._catch_up()
        self.barrier("epoch-end")
        if self.world_size > 1:
            share_buffers(self.modules.values())
        if self.loop is not None and self.loop.scheduler_interval == "epoch":
            self.worker.scheduler.step()
        pulse.at("idle")
        return result

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
        box = [self.shared_state() if self.rank == source else None]
        dist.broadcast_object_list(box, src=source)
        if mine != most:
            self.load_shared(box[0])
        self._step_counts = dict.fromkeys(self._step_counts, 0)

    # -- state ------------------------------------------------------------------------------------

    def get_weights(self) -> dict[str, Any]:
        """Of the model; of several by names that begin with the model's."""
        weights: dict[str, Any] = to_host(self._together().state_dict())
        return weights

    def write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles | None:
        """Write the model on rank 0; see ``write_model``."""
        return write_model(self.worker, self.modules.get("model"), directory, send_files)

    def set_weights(self, weights: Any) -> None:
        self._together().load_state_dict(weights)

    def _together(self) -> Any:
        alone = self.modules.get("model") if len(self.modules) == 1 else None
        return alone or torch.nn.ModuleDict(self.modules)

    def shared_state(self) -> dict[str, Any] | None:
        """Optimizers, schedulers, buffers, scaler, the order of samples: equal on all ranks.

        It is the same whether the model is sharded or not: numbers are saved in one piece.
        """
        loop, planned = self.loop, self.planned
        owned = parts.stateful(self.worker)
        return {
            "parts": {name: self.part_state(part) for name, part in owned.items()},
            "buffers": {key: buffer.detach().cpu() for key, buffer in self._buffers()},
            "scaler": None if loop is None else loop.scaler.state_dict(),
            "steps": 0 if loop is None else loop.steps,
            "order": None if planned is None else planned.seed,
        }

    def load_shared(self, shared: Any) -> None:
        """Take up what ``shared_state`` gave; ``ValueError`` where the worker has other parts."""
        mine = parts.stateful(self.worker)
        if set(mine) != set(shared["parts"]):
            raise ValueError(
                f"the state has {sorted(shared['parts'])}, this {type(self.worker).__name__} has "
                f"{sorted(mine)}"
            )
        for name, part in mine.items():
            self.load_part(part, shared["parts"][name])
        for key, buffer in self._buffers():
            if key in shared["buffers"]:
                buffer.copy_(shared["buffers"][key])
        if self.loop is not None:
            if shared["scaler"]:
                self.loop.scaler.load_state_dict(shared["scaler"])
            self.loop.steps = shared["steps"]
        if self.planned is not None and shared["order"] is not None:
            self.planned.seed = shared["order"]

    def _buffers(self) -> Iterator[tuple[str, Any]]:
        for name, module in self.modules.items():
            for key, buffer in module.named_buffers():
                yield f"{name}.{key}", buffer

    def part_state(self, part: Any) -> dict[str, Any]:
        """The state of an optimizer or a scheduler of the worker's."""
        saved: dict[str, Any] = part.state_dict()
        return saved

    def load_part(self, part: Any, saved: Mapping[str, Any]) -> None:
        part.load_state_dict(saved)

    # -- evaluation -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the worker's models are the plain ones: nothing that is called waits for others.

        For evaluation, where ranks may have different numbers of samples, or none.
        """
        wrapped = {name: getattr(self.worker, name) for name in self.modules}
        vars(self.worker).update(self.modules)
        training = {name: module.training for name, module in self.modules.items()}
        if "evaluate" not in self.worker._ddp_own_methods:
            self._together().eval()
        self.pulse.at(EVALUATION, step=-1)
        try:
            with contextlib.nullcontext() if self.loop is None else self.loop.autocast():
                yield
        finally:
            self.pulse.at("idle")
            vars(self.worker).update(wrapped)
            for name, mode in training.items():
                self.modules[name].train(mode)
