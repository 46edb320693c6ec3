"""Meshes of devices whose groups speak the backend that the ranks have met with.

``init_device_mesh`` takes NCCL for GPUs even where the ranks share one and have met over gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def make_mesh(device: Any, sizes: Mapping[str, int]) -> Any:
    """A mesh of all ranks, in their order. A collective: every rank makes every group."""
    names = tuple(sizes)
    ranks = torch.arange(dist.get_world_size()).reshape(*sizes.values())
    if len(names) == 1:
        return DeviceMesh.from_group(dist.group.WORLD, device.type, mesh_dim_names=names)
    mine: list[Any] = []
    for dimension in range(len(names)):
        rows = ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension])
        for row in rows.tolist():
            made = dist.new_group(row)
            if dist.get_rank() in row:
                mine.append(made)
    return DeviceMesh.from_group(mine, device.type, mesh=ranks, mesh_dim_names=names)


def stages_through_host(device: Any) -> bool:
    """Whether tensors must be in host memory to be sent from rank to rank: gloo, and a GPU."""
    return bool(device.type == "cuda" and dist.get_backend() == "gloo")
