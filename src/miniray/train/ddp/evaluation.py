"""Evaluation of a replica: sums and counts over this rank's part of the data."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from miniray.train.lockstep.health.status import EVALUATION
from miniray.train.workers import torch_utils as parts
from miniray.train.workers.data.batches import count_samples, move_batch
from miniray.train.workers.data.loaders import create_eval_loader, shard_loader

if TYPE_CHECKING:
    from miniray.train.ddp.replicated import ReplicatedModel


class ReplicaEvaluation:
    """Evaluates a replica whose ranks have whole models, without waiting for other ranks.

    Ranks may have different numbers of samples, or none.
    """

    def __init__(self, replica: ReplicatedModel) -> None:
        self.replica, self.user, self.context = replica, replica.user, replica.context

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Set the worker's attributes to its original models inside the context."""
        replica = self.replica
        vars(self.user).update(replica.modules)
        training = {name: module.training for name, module in replica.modules.items()}
        if "evaluate" not in replica.traits.own_methods:
            for module in replica.modules.values():
                module.eval()
        self.context.status.set_phase(EVALUATION, step=-1)
        try:
            with replica.autocast() if replica.traits.has_steps else contextlib.nullcontext():
                yield
        finally:
            self.context.status.set_phase("idle")
            self.close()
            for name, is_training in training.items():
                replica.modules[name].train(is_training)

    def close(self) -> None:
        """Set the worker's attributes to the models with averaged gradients again."""
        self.replica.use_synced_models()

    def run(
        self, data: Any, shard_id: int, num_shards: int, max_batches: int | None
    ) -> dict[str, Any]:
        """Return sums and counts over ``data``, by default this rank's part of ``val_loader``.

        ``max_batches`` is ``limit_val_batches`` by default, or all of ``data``.
        """
        if data is None and max_batches is None:
            max_batches = self.replica.settings.limit_val_batches
        return self.add_batches(self.load(data, shard_id, num_shards), max_batches)

    def load(self, data: Any, shard_id: int, num_shards: int) -> Any:
        """Return the batches of ``data``, or of a shard of ``val_loader``."""
        if data is not None:
            return create_eval_loader(data, getattr(self.user, "train_loader", None))
        loader = getattr(self.user, "val_loader", None)
        if loader is None:
            name = type(self.user).__name__
            raise TypeError(f"{name}.setup() (or __init__) must set self.val_loader")
        return shard_loader(loader, shard_id, num_shards)

    def add_batches(self, batches: Iterable[Any], most: int | None) -> dict[str, Any]:
        """Return sums and counts over at most ``most`` batches."""
        means, step = parts.Means(), self.validation_step
        with torch.no_grad():
            for number, batch in enumerate(itertools.islice(batches, most)):
                self.context.status.touch()  # a slow loader doesn't hang
                batch = move_batch(batch, self.context.device)
                means.add(self.validate(step, batch, number), count_samples(batch))
        return means.sums()

    def validate(self, step: Any, batch: Any, number: int) -> dict[str, Any]:
        """Return the values of a batch."""
        values = parts.as_dict(step(batch, number), "validation_step")
        return {**self.context.log.take(), **values}

    @property
    def validation_step(self) -> Any:
        """The worker's ``validation_step``, or else its ``training_step``."""
        method = getattr(self.user, "validation_step", None)
        return parts.step_of(self.user.training_step if method is None else method)
