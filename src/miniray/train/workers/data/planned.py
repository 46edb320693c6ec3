"""Check the loader of a worker, and shard it for the rank.

A plain ``DataLoader`` over all samples is replaced by one of the same class over the samples of the
rank, with the same settings otherwise. Loaders and datasets of miniray.data are sharded unless they
were created with ``rank`` and ``world_size``. Loaders with a ``DistributedSampler`` and those of
workers with ``load_data_shard`` are used unchanged. Loaders with other custom sampling raise an
error, because all ranks would train on the same samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from miniray.doctor.handles import check_handles
from miniray.train.workers.data.loaders import (
    check_not_started,
    describe_custom_sampling,
    is_over_shard,
    is_shardable,
    replace_parts,
)
from miniray.train.workers.data.plan import EpochPlan, Window
from miniray.train.workers.data.seeding import SeededDataset, SeededIndices, derive_seed


class PlannedBatches:
    """A batch sampler: this rank's part of an ``EpochPlan``, in a different order each epoch.

    Each batch carries a seed; see ``seeding``.
    """

    def __init__(self, plan: EpochPlan, rank: int, shuffle: bool, seed: int) -> None:
        self.plan = plan
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.first_window = 0

    def set_epoch(self, epoch: int, first_window: int = 0) -> None:
        """Set what the next iteration yields: the batches of an epoch, from a step on."""
        self.epoch, self.first_window = epoch, first_window

    def windows(self) -> list[Window]:
        return self.plan.windows(self.rank)

    def count_batches(self, windows: int) -> int:
        """Return the number of this rank's batches in the first ``windows`` steps."""
        return sum(weight > 0 for window in self.windows()[:windows] for weight in window)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self.plan.batches(
            self.rank,
            self.epoch,
            shuffle=self.shuffle,
            seed=self.seed,
            first_window=self.first_window,
        )
        first = self.count_batches(self.first_window)
        for number, rows in enumerate(batches, first):
            yield SeededIndices(rows, derive_seed(self.seed, self.epoch, self.rank, number))

    def __len__(self) -> int:
        return self.plan.count(self.rank)


def check_loader(loader: Any, name: str) -> None:
    """Raise an error if the dataset has open handles, before its processes are started."""
    if isinstance(loader, DataLoader):
        context = loader.multiprocessing_context
        method = context.get_start_method() if context is not None else "fork"
        check_handles(
            loader.dataset, f"{name}.dataset", num_workers=loader.num_workers, start_method=method
        )


def take_share(
    loader: Any,
    rank: int,
    world_size: int,
    *,
    seed: int,
    accumulate: int = 1,
    uneven: str = "join",
    sharded: bool = False,
    limit: int | None = None,
    overfits: bool = False,
) -> Any:
    """Return the rank's loader, with planned batches unless user code determines the batches.

    Args:
        sharded: Whether the worker has sharded its data itself.
        limit: Maximum number of batches of an epoch; ``planned`` loaders only.
        overfits: Use the same batches in every epoch; ``planned`` loaders only.

    Raises:
        ValueError: A loader over all samples can't be sharded.
    """
    if sharded:
        return loader
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        loader = shard_data(loader, rank, world_size)
    if not isinstance(loader, DataLoader) or is_over_shard(loader):
        return loader
    if any(hasattr(part, "set_epoch") for part in (loader.sampler, loader.batch_sampler)):
        return loader  # already sharded, for example by a DistributedSampler
    problem = describe_custom_sampling(loader)
    if problem:
        if world_size == 1:
            return loader
        raise ValueError(
            f"self.train_loader has {problem}, which miniray can't divide into {world_size} "
            "shards, so every rank would train on the same samples. Use a DistributedSampler, or "
            "implement load_data_shard(shard_id, num_shards) and create the loader there"
        )
    plan = EpochPlan(
        len(loader.dataset),
        loader.batch_size,
        world_size,
        accumulate=accumulate,
        uneven=uneven,
        drop_last=loader.drop_last,
        limit=limit,
    )
    shuffle = isinstance(loader.sampler, RandomSampler) and not overfits
    batches = PlannedBatches(plan, rank, shuffle, seed)
    if type(loader.dataset) is TensorDataset:  # draws no random numbers
        return replace_parts(loader, batch_sampler=batches)
    return replace_parts(loader, batch_sampler=batches, dataset=SeededDataset(loader.dataset))


def create_overfit_error() -> ValueError:
    """Return the error for a loader whose batches miniray doesn't choose."""
    return ValueError(
        "overfit_batches= needs a self.train_loader that miniray shards: a DataLoader over "
        "all samples, in order or shuffled. Other loaders choose their batches themselves"
    )


def shard_data(loader: Any, rank: int, world_size: int) -> Any:
    """Return the rank's part of a loader or dataset of miniray.data that isn't sharded yet.

    This includes a torch loader over a ``TorchIterableDataset``. Other loaders are returned
    unchanged. Raise ``ValueError`` if iteration has started.
    """
    is_torch = isinstance(loader, DataLoader)
    data = loader.dataset if is_torch else loader
    check_not_started(data, "self.train_loader", world_size)
    if world_size == 1 or not is_shardable(data):
        return loader
    shard = data if data.is_sharded else data.shard(rank, world_size)
    if hasattr(shard, "prepare"):
        shard.prepare()  # a filter or a cache build can take long, so not between barriers
    if shard is data:
        return loader
    return replace_parts(loader, dataset=shard) if is_torch else shard


def planned(loader: Any) -> PlannedBatches | None:
    """Return the planned batches of a loader, or None if user code determines the batches."""
    batches = getattr(loader, "batch_sampler", None)
    return batches if isinstance(batches, PlannedBatches) else None


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of all parts of a loader that shuffle."""
    names = ("sampler", "batch_sampler", "dataset")
    for part in [loader, *(getattr(loader, name, None) for name in names)]:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def length(loader: Any) -> int | None:
    """Return the number of batches of a loader, or None if it has no length."""
    try:
        return len(loader)
    except TypeError:  # an iterable without a length, or a loader over one
        return None
