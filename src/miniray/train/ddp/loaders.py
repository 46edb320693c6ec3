"""A rank's share of the worker's loader, as the micro-batches of optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from miniray.train.ddp.checks import RankSettings
from miniray.train.lockstep.context import RankContext, WorkerTraits
from miniray.train.lockstep.replica import MicroBatch
from miniray.train.workers.data import planned as data
from miniray.train.workers.data.epoch_data import EpochData, create_epoch_data
from miniray.train.workers.data.plan import Window


def open_loader(
    user: Any, traits: WorkerTraits, settings: RankSettings, context: RankContext
) -> EpochData:
    """Shard the ``train_loader`` of a worker with ``training_step`` for this rank.

    Raises:
        TypeError: The worker has no ``train_loader`` or no ``optimizer``.
    """
    for needed in ("train_loader", "optimizer"):
        if getattr(user, needed, None) is None:
            raise TypeError(
                f"{type(user).__name__} has training_step() but no self.{needed}. Create it in "
                "__init__ or in load_data_shard"
            )
    data.check_loader(user.train_loader, "self.train_loader")
    _take_share(user, traits, settings, context)
    if getattr(user, "val_loader", None) is not None:
        data.check_loader(user.val_loader, "self.val_loader")

    def touch() -> None:
        context.status.touch()  # of the current call

    return create_epoch_data(
        user.train_loader,
        context.rank,
        context.world_size,
        accumulate=settings.accumulate,
        uneven=settings.uneven,
        limit=settings.limit_train_batches,
        touch=touch,
        exchange=_gather_counts,
    )


def _gather_counts(count: int) -> list[int]:
    """Return the numbers of all ranks. A collective."""
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, count)
    return counts


def share_loader(
    user: Any, traits: WorkerTraits, settings: RankSettings, context: RankContext
) -> None:
    """Shard the ``train_loader`` of a worker with ``train_epoch`` for this rank, if it has one."""
    if traits.gets_loader:
        _take_share(user, traits, settings, context)
    elif not traits.shards_data and hasattr(user, "train_loader"):
        user.train_loader = data.shard_data(user.train_loader, context.rank, context.world_size)


def _take_share(
    user: Any, traits: WorkerTraits, settings: RankSettings, context: RankContext
) -> None:
    user.train_loader = data.take_share(
        user.train_loader,
        context.rank,
        context.world_size,
        accumulate=settings.accumulate,
        uneven=settings.uneven,
        seed=settings.seed,
        sharded=traits.shards_data,
        limit=settings.limit_train_batches,
        overfits=settings.overfits,
    )
    if settings.overfits and data.planned(user.train_loader) is None:
        raise data.create_overfit_error()


def iter_windows(
    context: RankContext, batches: Iterator[tuple[int, Any]], windows: Iterable[Window], last: Any
) -> Iterator[Iterator[MicroBatch]]:
    """Yield the micro-batches of each step. If a rank has none left, it repeats its last."""

    def load(weights: Window) -> Iterator[MicroBatch]:
        nonlocal last
        status, step = context.status, context.state.step_in_epoch
        for index, weight in enumerate(weights):
            status.set_phase("data", step=step)
            item = next(batches, None) if weight else last
            if item is None:
                raise RuntimeError(
                    f"rank {context.rank} ran out of data at step {step}: its loader gave "
                    "fewer batches than its len() says"
                )
            last = number, batch = item
            yield MicroBatch(number, batch, weight, index == len(weights) - 1)

    return map(load, windows)


def iter_batches(
    context: RankContext, batches: Iterator[tuple[int, Any]]
) -> Iterator[list[MicroBatch]]:
    """Yield one step per batch, until this rank has no more."""
    for step in itertools.count():
        context.status.set_phase("data", step=step)
        item = next(batches, None)
        if item is None:
            return
        yield [MicroBatch(*item)]
