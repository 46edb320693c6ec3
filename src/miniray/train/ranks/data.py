"""A rank's data: the worker's loader looked at, checked and cut to the rank's share.

A plain ``DataLoader`` over all samples is replaced by one over the rank's own, of the same class
and with everything else as the user set it. Other loaders, and those of workers with
``load_data_shard``, are the user's own work and used as they are. What can be neither cut nor
trusted is refused: a loader that gives every rank the same samples trains, and is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from miniray.doctor.handles import check_handles
from miniray.train.ranks.plan import EpochPlan, Window


class PlannedBatches:
    """A batch sampler: this rank's part of an ``EpochPlan``, in another order each epoch."""

    def __init__(self, plan: EpochPlan, rank: int, shuffle: bool, seed: int) -> None:
        self.plan = plan
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def windows(self) -> list[Window]:
        return list(self.plan.windows(self.rank))

    def __iter__(self) -> Iterator[list[int]]:
        return self.plan.batches(self.rank, self.epoch, shuffle=self.shuffle, seed=self.seed)

    def __len__(self) -> int:
        return self.plan.count(self.rank)


def check_loader(loader: Any, name: str) -> None:
    """Refuse a dataset with open handles before processes are started for it."""
    if isinstance(loader, DataLoader):
        context = loader.multiprocessing_context
        method = context.get_start_method() if context is not None else "fork"
        check_handles(
            loader.dataset, f"{name}.dataset", num_workers=loader.num_workers, start_method=method
        )


def own_share(
    loader: Any,
    rank: int,
    world_size: int,
    *,
    seed: int,
    accumulate: int = 1,
    uneven: str = "join",
    sharded: bool = False,
) -> Any:
    """The rank's loader; ``planned`` unless the batches are the user's own.

    ``sharded``: the worker has cut its data itself. Raises ``ValueError`` for a loader over all
    samples that cannot be cut.
    """
    if sharded or not isinstance(loader, DataLoader):
        return loader
    if any(hasattr(part, "set_epoch") for part in (loader.sampler, loader.batch_sampler)):
        return loader  # it was cut by somebody who knows of ranks: a DistributedSampler
    problem = own_way(loader)
    if problem:
        if world_size == 1:
            return loader
        raise ValueError(
            f"self.train_loader has {problem}, which miniray cannot cut into {world_size} shards: "
            "every rank would train on the same samples. Give the worker load_data_shard(shard_id, "
            "num_shards) and make the loader there, or use a DistributedSampler"
        )
    plan = EpochPlan(
        len(loader.dataset),
        loader.batch_size,
        world_size,
        accumulate=accumulate,
        uneven=uneven,
        drop_last=loader.drop_last,
    )
    shuffle = isinstance(loader.sampler, RandomSampler)
    return _with_batches(loader, PlannedBatches(plan, rank, shuffle, seed))


def planned(loader: Any) -> PlannedBatches | None:
    """The batches that miniray has dealt out to a loader; None where they are the user's own."""
    batches = getattr(loader, "batch_sampler", None)
    return batches if isinstance(batches, PlannedBatches) else None


def own_way(loader: Any) -> str:
    """What a loader has that decides on its samples in a way of its own; "" where nothing does."""
    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__qualname__})"
    if loader.batch_sampler is None:
        return "batch_size=None"
    if loader.batch_size is None:
        return f"a batch sampler of its own ({type(loader.batch_sampler).__qualname__})"
    if type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
    ):
        return ""
    return f"a sampler of its own ({type(sampler).__qualname__})"


def _with_batches(loader: Any, batches: Any) -> Any:
    """The same loader over other batches; what a subclass does besides loading is kept."""
    own = copy.copy(loader)
    # A loader refuses the assignment. Processes that it has running (persistent_workers) are of the
    # batches before.
    vars(own).update(batch_sampler=batches, _iterator=None)
    return own


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell everything that shuffles which epoch it is."""
    told = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    for part in told:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def length(loader: Any) -> int | None:
    """How many batches a loader says it has; None where it does not say."""
    try:
        return len(loader)
    except TypeError:  # an iterable without a length, or a loader over one
        return None
