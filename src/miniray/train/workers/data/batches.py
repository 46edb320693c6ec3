"""Batches of any kind: move them to a device, and count their samples and tokens."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any


def move_batch(batch: Any, device: Any) -> Any:
    """Return ``batch`` with all tensors moved to ``device``."""
    if device is None:
        return batch
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        there = {key: move_batch(value, device) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return there
        own = copy.copy(batch)  # a user's class, which may have further attributes
        own.update(there)
        return own
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_batch(value, device) for value in batch)
    if _is_record(batch):
        own = copy.copy(batch)
        for name, value in vars(batch).items():
            object.__setattr__(own, name, move_batch(value, device))  # also if it is frozen
        return own
    return batch


def _is_record(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and hasattr(batch, "__dict__")


def count_tokens(batch: Any) -> Any:
    """Return the number of tokens of a batch with ``attention_mask`` or ``input_ids``, else 0.

    It may be a tensor, so that no step waits for a GPU.
    """
    if not isinstance(batch, Mapping):
        return 0
    mask: Any = batch.get("attention_mask")
    ids: Any = batch.get("input_ids")
    if hasattr(mask, "sum"):
        return mask.sum()
    return ids.numel() if hasattr(ids, "numel") else 0


def count_samples(batch: Any) -> int:
    """Return the number of samples of a batch: the length of its first tensor, or of a column."""
    if getattr(batch, "shape", None):
        return int(batch.shape[0])
    if _is_record(batch):
        batch = vars(batch)
    if not isinstance(batch, (Mapping, list, tuple)):
        return 1
    items = list(batch.values() if isinstance(batch, Mapping) else batch)
    for item in items:
        if getattr(item, "shape", None):
            return int(item.shape[0])
    for item in items:
        if isinstance(batch, Mapping) and _is_ragged(item):
            return len(item)
        if isinstance(item, (Mapping, list, tuple)) or hasattr(item, "shape"):
            return count_samples(item)
    return len(batch)


def _is_ragged(column: Any) -> bool:
    """Return whether a column has a list of plain values for each row."""
    first = column[0] if isinstance(column, list) and column else None
    return isinstance(first, list) and not any(hasattr(value, "shape") for value in first[:1])
