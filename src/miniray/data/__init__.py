"""Data for training: every rank reads its rows exactly once, in bounded memory.

Independent of the rest of miniray, so it works in a torchrun, Lightning or Accelerate script.
NumPy, pyarrow and torch are imported when a name that requires them is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from miniray import lazy

if TYPE_CHECKING:
    from miniray.data.dataset import Dataset
    from miniray.data.datasets import ArrowDataset, IndexedDataset, JsonlDataset, ParquetDataset
    from miniray.data.loader.loader import DataLoader
    from miniray.data.mixture import Mixture
    from miniray.data.plan.indices import shard_indices
    from miniray.data.plan.progress import merge_states
    from miniray.data.rlhf.dataset import RLHFDataset
    from miniray.data.sources.row_cache import CacheFullError, RowCache

__all__ = [
    "ArrowDataset",
    "CacheFullError",
    "DataLoader",
    "Dataset",
    "IndexedDataset",
    "JsonlDataset",
    "Mixture",
    "ParquetDataset",
    "RLHFDataset",
    "RowCache",
    "ShardableData",
    "merge_states",
    "shard_indices",
]

_WHERE = {
    "ArrowDataset": ".datasets",
    "CacheFullError": ".sources.row_cache",
    "DataLoader": ".loader.loader",
    "Dataset": ".dataset",
    "IndexedDataset": ".datasets",
    "JsonlDataset": ".datasets",
    "Mixture": ".mixture",
    "ParquetDataset": ".datasets",
    "RLHFDataset": ".rlhf",
    "RowCache": ".sources.row_cache",
    "merge_states": ".plan.progress",
    "shard_indices": ".plan.indices",
}

__getattr__, __dir__ = lazy.names(__name__, _WHERE)


@runtime_checkable
class ShardableData(Protocol):
    """Data that a trainer can shard and resume. Datasets and loaders of this package implement it.

    Other libraries can implement it as well.
    """

    def shard(self, rank: int, world_size: int) -> ShardableData:
        """Return the data of a rank."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless it is the current one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state, on any number of ranks."""
        ...

    def __iter__(self) -> Iterator[Any]:
        """Yield the rest of the epoch."""
        ...

    def __len__(self) -> int:
        """Return the number of remaining items of the epoch."""
        ...
