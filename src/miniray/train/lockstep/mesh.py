"""Meshes of ranks, and conversion of tensors between sharded and whole.

The groups of a mesh use the backend of the process group: ``init_device_mesh`` would use NCCL for
GPUs even if ranks share one and use gloo. Saved tensors are whole, so a checkpoint doesn't depend
on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from miniray.errors import CheckpointError
from miniray.train.run.tensors.shards import create_shard, is_shard
from miniray.train.torch_private import get_shard_offset


def make_mesh(device: Any, sizes: Mapping[str, int]) -> Any:
    """Return a mesh of all ranks, in their order. A collective: every rank creates every group."""
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
    """Return whether tensors must be in host memory to be sent between ranks: gloo and a GPU."""
    return bool(device.type == "cuda" and dist.get_backend() == "gloo")


def local(tensor: Any) -> Any:
    """Return this rank's part of a tensor that may be sharded."""
    return getattr(tensor, "_local_tensor", tensor)


def take_part(tensor: Any) -> Any:
    """Return this rank's part of a tensor: a shard if it is sharded. No collective and no copy."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return create_shard(local(tensor).detach(), tensor.shape, get_shard_offset(tensor))


def gather_full(tensor: Any) -> Any:
    """Return the whole tensor, on the CPU. A collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu().clone()
    if stages_through_host(tensor.device):
        tensor = _on_host(tensor)
    return tensor.full_tensor().detach().cpu().clone()


def _on_host(tensor: Any) -> Any:
    """Return the tensor with parts in host memory: gloo crashes if it reads those of a GPU."""
    mesh = tensor.device_mesh
    return DTensor.from_local(
        tensor.to_local().detach().cpu(),
        DeviceMesh.from_group(mesh.get_group(), "cpu"),
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def load_weights(targets: Mapping[str, Any], weights: Mapping[str, Any]) -> None:
    """Copy whole weights to ``targets``, which may be sharded, by name.

    Raise ``ValueError`` if a weight is missing or has a different shape. Others are ignored.
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
            target.copy_(shard_like(target, torch.as_tensor(value)))


def gather_optimizer_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's values of a parameter, whole. A collective if they are sharded."""
    return {key: gather_full(v) if isinstance(v, torch.Tensor) else v for key, v in values.items()}


def shard_optimizer_values(parameter: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's values, sharded like their parameter, except a count of steps."""
    return {
        key: shard_like(parameter, v) if getattr(v, "shape", None) == parameter.shape else v
        for key, v in values.items()
    }


def get_local_optimizer(
    optimizer: torch.optim.Optimizer, take: Callable[[Any], Any] = take_part
) -> dict[str, Any]:
    """Return the optimizer's ``state_dict`` with what ``take`` returns for sharded tensors.

    No collective. Raise ``CheckpointError`` if a tensor isn't sharded like its parameter.
    """
    saved, owned = optimizer.state_dict(), _list_parameters(optimizer)
    numbers = {i: _get_shards(owned[i], values, take) for i, values in saved["state"].items()}
    return {**saved, "state": numbers}


def load_local_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore ``get_local_optimizer`` of the same rank in the same layout."""
    owned = _list_parameters(optimizer)
    numbers = {i: _restore_shards(owned[i], values) for i, values in saved["state"].items()}
    optimizer.load_state_dict({**saved, "state": numbers})


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _get_shards(
    parameter: Any, values: Mapping[str, Any], take: Callable[[Any], Any]
) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if isinstance(value, DTensor):
            layout = (value.shape, value.placements)
            if layout != (parameter.shape, getattr(parameter, "placements", None)):
                raise CheckpointError(f"the optimizer's {key!r} isn't sharded like its parameter")
            value = take(value)
        found[key] = value
    return found


def _restore_shards(parameter: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if is_shard(value):
            shard = value["shard"].to(local(parameter).device, copy=True)
            value = DTensor.from_local(
                shard,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        elif isinstance(value, torch.Tensor):
            value = value.clone()
        found[key] = value
    return found


def load_tensors(targets: Iterable[tuple[str, Any]], values: Mapping[str, Any]) -> None:
    """Copy this rank's values, which ``take_part`` returned, into tensors of the same names."""
    with torch.no_grad():
        for name, target in targets:
            value = values[name]
            local(target).copy_(value["shard"] if is_shard(value) else value)


def compute_checksums(parameters: Iterable[tuple[str, Any]]) -> dict[str, int]:
    """Return a checksum of this rank's part of each parameter: the sum of its bits as integers.

    A changed bit changes the sum, which is taken modulo 2**64.
    """
    names: list[str] = []
    sums: list[torch.Tensor] = []
    for name, parameter in parameters:
        total = _sum_bits(local(parameter).detach().reshape(-1).view(torch.uint8))
        names.append(name)
        sums.append(total.to(sums[0].device) if sums else total)
    return dict(zip(names, torch.stack(sums).tolist() if sums else (), strict=True))


def _sum_bits(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of bytes, 8 of which are read at once as an integer.

    torch adds integers of this type about 30 times as fast as those that it has to convert.
    """
    if values.storage_offset() % 8:
        values = values.clone()  # torch doesn't view these as larger integers
    whole = len(values) - len(values) % 8
    return values[:whole].view(torch.int64).sum() + values[whole:].sum()


def shard_like(target: Any, value: Any) -> Any:
    """Return ``value`` sharded like ``target``. Nothing is sent: every rank has the whole value."""
    value = value.to(local(target).device)
    if not isinstance(target, DTensor):
        return value
    return distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)


def share_buffers(modules: Iterable[Any], source: int = 0, group: Any = None) -> None:
    """Give all ranks the buffers of rank ``source`` (running statistics). A collective."""
    for module in modules:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=source, group=group)
