"""``shard="none"``: every rank holds the whole model, and backward passes average gradients."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from miniray.doctor import sites
from miniray.train.ddp import loaders
from miniray.train.ddp import model as models
from miniray.train.ddp.checks import RankSettings, create_parts_error, read_output
from miniray.train.ddp.evaluation import ReplicaEvaluation
from miniray.train.ddp.state import ReplicatedState
from miniray.train.ddp.uneven import StepCounts
from miniray.train.ddp.user_loop import UserLoop
from miniray.train.lockstep.context import RankContext, WorkerTraits, defines
from miniray.train.lockstep.loop import StepLoop, check_scheduler
from miniray.train.lockstep.mesh import (
    gather_full,
    share_buffers,
)
from miniray.train.lockstep.replica import MicroBatch, StepOutput
from miniray.train.lockstep.schedule import Agreement
from miniray.train.optimizer_steps import create_autocast
from miniray.train.pretrained import SavedFiles, write_model
from miniray.train.torch_worker import TorchWorker
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data.batches import count_samples, count_tokens, move_batch
from miniray.train.workers.data.epoch_data import EpochData


class ReplicatedModel:
    """A ``Replica`` by torch's DistributedDataParallel, around the worker ``user``."""

    logs_samples = True

    def __init__(
        self, user: Any, traits: WorkerTraits, settings: RankSettings, context: RankContext
    ) -> None:
        self.user, self.traits, self.settings, self.context = user, traits, settings, context
        self.site = ""
        self._training_step: Any = None  # called with batch and index
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        #: When ``user.scheduler`` is stepped: after each "epoch" or "step"; None without one.
        self.scheduler_interval: str | None = None
        self.modules: dict[str, Any] = {}
        self._synced: dict[str, Any] = {}  # as ``modules``, with averaged gradients
        self.epoch_data: EpochData | None = None  # with ``training_step``
        self._forwards: dict[str, int] = {}  # before the current step
        self._grad_norm: Any = None  # of the last step, if it is logged or clipped
        self.step_counts = StepCounts(self)
        self.state, self._evaluation = self._create_parts()

    def _create_parts(self) -> tuple[ReplicatedState, ReplicaEvaluation]:
        return ReplicatedState(self), ReplicaEvaluation(self)

    @property
    def checks_losses(self) -> bool:
        """With fp16 the scaler finds overflows, and skips the step on all ranks."""
        return self.settings.on_nonfinite == "error" and not self.scaler.is_enabled()

    # -- before ranks wait for each other ---------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Check models, optimizers and loaders, and take this rank's share of the data."""
        settings = self.settings
        self.modules = {name: models.find(self.user, name) for name in settings.models}
        self.context.device = self._place_models()
        if self.traits.has_steps:
            self.site = sites.definition_site(self.user.training_step)
            self._training_step = parts.step_of(self.user.training_step)
            self.epoch_data = loaders.open_loader(self.user, self.traits, settings, self.context)
            self.scheduler_interval = get_scheduler_interval(self.user)
            enabled = settings.precision == "fp16"
            self.scaler = torch.amp.GradScaler(self.context.device.type, enabled=enabled)
        else:
            loaders.share_loader(self.user, self.traits, settings, self.context)
        models.check_optimizers(self.user, self.modules)
        has_steps = self.traits.has_steps
        return {
            "models": [
                (f"{name}.{parameter}", shape, dtype)
                for name, module in self.modules.items()
                for parameter, shape, dtype in models.signature(module)
            ],
            "steps": has_steps,
            "planned": self.epoch_data is not None and self.epoch_data.is_planned,
            "divisible": self.epoch_data is not None and self.epoch_data.has_position,
            "batches": None if self.epoch_data is None else self._count_batches(),
            "own_methods": self.traits.own_methods,
            "validates": self._has_validation(),
            "val_loader": getattr(self.user, "val_loader", None) is not None,
        }

    def _has_validation(self) -> bool:
        """Return whether ``evaluate`` calls the worker's ``validation_step``, or its training step.

        The latter is what ``TorchWorker`` does.
        """
        user = type(self.user)
        is_own = defines(user, "validation_step") or defines(user, "training_step")
        has_own_evaluate = "evaluate" in self.traits.own_methods
        return is_own and hasattr(user, "validation_step") and not has_own_evaluate

    def _count_batches(self) -> int | None:
        """Return this rank's batches in the epoch that the run is in."""
        assert self.epoch_data is not None
        return self.epoch_data.count_batches(self.settings.position.get("epoch", 0))

    def _place_models(self) -> Any:
        """Return the device; workers with their own epoch loop have chosen one already."""
        if not self.traits.has_steps:
            return next(next(iter(self.modules.values())).parameters()).device
        device = torch.device(self.user.device)
        for module in self.modules.values():
            module.to(device)
        return device

    # -- together ---------------------------------------------------------------------------------

    def wrap(self, agreed: Sequence[int] | None) -> int | None:
        """Wrap the models. ``agreed`` is the number of batches per rank if ranks agree on it."""
        optimizers = parts.stateful(self.user, optimizers_only=True)
        self._synced = self._wrap_models(optimizers.values())
        self.step_counts.observe(optimizers)
        if self.epoch_data is None:
            return None
        if agreed is not None:
            self.epoch_data.set_counts(agreed)
        return self.epoch_data.count_steps() if self.epoch_data.has_equal_epochs else None

    def count_epoch_steps(self) -> int | None:
        return None if self.epoch_data is None else self.epoch_data.count_steps()

    def count_global_batch(self) -> int | None:
        return None if self.epoch_data is None else self.epoch_data.count_global_batch()

    def _wrap_models(self, optimizers: Iterable[Any]) -> dict[str, Any]:
        """Return the models with averaged gradients. A collective."""
        settings, device = self.settings, self.context.device
        wrapped = {
            name: models.wrap(module, device, settings.compile, settings.ddp_options)
            for name, module in self.modules.items()
        }
        vars(self.user).update(wrapped)
        return wrapped

    def configure_scheduler(self, total_steps: int | None) -> None:
        """Use the result of the worker's ``configure_scheduler``; it is stepped after each step."""
        if self.traits.has_steps:
            parts.configure_scheduler(self.user, total_steps)
            self.scheduler_interval = get_scheduler_interval(self.user)

    def create_loop(self) -> StepLoop | UserLoop:
        """Return the loop that trains epochs."""
        return StepLoop(self, self.context) if self.traits.has_steps else UserLoop(self)

    # -- an epoch ---------------------------------------------------------------------------------

    def start_epoch(self) -> Iterator[Iterable[MicroBatch]]:
        for model in self._synced:
            getattr(self.user, model).train()
        assert self.epoch_data is not None
        batches, windows, last = self.epoch_data.start(self.context.state)
        if windows is None:
            limit = self.settings.limit_train_batches
            return loaders.iter_batches(self.context, itertools.islice(batches, limit))
        return loaders.iter_windows(self.context, batches, windows, last)

    @contextlib.contextmanager
    def epoch_context(self) -> Iterator[None]:
        """Support ranks with different numbers of batches, if the number of steps isn't known.

        Gradients are averaged over the ranks that still have batches.
        """
        if self._knows_steps:
            yield
            return
        with Join([*self._synced.values()], divide_by_initial_world_size=False):
            yield
        self.step_counts.catch_up()

    def zero_grad(self) -> None:
        self._forwards = {name: model.forwards for name, model in self._synced.items()}
        self.user.optimizer.zero_grad(set_to_none=True)

    def micro_batch_context(self, is_last: bool) -> contextlib.ExitStack:
        """Add up gradients on this rank before the last micro-batch of a step."""
        stack = contextlib.ExitStack()
        for model in self._synced.values() if not is_last else ():
            stack.enter_context(model.no_sync())
        return stack

    def forward(self, batch: Any, number: int) -> StepOutput:
        batch = move_batch(batch, self.context.device)
        self.context.status.set_phase("forward")
        before = [model.forwards for model in self._synced.values()]
        with self.autocast():
            output = self._training_step(batch, number)
        loss, metrics = read_output(output, self.context.rank)
        metrics = {**self.context.log.take(), **metrics}
        if before == [model.forwards for model in self._synced.values()]:
            raise create_parts_error("training_step()", next(iter(self._synced)))
        return StepOutput(loss, metrics, count_samples(batch), count_tokens(batch))

    def backward(self, loss: Any, weight: float) -> None:
        self.context.status.set_phase("backward")
        self.scaler.scale(loss if weight == 1.0 else loss * weight).backward()

    def check_gradients(self) -> None:
        """Raise ``RuntimeError`` if a model that was called in this step lacks a gradient.

        A model that wasn't called must have none.
        """
        for name, model in self._synced.items():
            parameters = {k: p for k, p in model.module.named_parameters() if p.requires_grad}
            missing = [key for key, parameter in parameters.items() if parameter.grad is None]
            if model.forwards == self._forwards[name]:
                if len(missing) < len(parameters):
                    raise create_parts_error("training_step()", name)
                continue
            if not missing or self.settings.ddp_options.get("find_unused_parameters"):
                continue
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise RuntimeError(
                f"rank {self.context.rank} has no gradient for {shown} at step "
                f"{self.context.state.step_in_epoch}, because the loss doesn't depend on it, and "
                "other ranks wait for it. Use it in the loss, freeze it (requires_grad_(False)), "
                "or pass find_unused_parameters=True"
            )

    def step_optimizer(self) -> None:
        optimizer = self.user.optimizer
        if self.settings.clip_norm is not None:
            self.scaler.unscale_(optimizer)
            self._grad_norm = torch.nn.utils.clip_grad_norm_(
                [*self._iter_parameters()], self.settings.clip_norm
            )
        elif self.context.is_next_step_logged(self.count_epoch_steps()):
            self.scaler.unscale_(optimizer)
            gradients = [p.grad for p in self._iter_parameters() if p.grad is not None]
            self._grad_norm = torch.nn.utils.get_total_norm(gradients)
        else:
            self._grad_norm = None
        self.scaler.step(optimizer)
        self.scaler.update()
        if self.scheduler_interval == "step":
            parts.step_schedule(self.user.scheduler)

    def share_buffers(self) -> None:
        if self.context.world_size > 1:
            share_buffers(self.modules.values())

    def end_epoch(self) -> None:
        self.share_buffers()
        if self.scheduler_interval == "epoch":
            self.user.scheduler.step()

    def get_details(self) -> Mapping[str, Any]:
        return {}

    def get_facts(self) -> dict[str, float]:
        facts = {"lr": float(self.user.optimizer.param_groups[0]["lr"])}
        if self._grad_norm is not None:
            facts["grad_norm"] = float(gather_full(self._grad_norm))
        return facts

    def create_agreement(self) -> Agreement | None:
        """Return what distributes rank 0's decisions; None if ranks make unequal steps."""
        context = self.context
        if not self._knows_steps:
            return None
        device = context.device if dist.get_backend() == "nccl" else "cpu"
        return Agreement(
            not context.rank, context.state.step, context.status.take_request, device=device
        )

    @property
    def _knows_steps(self) -> bool:
        return self.epoch_data is not None and self.epoch_data.windows is not None

    def _iter_parameters(self) -> Iterator[Any]:
        return itertools.chain(*(model.module.parameters() for model in self._synced.values()))

    def autocast(self) -> Any:
        """Return a context in which the model computes with ``precision``."""
        return create_autocast(self.settings.precision, self.context.device.type)

    @property
    def has_position(self) -> bool:
        if self.epoch_data is None or self.epoch_data.windows is None:
            return False
        return self.epoch_data.has_position or hasattr(self.user.train_loader, "state_dict")

    def write_pretrained(self, directory: str | None, send_files: bool) -> SavedFiles | None:
        """Write the model on rank 0; see ``write_model``."""
        if self.context.rank:
            return None
        return write_model(self.user, self.modules.get("model"), directory, send_files)

    def set_lr(self, lr: float) -> None:
        TorchWorker.set_lr(self.user, lr)

    # -- evaluation -------------------------------------------------------------------------------

    def evaluation_context(self) -> contextlib.AbstractContextManager[None]:
        return self._evaluation.open()

    def evaluate(
        self,
        data: Any = None,
        shard_id: int = 0,
        num_shards: int = 1,
        max_batches: int | None = None,
    ) -> dict[str, Any]:
        return self._evaluation.run(data, shard_id, num_shards, max_batches)

    def check_validation(self, max_batches: int) -> None:
        context = self.context
        with parts.preserve_state(self.modules.values(), self.user.val_loader):
            self.evaluate(None, context.rank, context.world_size, max_batches)

    def use_synced_models(self) -> None:
        """Give the worker its models with averaged gradients."""
        vars(self.user).update(self._synced)


def get_scheduler_interval(worker: Any) -> str | None:
    """Return when ``worker.scheduler`` is stepped, ``"epoch"`` or ``"step"``; None without one."""
    check_scheduler(getattr(worker, "scheduler", None), "self.scheduler")
    return parts.get_scheduler_interval(worker)
