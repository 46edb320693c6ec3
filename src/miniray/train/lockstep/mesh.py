"""Meshes of the ranks, and tensors that are cut over them, as tensors in one piece and back.

A mesh's groups speak the backend that the ranks have met with: ``init_device_mesh`` takes NCCL for
GPUs even where the ranks share one and have met over gloo. What is saved has its whole shape, so a
checkpoint knows nothing of the layout it was written on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor


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


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that may be cut over ranks."""
    return getattr(tensor, "_local_tensor", tensor)


def whole(tensor: Any) -> Any:
    """The tensor in one piece, on the CPU. A collective where it is cut over ranks."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().clone()
    if stages_through_host(tensor.device):
        tensor = _on_host(tensor)
    return tensor.full_tensor().detach().cpu().clone()


def _on_host(tensor: Any) -> Any:
    """The same, each part in host memory: gloo would read a GPU's as its own, and crash."""
    mesh = tensor.device_mesh
    return DTensor.from_local(
        tensor.to_local().detach().cpu(),
        DeviceMesh.from_group(mesh.get_group(), "cpu"),
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def put_weights(targets: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Fill ``targets``, which may be cut over ranks, from weights in one piece, by name.

    ``ValueError`` where one is missing or has another shape. Others may be there.
    """
    for name, target in targets.items():
        value = weights.get(name)
        shape = None if value is None else list(value.shape)
        if shape != list(target.shape):
            raise ValueError(
                f"the weights do not fit the model: {name} is {list(target.shape)} in the model, "
                f"{'not there' if shape is None else shape} in the weights"
            )
        with torch.no_grad():
            target.copy_(cut_like(target, torch.as_tensor(value)))


def whole_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's numbers of a parameter, in one piece. A collective where they are cut."""
    return {key: whole(v) if isinstance(v, torch.Tensor) else v for key, v in values.items()}


def cut_numbers(parameter: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's numbers of a parameter, cut as it is; a count of steps is left as it is."""
    return {
        key: cut_like(parameter, v) if getattr(v, "shape", None) == parameter.shape else v
        for key, v in values.items()
    }


def cut_like(target: Any, value: Any) -> Any:
    """``value`` cut as ``target`` is. Nothing is sent: every rank has all of ``value``."""
    value = value.to(local(target).device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def share_buffers(modules: Iterable[Any], source: int = 0, group: Any = None) -> None:
    """Give all ranks the buffers of rank ``source`` (running statistics). A collective."""
    for module in modules:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=source, group=group)
