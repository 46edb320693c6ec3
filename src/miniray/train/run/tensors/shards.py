"""Shards: the parts of a tensor that ranks hold, and whole tensors from them.

A shard in a state is a dict with the keys of ``create_shard``. Other tensors are equal on all ranks
that have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KEYS = {"shard", "shape", "offset"}


def create_shard(values: Any, shape: Sequence[int], offset: Sequence[int]) -> dict[str, Any]:
    """Return the part ``values`` of a tensor with this ``shape``, which starts at ``offset``."""
    return {"shard": values, "shape": list(shape), "offset": list(offset)}


def is_shard(value: Any) -> bool:
    """Return whether ``value`` is the part of a tensor that one rank holds."""
    return isinstance(value, Mapping) and set(value) == _KEYS


def merge_shards(states: Sequence[Any]) -> Any:
    """Return the state of all ranks, with whole tensors.

    Mappings contain the keys of all ranks. A value that several ranks have is that of the first.
    """
    first = states[0]
    if is_shard(first):
        return _join(states)
    if not isinstance(first, Mapping):
        return first
    merged = {}
    for key in dict.fromkeys(key for state in states for key in state):
        merged[key] = merge_shards([state[key] for state in states if key in state])
    return merged


def _join(shards: Sequence[Mapping[str, Any]]) -> Any:
    whole = shards[0]["shard"].new_empty(shards[0]["shape"])
    for shard in shards:
        values, offset = shard["shard"], shard["offset"]
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        whole[place] = values
    return whole
