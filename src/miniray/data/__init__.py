"""Data for training: every rank reads its own rows, exactly once, in bounded memory.

Needs nothing else of miniray, so it works in a torchrun, Lightning or Accelerate script. What a
name needs (numpy, pyarrow, torch) is imported when the name is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miniray import lazy

if TYPE_CHECKING:
    from miniray.data.dataset import Dataset
    from miniray.data.datasets import ArrowDataset, IndexedDataset, JsonlDataset, ParquetDataset
    from miniray.data.loader.loader import DataLoader
    from miniray.data.mixture import Mixture
    from miniray.data.plan.progress import merge_states
    from miniray.data.plan.shard import shard_indices
    from miniray.data.rlhf.dataset import RLHFDataset

__all__ = [
    "ArrowDataset",
    "DataLoader",
    "Dataset",
    "IndexedDataset",
    "JsonlDataset",
    "Mixture",
    "ParquetDataset",
    "RLHFDataset",
    "merge_states",
    "shard_indices",
]

_WHERE = {
    "ArrowDataset": ".datasets",
    "DataLoader": ".loader.loader",
    "Dataset": ".dataset",
    "IndexedDataset": ".datasets",
    "JsonlDataset": ".datasets",
    "Mixture": ".mixture",
    "ParquetDataset": ".datasets",
    "RLHFDataset": ".rlhf",
    "merge_states": ".plan.progress",
    "shard_indices": ".plan.shard",
}

__getattr__, __dir__ = lazy.names(__name__, _WHERE)
