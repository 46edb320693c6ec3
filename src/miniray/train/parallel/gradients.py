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


def average_over_copies(parameters: Iterable[Any], samples: int, group: Any, device: Any) -> None:
    """Make gradients those of the mean over all copies' samples. A collective of ``group``.

    A copy may have fewer samples than others in this step, or none.
    """
    count = torch.tensor([float(samples)], device=device)
    # One message for each type of number: small ones cost more than their bytes.
    by_type: dict[Any, list[Any]] = {count.dtype: [count]}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradient = local(parameter.grad)
        by_type.setdefault(gradient.dtype, []).append(gradient.mul_(samples))
    sums = {dtype: torch.cat([g.reshape(-1) for g in found]) for dtype, found in by_type.items()}
    for buffer in sums.values():
        dist.all_reduce(buffer, group=group)
    total = float(sums[count.dtype][0])
    for dtype, found in by_type.items():
        summed = sums[dtype].split([gradient.numel() for gradient in found])
        for gradient, part in zip(found, summed, strict=True):
            gradient.copy_(part.view_as(gradient).div_(total))


def clip(parameters: Iterable[Any], most: float, tensor_group: Any, pipeline_group: Any) -> None:
    """Scale gradients so that the norm of all of them, on all ranks, is ``most`` at the most.

    A collective of both groups (None: there is nobody else).
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
