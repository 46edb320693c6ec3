"""Small checks and the masking that the algorithms share."""

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


def one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def whole(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name} must be an int >= {low}, not {value!r}")


def in_range(name: str, value: object, low: float, high: float = float("inf")) -> None:
    """Refuses NaN too, which compares false with everything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        upper = "" if high == float("inf") else f" and <= {high:g}"
        raise ValueError(f"{name} must be a number >= {low:g}{upper}, not {value!r}")
