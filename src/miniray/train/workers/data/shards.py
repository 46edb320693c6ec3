"""Check the argument ``data`` of a trainer, and create the loaders of workers from it.

The trainer puts its data into the object store once for all workers. For a dataset of files, these
are a few hundred bytes; an in-memory dataset includes its rows. Each worker selects its shard.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any, Literal

import miniray
from miniray.checks import check_int
from miniray.doctor.handles import find_handles
from miniray.errors import HandlesError
from miniray.train.workers.data.loaders import (
    describe_custom_sampling,
    is_over_shard,
    is_shardable,
    replace_parts,
    replace_rows,
    shard_loader,
)
from miniray.train.workers.group import filter_kwargs

Kind = Literal["rows", "torch loader", "shardable", "Hugging Face rows", "Hugging Face stream"]

_ACCEPTED = (
    "a torch Dataset or DataLoader, a dataset or loader of miniray.data, or a Hugging Face dataset"
)


@dataclasses.dataclass(frozen=True)
class TrainData:
    """The arguments ``data``, ``val_data`` and ``batch_size`` of a trainer.

    Raises:
        TypeError: ``data`` or ``val_data`` is of a kind that can't be sharded.
        ValueError: ``batch_size`` has no effect, or a loader can't be sharded.
        HandlesError: A dataset has open files or connections, which can't be sent to workers.
    """

    data: Any = None
    val_data: Any = None
    batch_size: int | None = None

    @classmethod
    def create(cls, data: Any, val_data: Any, batch_size: Any, num_workers: int) -> TrainData:
        """Check the arguments, and return them."""
        if batch_size is not None:
            check_int("batch_size", batch_size, 1)
        if data is None and val_data is None and batch_size is not None:
            raise TypeError(
                "batch_size= needs data=. Without data=, pass it to train(), which passes it to "
                "workers and hooks"
            )
        for name, given in (("data", data), ("val_data", val_data)):
            if given is not None:
                _check_data(name, given, num_workers)
        if batch_size is not None and is_loader(data):
            raise ValueError(_describe_own_size(data))
        return cls(data, val_data, batch_size)

    def __bool__(self) -> bool:
        return self.data is not None or self.val_data is not None


class DataRef:
    """The data in the object store. It is put there once per engine, when it is needed first."""

    def __init__(self, data: TrainData) -> None:
        self.data = data
        self._ref: Any = None

    def get(self) -> Any:
        """Return the reference, the same for all workers and their replacements."""
        if self._ref is None:
            self._ref = miniray.put(self.data)
        return self._ref

    def close(self) -> None:
        """Forget the reference when the engine stops."""
        self._ref = None


def find_kind(name: str, data: Any) -> Kind:
    """Return what ``data`` is. Raise ``TypeError`` if it can't be sharded."""
    kind = recognize(name, data)
    if kind is None:
        hint = _find_hint(data)
        raise TypeError(f"{name} must be {_ACCEPTED}, not {type(data).__name__}. {hint}")
    return kind


def recognize(name: str, data: Any) -> Kind | None:
    """Return what ``data`` is, or None. Raise ``TypeError`` for several splits of a dataset."""
    libraries = {key: sys.modules.get(key) for key in ("datasets", "torch.utils.data")}
    library = libraries["datasets"]
    if library is not None:
        if isinstance(data, library.Dataset):
            return "Hugging Face rows"
        if isinstance(data, library.IterableDataset):
            return "Hugging Face stream"
        if isinstance(data, (library.DatasetDict, library.IterableDatasetDict)):
            split = next(iter(data), "train")
            raise TypeError(
                f"{name} must be one split of a {type(data).__name__}, such as {name}[{split!r}]"
            )
    if is_shardable(data):
        return "shardable"
    torch_data = libraries["torch.utils.data"]
    if torch_data is not None:
        if isinstance(data, torch_data.DataLoader):
            return "shardable" if is_shardable(data.dataset) else "torch loader"
        if isinstance(data, torch_data.Dataset) and hasattr(data, "__len__"):
            return "rows"
    if callable(getattr(data, "shard", None)) and not isinstance(data, type):
        return "shardable"
    return None


