"""Gradients of copies averaged, and the norm of all gradients wherever they are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist


def local(tensor: Any) -> Any:
    """This rank's part of a tensor that may be cut over ranks."""
    return getattr(tensor, "_local_tensor", tensor)


def is_shard(tensor: Any) -> bool:
    """Whether other ranks have other parts of it."""
    placements = getattr(tensor, "placements", ())
    return any(placement.is_shard() for placement in placements)


def average_over_copies(parameters: Iterable[Any], samples: int, group: Any, device: Any) -> int:
    """Make gradients those of the mean over all copies' samples; returns how many there were.

    A copy may have fewer samples than others in this step, or none. A collective of ``group``.
    """
    parameters = [p for p in parameters if p.requires_grad]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [local(p.grad) for p in parameters]
    count = torch.tensor([float(samples)], device=device)
    # One message for each type of number: small ones cost more than their bytes.
    by_type: dict[Any, list[Any]] = {count.dtype: []}
    for gradient in gradients:
        by_type.setdefault(gradient.dtype, []).append(gradient)
    flat: dict[Any, Any] = {
        dtype: torch.cat([g.reshape(-1) for g in found]) * samples if found else None
        for dtype, found in by_type.items()
    }
    first = flat[count.dtype]
    flat[count.dtype] = count if first is None else torch.cat([first, count])
    for buffer in flat.values():
        dist.all_reduce(buffer, group=group)
    total = float(flat[count.dtype][-1])
    for dtype, found in by_type.items():
        at = 0
        for gradient in found:
            part = flat[dtype][at : at + gradient.numel()]
            gradient.copy_(part.view_as(gradient).div_(total))
            at += gradient.numel()
    return round(total)


def clip(parameters: Iterable[Any], most: float, tensor_group: Any, pipeline_group: Any) -> float:
    """Scale gradients so that the norm of all of them, on all ranks, is ``most`` at the most.

    Returns the norm before. A collective of both groups (None: there is nobody else).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    device = local(gradients[0]).device if gradients else torch.device("cpu")
    cut = torch.zeros(1, dtype=torch.float64, device=device)
    whole = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        square = local(gradient).detach().double().pow(2).sum()
        if is_shard(gradient):
            cut += square
        else:
            whole += square  # every shard's rank has the same: it counts once
    if tensor_group is not None:
        dist.all_reduce(cut, group=tensor_group)
    total = cut + whole
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    norm = math.sqrt(float(total))
    if norm > most:
        for gradient in gradients:
            local(gradient).mul_(most / (norm + 1e-6))
    return norm
