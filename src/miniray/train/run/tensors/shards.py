"""Shards: the parts of a tensor that ranks hold, and whole tensors from them.

A shard in a state is a dict with the keys of ``create_shard``. Other tensors are equal on all ranks
that have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from miniray.train.run.tensors.tensorfile import TensorFile

#: The group of arrays that are in the files of several ranks.
SHARDS = "rank-shards"
#: The metadata of these files: name → name of the whole tensor, its shape, and the part's offset.
PLACES = "places"
_SHARD_FILE = re.compile(r"rank-\d+\.safetensors")
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


def get_shard_file(rank: int) -> str:
    """Return the name of the file with what a rank holds."""
    return f"rank-{rank:05d}.safetensors"


def is_shard_file(name: str) -> bool:
    """Return whether a file of a checkpoint has such a name."""
    return _SHARD_FILE.fullmatch(name) is not None


class ShardFiles:
    """The whole tensors in the files of all ranks. ``decode`` reads them like those of one file."""

    def __init__(self, files: Iterable[TensorFile]) -> None:
        self._places: dict[str, list[tuple[TensorFile, str, list[int], list[int]]]] = {}
        for file in files:
            for name, (whole, shape, offset) in json.loads(file.metadata[PLACES]).items():
                self._places.setdefault(whole, []).append((file, name, shape, offset))

    def numpy(self, name: str) -> Any:
        """Return the tensor as an array."""
        return self.torch(name).numpy()

    def torch(self, name: str) -> Any:
        """Return a tensor; only its parts are read. Raise ``ValueError`` if one is missing."""
        shards = [
            create_shard(file.torch(key), shape, offset)
            for file, key, shape, offset in self._places[name]
        ]
        whole = _join(shards)
        if sum(shard["shard"].numel() for shard in shards) < whole.numel():
            raise ValueError(f"a part of {name} is missing")
        return whole


def _join(shards: Sequence[Mapping[str, Any]]) -> Any:
    whole = shards[0]["shard"].new_empty(shards[0]["shape"])
    for shard in shards:
        values, offset = shard["shard"], shard["offset"]
        place = tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))
        whole[place] = values
    return whole
