"""The masking that the algorithms share."""

from __future__ import annotations

import torch
from torch import Tensor


def same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would broadcast: (B, T) with (B, 1) gives numbers, and wrong ones."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 2:
        raise ValueError(f"tensors must all be (sequences, tokens) of one shape, not {shapes}")


def selected(x: Tensor, chosen: Tensor) -> Tensor:
    """``x`` where chosen, else 0. Unlike a product with the mask this keeps NaN of padding out."""
    return torch.where(chosen, x, torch.zeros((), dtype=x.dtype, device=x.device))
