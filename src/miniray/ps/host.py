"""GPU weights on their way to the host.

The server computes on the CPU and needs no GPU. On the embedded engines nothing has to be done:
a CUDA tensor that travels is copied to the host through pinned memory and arrives as a CPU tensor.
``to_host`` does the same by hand: for the Ray engine, whose pickling is Ray's own, or to overlap
the copy with other work.
"""

from __future__ import annotations

import sys
from typing import Any


def to_host(weights: Any) -> Any:
    """The same structure with CUDA tensors replaced by CPU tensors; everything else as it is.

    Copies of all tensors are under way at once, into pinned memory that torch keeps and uses again
    the next time, and are complete on return. Where memory cannot be pinned they are plain copies.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return weights
    devices: set[Any] = set()
    moved = _moved(torch, weights, devices)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return moved


def _moved(torch: Any, node: Any, devices: set[Any]) -> Any:
    if isinstance(node, torch.Tensor):
        if node.device.type != "cuda":
            return node
        devices.add(node.device)
        try:
            host = torch.empty(node.shape, dtype=node.dtype, pin_memory=True)
        except RuntimeError:  # the system's limit on locked memory
            return node.detach().cpu()
        return host.copy_(node.detach(), non_blocking=True)
    if isinstance(node, dict):
        items = {key: _moved(torch, value, devices) for key, value in node.items()}
        if type(node) is dict:
            return items
        copy = node.copy()
        copy.update(items)
        return copy
    if isinstance(node, (list, tuple)):
        parts = [_moved(torch, value, devices) for value in node]
        if isinstance(node, list):
            return parts
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return node