def _find_hint(data: Any) -> str:
    module, name = type(data).__module__.partition(".")[0], type(data).__name__
    if name in ("DataFrame", "Table") and module in ("pandas", "polars", "pyarrow"):
        return (
            "Use miniray.data.ArrowDataset for its rows, or a torch TensorDataset of its columns."
        )
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.IterableDataset):
        return (
            "Every worker would read all of it. Pass a dataset with a length, or give the worker "
            "load_data_shard(shard_id, num_shards)."
        )
    return "Put anything with len and [] into miniray.data.IndexedDataset(...)."


def is_loader(data: Any) -> bool:
    """Return whether ``data`` yields batches instead of rows."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.DataLoader):
        return True
    return is_shardable(data) and hasattr(data, "batch_size")


def _check_data(name: str, data: Any, num_workers: int) -> None:
    kind = find_kind(name, data)
    problem = describe_custom_sampling(data) if kind == "torch loader" else ""
    if problem and num_workers > 1:
        raise ValueError(
            f"{name} has {problem}, which can't be sharded on {num_workers} workers. Leave it "
            "out, and set batch_size= and shuffle= of the DataLoader"
        )
    if kind in ("rows", "torch loader"):
        dataset = data.dataset if kind == "torch loader" else data
        handles = find_handles(dataset, name if dataset is data else f"{name}.dataset")
        if handles:
            listed = "\n".join(f"  {handle}" for handle in handles)
            raise HandlesError(
                f"{name} ({type(dataset).__qualname__}) can't be sent to workers:\n{listed}\n"
                "Open it where it is used: in __getitem__, on first use in each process."
            )


def _describe_own_size(loader: Any) -> str:
    return (
        f"batch_size= was passed, but data= is a {type(loader).__name__} with "
        f"batch_size={loader.batch_size}. Leave out one of them, or pass its dataset as data="
    )


def create_loader(
    name: str, data: Any, batch_size: int | None, rank: int, world_size: int, *, format: Any = None
) -> Any:
    """Return a loader for ``data``. Rows of map-style datasets aren't sharded yet.

    Args:
        name: Name of the argument, for errors.
        data: See ``TrainData``.
        batch_size: Rows per batch of this worker.
        rank: Index of this worker.
        world_size: Number of workers.
        format: Format of loaders of ``miniray.data`` that were created without one.

    Raises:
        ValueError: ``batch_size`` is missing, or the loader has its own.
    """
    kind = find_kind(name, data)
    if is_loader(data):
        if batch_size is not None:
            raise ValueError(_describe_own_size(data))
        if kind == "torch loader":
            return data
        return _shard_loader(data, rank, world_size, format)
    if batch_size is None:
        raise ValueError(
            f"{name} is a {type(data).__name__}, so batch_size= is required, the number of rows "
            "per batch and worker. Pass it to the trainer or to train()"
        )
    if kind == "shardable":
        from miniray.data import DataLoader, Dataset

        shard = data.shard(rank, world_size)
        if isinstance(shard, Dataset):
            return DataLoader(shard, batch_size, format=format)
    elif kind == "Hugging Face stream":
        shard = split_stream(data.with_format("torch"), rank, world_size)
    elif kind == "Hugging Face rows" and data.format["type"] is None:
        shard = data.with_format("torch")
    else:
        shard = data
    from torch.utils import data as torch_data

    return torch_data.DataLoader(shard, batch_size)


def _shard_loader(loader: Any, rank: int, world_size: int, format: Any) -> Any:
    if hasattr(loader, "shard"):
        shard = loader.shard(rank, world_size)
        if format is not None and hasattr(shard, "set_default_format"):
            shard.set_default_format(format)
        return shard
    return replace_parts(loader, dataset=loader.dataset.shard(rank, world_size))


def split_stream(data: Any, rank: int, world_size: int) -> Any:
    """Return a rank's part of a Hugging Face ``IterableDataset``."""
    from datasets.distributed import split_dataset_by_node

    shard = split_dataset_by_node(data, rank=rank, world_size=world_size)
    shard.is_sharded, shard.has_started = True, False  # so that it isn't sharded again
    return shard


