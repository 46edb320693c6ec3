"""Loaders of workers: shards of them, loaders for evaluation, and their positions."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_EVAL_BATCH = 256


def shard_loader(loader: Any, shard_id: int, num_shards: int) -> Any:
    """Return a loader like this one over the rows of one shard.

    These are the rows ``shard_id``, ``shard_id + num_shards``, … of a torch loader. A loader of
    miniray.data shards itself unless it was created with ``rank`` and ``world_size``. Every row is
    in exactly one shard. Raise ``TypeError`` for a loader that can't be sharded.
    """
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset

    if num_shards == 1:
        return loader
    if is_shardable(loader):
        return loader if loader.is_sharded else loader.shard(shard_id, num_shards)
    if is_over_shard(loader):
        return loader
    is_torch = isinstance(loader, DataLoader)
    problem = describe_custom_sampling(loader) if is_torch else f"type {type(loader).__name__}"
    if problem:
        raise TypeError(
            f"this loader can't be sharded, because it has {problem}. Implement "
            "load_data_shard(self, shard_id, num_shards) in the worker, and create "
            "self.train_loader there"
        )
    rows = Subset(loader.dataset, range(shard_id, len(loader.dataset), num_shards))
    sampler: Any = SequentialSampler(rows)
    if isinstance(loader.sampler, RandomSampler) and len(rows):
        sampler = RandomSampler(rows, generator=loader.sampler.generator)
    return replace_rows(loader, rows, sampler, drop_last=loader.drop_last)


def replace_rows(loader: Any, rows: Any, sampler: Any, *, drop_last: bool) -> Any:
    """Return a copy of a torch loader over different rows, in batches of the same size."""
    from torch.utils.data import BatchSampler

    batches = BatchSampler(sampler, loader.batch_size, drop_last)
    return replace_parts(loader, dataset=rows, sampler=sampler, batch_sampler=batches)


def replace_parts(loader: Any, **changes: Any) -> Any:
    """Return a copy of a torch loader with different parts. Attributes of subclasses are kept."""
    own = copy.copy(loader)
    # A loader doesn't allow the assignment. Its running processes (persistent_workers) have the
    # old parts.
    vars(own).update(changes, _iterator=None)
    return own


def describe_custom_sampling(loader: Any) -> str:
    """Return a description of the custom sampling of a loader, or "" if it has none."""
    from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return f"an IterableDataset ({type(loader.dataset).__qualname__})"
    if loader.batch_sampler is None:
        return "batch_size=None"
    if loader.batch_size is None:
        return f"a custom batch sampler ({type(loader.batch_sampler).__qualname__})"
    if type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(loader.dataset)
    ):
        return ""
    return f"a custom sampler ({type(sampler).__qualname__})"


def is_shardable(data: Any) -> bool:
    """Return whether ``data`` is a loader or dataset of miniray.data."""
    return all(hasattr(data, name) for name in ("is_sharded", "has_started", "shard"))


def is_over_shard(loader: Any) -> bool:
    """Return whether a torch loader reads a dataset of miniray.data that is already sharded."""
    data: Any = getattr(loader, "dataset", None)
    return is_shardable(data) and bool(data.is_sharded)


def check_not_started(data: Any, name: str, num_shards: int) -> None:
    """Raise ``ValueError`` if iteration over ``data`` started before it could be sharded."""
    if num_shards > 1 and is_shardable(data) and data.has_started and not data.is_sharded:
        raise ValueError(
            f"{name} was iterated before it was sharded, so each of the {num_shards} workers has"
            " read all rows. Pass rank= and world_size= to its dataset, or iterate over a different"
            " dataset before training"
        )


def create_eval_loader(data: Any, like: Any) -> Any:
    """Return a loader of ``data``: a dataset, a sequence of rows, or columns of tensors."""
    import torch
    from torch.utils.data import DataLoader, StackDataset, TensorDataset

    if isinstance(data, tuple) and all(hasattr(column, "shape") for column in data):
        columns = (c if isinstance(c, torch.Tensor) else torch.tensor(c) for c in data)
        data = TensorDataset(*columns)
    elif isinstance(data, Mapping):
        data = StackDataset(**data)
    size = getattr(like, "batch_size", None) or _EVAL_BATCH
    return DataLoader(data, batch_size=size, collate_fn=getattr(like, "collate_fn", None))


def get_loader_state(loader: Any, has_position: bool = True) -> dict[str, Any]:
    """Return the loader's position, if it has a ``state_dict``, and its random state."""
    own = loader.state_dict() if has_position and hasattr(loader, "state_dict") else None
    generator = getattr(loader, "generator", None)
    return {
        "own": own,
        "generator": None if generator is None else generator.get_state(),
        "running": getattr(loader, "_iterator", None) is not None,
    }


def load_loader_state(loader: Any, state: Mapping[str, Any]) -> None:
    if state.get("running") and getattr(loader, "persistent_workers", False):
        iter(loader)  # start its processes now, because starting them draws random numbers
    if state["own"] is not None and hasattr(loader, "load_state_dict"):
        loader.load_state_dict(state["own"])
    generator = getattr(loader, "generator", None)
    if state["generator"] is not None and generator is not None:
        generator.set_state(state["generator"])
