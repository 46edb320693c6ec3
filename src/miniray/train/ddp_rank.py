"""One rank of a DDP run: everything that happens in the worker's process.

A rank goes through ``describe`` (the driver compares what all ranks say, before they can wait for
one another), ``join``, one ``epoch`` after the other, ``leave``. An error leaves the group in an
unknown state: the driver ends all ranks, and the process is not used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from miniray.doctor import barriers, instrument, recorder
from miniray.errors import PeerLostError
from miniray.train import ddp_data, ddp_model, ddp_state, group
from miniray.train import torch_parts as parts
from miniray.train.ddp_loop import NOT_CALLED, StepLoop, StepOptions
from miniray.train.ddp_output import marked_output, tame_tqdm
from miniray.train.ddp_plan import Window, counted_windows
from miniray.train.ddp_pulse import PulseThread

_LOST = re.compile(
    r"gloo|NCCL|Connection (closed|reset|refused)|Timed out waiting|Broken pipe|wait timeout", re.I
)


@dataclasses.dataclass(frozen=True)
class RankSettings:
    """What the driver tells every rank; see ``DDPTrainer``."""

    steps: StepOptions
    models: tuple[str, ...] = ("model",)
    uneven: str = "join"
    seed: int = 0
    compile: Any = False
    ddp_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run_dir: str | None = None
    attempt: int = 0
    own_process: bool = True


class Rank:
    """The rank that ``worker``, the user's object, is. See the module."""

    def __init__(self, worker: Any, rank: int, world_size: int, settings: RankSettings) -> None:
        self.worker, self.rank, self.world_size = worker, rank, world_size
        self.settings = settings
        self.has_steps: bool = worker._ddp_steps
        for name, value in (("rank", rank), ("world_size", world_size)):
            if not hasattr(worker, name):
                setattr(worker, name, value)
        self.modules = {name: self._module(name) for name in settings.models}
        self.device = self._place_models()
        self.plan: Any = None
        self.pulse: Any = None
        self._recorder: Any = None
        self._has_boxes = False
        self.loop: StepLoop | None = None
        self._windows: list[Window] | None = None
        self._step_counts: dict[str, int] = {}
        self._open = contextlib.ExitStack()
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
        ddp_data.check_loader(worker.train_loader, "self.train_loader")
        worker.train_loader, self.plan = ddp_data.own_share(
            worker.train_loader,
            self.rank,
            self.world_size,
            accumulate=settings.steps.accumulate,
            uneven=settings.uneven,
            seed=settings.seed,
            sharded=worker._ddp_sharded,
        )
        if getattr(worker, "val_loader", None) is not None:
            ddp_data.check_loader(worker.val_loader, "self.val_loader")

    def describe(self) -> dict[str, Any]:
        """What the driver wants to know before ranks may wait for one another."""
        gpu = None
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        return {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": self.device.type,
            "gpu": gpu,
            "models": [
                (f"{name}.{parameter}", shape, dtype)
                for name, module in self.modules.items()
                for parameter, shape, dtype in ddp_model.signature(module)
            ],
            "steps": self.has_steps,
            "planned": self.plan is not None,
            "batches": ddp_data.length(self.worker.train_loader) if self.has_steps else None,
        }

    # -- together ---------------------------------------------------------------------------------

    def join(
        self,
        spec: group.ProcessGroupSpec,
        counts: Sequence[int] | None,
        one_machine: bool,
    ) -> int | None:
        """Join the group and wrap the models; returns the optimizer steps of an epoch, if known.

        ``one_machine``: all ranks see each other's black boxes.
        """
        settings = self.settings
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if settings.own_process:
            folder = settings.run_dir if os.path.isdir(settings.run_dir or "") else None
            self._open.enter_context(marked_output(self.rank, self.world_size, folder))
            self._recorder = self._record(folder)
            self._has_boxes = one_machine and folder is not None
            tame_tqdm(self.rank)
        store = group.join(spec, self.rank)
        self._open.callback(group.leave)
        self.pulse = PulseThread(spec, self.rank, store)
        self._open.callback(self.pulse.close)
        self.pulse.at("wrapping the model")
        for name, module in self.modules.items():
            wrapped = ddp_model.wrap(module, self.device, settings.compile, settings.ddp_options)
            setattr(self.worker, name, wrapped)
        for name, optimizer in parts.stateful(self.worker, optimizers_only=True).items():
            self._step_counts[name] = 0
            optimizer.register_step_post_hook(self._counter(name))
        if self.has_steps:
            self.loop = StepLoop(self.worker, settings.steps, self.pulse, self.device)
        if self.plan is not None:
            self._windows = list(self.plan.windows(self.rank))
        elif counts is not None:
            accumulate = settings.steps.accumulate
            self._windows = counted_windows(counts, self.rank, accumulate, settings.uneven)
        self.pulse.at("idle")
        return None if self._windows is None else len(self._windows)

    def _record(self, run_dir: str | None) -> Any:
        """This process's black box: what it did last is known whatever ends it."""
        if run_dir is None:
            return None
        instrument.install()
        current = recorder.current()
        if current is None:
            current = recorder.start(
                run_dir,
                self.rank,
                self.world_size,
                launcher="miniray",
                attempt=self.settings.attempt,
            )
            self._open.callback(recorder.stop)
        return current

    def _counter(self, name: str) -> Any:
        def count(*_: Any) -> None:
            self._step_counts[name] += 1

        return count

    def epoch(self, epoch: int) -> dict[str, Any]:
        """Train one epoch; what this rank has to say about it."""
        try:
            return self._epoch(epoch)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the store may be gone: then nobody reads it
                self.pulse.post()
            if is_consequence(error):
                raise PeerLostError(
                    f"rank {self.rank} lost the other ranks at step {self.pulse.step}: {error}"
                ) from error
            raise

    def _epoch(self, epoch: int) -> dict[str, Any]:
        pulse = self.pulse
        pulse.epoch, pulse.step = epoch, -1
        if self._recorder is not None:
            self._recorder.set_epoch(epoch)
            self._recorder.note(steps_before_epoch=self._recorder.step_number)
        result: dict[str, Any]
        if self.loop is None:
            self._barrier("before-epoch")
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
            ddp_data.set_epoch(self.worker.train_loader, epoch)
            # Its processes are started here, before the barrier: nobody waits for them inside.
            batches = iter(self.worker.train_loader)
            self._barrier("before-iteration")
            result = self.loop.run(batches, self._windows)
            joined = self._windows is None or any(window.join for window in self._windows)
        pulse.at("end of the epoch")
        if joined:
            self._catch_up()
        self._barrier("epoch-end")
        if self.world_size > 1:
            for module in self.modules.values():
                ddp_model.share_buffers(module)
        if self.loop is not None and self.loop.scheduler_interval == "epoch":
            self.worker.scheduler.step()
        pulse.at("idle")
        return result

    def _barrier(self, name: str) -> None:
        """Wait for all ranks; over the black boxes, which the doctor reads, or over the store."""
        if not self._has_boxes:
            self.pulse.barrier(name)
            return
        self.pulse.at(f"barrier {name!r}")
        barriers.barrier(name, timeout=self.pulse.limit)
        self.pulse.at(f"after barrier {name!r}")

    def _joins(self) -> bool:
        """Whether an epoch of the user's own is run inside of ``DDP.join``."""
        return self.settings.uneven == "join" and self.world_size > 1 and len(self.modules) == 1

    def _joining(self) -> Any:
        if not self._joins():
            return contextlib.nullcontext()
        models = [getattr(self.worker, name) for name in self.modules]
        return Join(models, divide_by_initial_world_size=False)

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
        shared = ddp_model.share_object(
            ddp_state.shared_state(self) if self.rank == source else None, source
        )
        if mine != most:
            ddp_state.load_shared(self, shared)
        self._step_counts = dict.fromkeys(self._step_counts, 0)

    def leave(self) -> None:
        """Leave the group and give the process back as it was."""
        self._open.close()

    # -- without the others -----------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Inside, the worker's models are the plain ones: nothing that is called waits for others.

        For evaluation, where ranks may have different numbers of samples, or none.
        """
        wrapped = {name: getattr(self.worker, name) for name in self.modules}
        for name, module in self.modules.items():
            setattr(self.worker, name, module)
        try:
            yield
        finally:
            for name, model in wrapped.items():
                setattr(self.worker, name, model)


def is_consequence(error: BaseException) -> bool:
    """Whether ``error`` only says that other ranks are gone or do not answer."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