class ShardedRows:
    """Rows ``rank``, ``rank + world_size``, … of a map-style dataset, for an evaluation.

    Loaders over it aren't sharded again.
    """

    is_sharded, has_started = True, False

    def __init__(self, dataset: Any, rank: int, world_size: int) -> None:
        self.dataset = dataset
        self._rows = range(rank, len(dataset), world_size)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self._rows[index]]

    def shard(self, rank: int, world_size: int) -> ShardedRows:
        """Return the rows of a different rank."""
        return ShardedRows(self.dataset, rank, world_size)


def create_val_loader(data: TrainData, batch_size: int | None, rank: int, world_size: int) -> Any:
    """Return the loader for this worker's shard of ``val_data``, without padding."""
    size = None
    if not is_loader(data.val_data):
        size = batch_size or getattr(data.data, "batch_size", None)
    loader = create_loader("val_data", data.val_data, size, rank, world_size, format="torch")
    if callable(prepare := getattr(loader, "prepare", None)):
        prepare()
    if is_shardable(loader) or is_over_shard(loader):
        return loader
    from torch.utils.data import SequentialSampler

    rows = ShardedRows(loader.dataset, rank, world_size)
    return replace_rows(loader, rows, SequentialSampler(rows), drop_last=False)


def give_data(
    user: Any,
    data: TrainData,
    rank: int,
    world_size: int,
    kwargs: Mapping[str, Any],
    *,
    has_own_load: bool,
    format: Any = "torch",
) -> Any:
    """Set the loaders of a worker, or call its ``load_data_shard`` with the shard as ``data``.

    Filters and caches of ``miniray.data`` are prepared. Return the shard, or the loader, which
    isn't sharded yet if it is torch's over all rows.

    Raises:
        TypeError: ``load_data_shard`` doesn't accept ``data``.
        ValueError: The worker has set one of the loaders itself, or ``batch_size`` is missing or
            has no effect.
    """
    size = kwargs.get("batch_size", data.batch_size)
    for option, given in (("data", data.data), ("val_data", data.val_data)):
        name = "train_loader" if option == "data" else "val_loader"
        if given is not None and getattr(user, name, None) is not None:
            raise ValueError(
                f"{type(user).__name__} sets self.{name}, and the trainer has {option}=. Use only "
                "one of them"
            )
    if data.val_data is not None:
        user.val_loader = create_val_loader(data, size, rank, world_size)
    if data.data is None and not has_own_load:
        return None
    if not has_own_load:
        loader = create_loader("data", data.data, size, rank, world_size, format=format)
        _prepare(loader)
        user.train_loader = loader
        return loader
    load = user.load_data_shard
    signature = inspect.signature(load)
    if data.data is None:
        load(rank, world_size, **filter_kwargs(signature, kwargs))
        return None
    if not filter_kwargs(signature, {"data": None}):
        raise TypeError(
            f"the trainer has data=, but load_data_shard() of {type(user).__name__} doesn't accept "
            "it. Implement load_data_shard(self, shard_id, num_shards, data)"
        )
    shard = create_shard(data, rank, world_size)
    _prepare(shard)
    load(rank, world_size, data=shard, **filter_kwargs(signature, kwargs))
    return shard


def _prepare(shard: Any) -> None:
    if callable(prepare := getattr(shard, "prepare", None)):
        prepare()  # a filter or a cache build can take long, so not between barriers


def create_shard(data: TrainData, rank: int, world_size: int) -> Any:
    """Return the shard that is passed to ``load_data_shard``: batches for a loader, else rows.

    The trainer's ``batch_size`` makes it a loader; ``train(batch_size=)`` is the worker's argument.
    """
    given, kind = data.data, find_kind("data", data.data)
    if is_loader(given) or data.batch_size is not None:
        loader = create_loader("data", given, data.batch_size, rank, world_size)
        return loader if kind == "shardable" else shard_loader(loader, rank, world_size)
    if kind == "shardable":
        return given.shard(rank, world_size)
    if kind == "Hugging Face stream":
        return split_stream(given, rank, world_size)
    if kind == "Hugging Face rows":
        return given.shard(num_shards=world_size, index=rank)
    from torch.utils.data import Subset

    return Subset(given, range(rank, len(given), world_size))
