"""A server's state for checkpoints: nothing but dicts, lists, strings, numbers and arrays.

It can be written as JSON with the arrays in safetensors, and read without pickle. It does not
depend on the number of servers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from miniray.ps.model import Model
from miniray.ps.weights import Layout

FORMAT = 1


def save(model: Model, version: int, worker_weights: Mapping[Hashable, float]) -> dict[str, Any]:
    layout = model.layout
    return {
        "format": FORMAT,
        "version": version,
        "strategy": model.strategy.name,
        "strategy_state": model.strategy.state_dict(),
        "worker_weights": [[worker, weight] for worker, weight in worker_weights.items()],
        "weights": None if layout is None or model.weights is None else _leaves(model.weights),
        "structure": None if layout is None or model.weights is None else _outline(model.weights),
        "buffers": model.buffers(),
    }


def load(model: Model, saved: Mapping[str, Any]) -> tuple[int, dict[Hashable, float]]:
    """Put the saved state into ``model``; returns version and worker weights.

    Raises ``ValueError`` before anything is changed when it is not such a state.
    """
    if saved.get("format") != FORMAT:
        raise ValueError(f"not the state of a parameter server: format {saved.get('format')!r}")
    if saved["strategy"] != model.strategy.name:
        raise ValueError(
            f"the state is of strategy {saved['strategy']!r}, this server has "
            f"{model.strategy.name!r}"
        )
    if saved["structure"] is not None:
        weights = _rebuild(saved["structure"], iter(saved["weights"]))
        _check_buffers(model, Layout(weights), saved["buffers"])
        model.set(weights)
        model.load_buffers({n: [np.asarray(a) for a in b] for n, b in saved["buffers"].items()})
    model.strategy.load_state_dict(saved["strategy_state"])
    return int(saved["version"]), dict(saved["worker_weights"])


def _check_buffers(model: Model, layout: Layout, buffers: Mapping[str, Any]) -> None:
    sizes = [leaf.size for leaf in layout.leaves if leaf.role == "real" and leaf.size]
    if set(buffers) != set(model.strategy.buffers):
        raise ValueError(
            f"the state has buffers {sorted(buffers)}, strategy {model.strategy.name!r} has "
            f"{sorted(model.strategy.buffers)}"
        )
    for name, arrays in buffers.items():
        if [len(a) for a in arrays] != sizes:
            raise ValueError(f"buffer {name!r} of the state does not fit its weights")


def _leaves(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [leaf for value in node.values() for leaf in _leaves(value)]
    if isinstance(node, (list, tuple)):
        return [leaf for value in node for leaf in _leaves(value)]
    if isinstance(node, np.generic):
        return [np.asarray(node)]
    return [node]


def _outline(node: Any) -> Any:
    """The structure without its leaves, each of which is a short string saying what it is."""
    if isinstance(node, dict):
        kind = "ordered" if isinstance(node, OrderedDict) else "dict"
        return {"kind": kind, "keys": list(node), "items": [_outline(v) for v in node.values()]}
    if isinstance(node, (list, tuple)):
        kind = "list" if isinstance(node, list) else "tuple"
        return {"kind": kind, "items": [_outline(v) for v in node]}
    return "scalar" if isinstance(node, np.generic) else "leaf"


def _rebuild(outline: Any, leaves: Any) -> Any:
    if isinstance(outline, str):
        leaf = next(leaves)
        return leaf[()] if outline == "scalar" else leaf
    items = [_rebuild(part, leaves) for part in outline["items"]]
    kind = outline["kind"]
    if kind in ("dict", "ordered"):
        pairs = zip(outline["keys"], items, strict=True)
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    return items if kind == "list" else tuple(items)
