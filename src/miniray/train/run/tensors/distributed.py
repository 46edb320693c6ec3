"""Sharded state on disk, by ``torch.distributed.checkpoint``: each rank writes what it holds.

No process has the whole state. A rank writes one safetensors file, whose metadata says where its
tensors are in the whole ones, so nothing is pickled and ``ShardFiles`` reads them without ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from miniray.train.run.tensors import tensorfile
from miniray.train.run.tensors.encoding import StoredTensor
from miniray.train.run.tensors.shards import PLACES, SHARDS, get_shard_file


class SavedShards(NamedTuple):
    """The files and the state of a rank after ``save_shards``.

    Attributes:
        state: The state, with a ``StoredTensor`` in place of each tensor.
        file: The name of this rank's file; None if it had nothing to write.
        problem: Why writing failed on some rank.
    """

    state: Any
    file: str | None = None
    problem: str | None = None


def save_shards(directory: Path, state: Any) -> SavedShards:
    """Write the tensors of this rank's state to ``directory``. A collective.

    Tensors with the same path in the state are parts of one tensor if they are sharded. Otherwise
    they are copies, of which the rank with the lowest number writes its own.
    """
    import torch

    tensors: dict[str, Any] = {}

    def extract(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            tensors[path] = value
            return StoredTensor(SHARDS, path)
        if isinstance(value, Mapping):
            return {key: extract(item, f"{path}.{key}") for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(extract(item, f"{path}.{i}") for i, item in enumerate(value))
        return value

    structure = extract(state, "state")
    writer = _SafetensorsWriter(directory / get_shard_file(dist.get_rank()))
    planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    try:
        dcp.save(tensors, storage_writer=writer, planner=planner)
    except CheckpointException as error:  # of any rank, on all ranks
        reasons = {f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()}
        return SavedShards(structure, None, "; ".join(sorted(reasons)))
    return SavedShards(structure, writer.path.name if writer.path.exists() else None)


class _SafetensorsWriter(dcp.StorageWriter):  # type: ignore[misc]
    """Writes the tensors that the plan assigns to this rank to one file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the directory exists."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        entries: dict[str, tensorfile.Entry] = {}
        places: dict[str, Any] = {}
        results = []
        for number, item in enumerate(plan.items):
            if item.type == WriteItemType.BYTE_IO:
                raise TypeError(f"{item.index.fqn} isn't a tensor")
            values = planner.resolve_data(item).detach()
            dtype = str(values.dtype).removeprefix("torch.")
            if dtype not in tensorfile.TORCH_TYPES:
                raise TypeError(f"{item.index.fqn} has type {dtype}, which safetensors lacks")
            name = f"{item.index.fqn}@{number}"
            entries[name] = tensorfile.Entry(dtype, tuple(values.shape), values)
            chunk, size = item.tensor_data.chunk, item.tensor_data.size
            places[name] = [item.index.fqn, list(size), list(chunk.offsets)]
            results.append(WriteResult(item.index, entries[name].nbytes, self.path.name))
        if entries:
            tensorfile.write(self.path, entries, {PLACES: json.dumps(places)})
        written: Any = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Do nothing: the files describe themselves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return False
