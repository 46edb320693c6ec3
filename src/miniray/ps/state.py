"""Save and restore the state of a server: its weights, and what its strategy remembers.

The state consists of dicts with string keys, lists, numbers, strings and arrays, so it can be
written as JSON with the arrays in safetensors, and read without pickle.
"""

from __future__ import annotations

import collections
import copy
import importlib
import operator
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from miniray.checks import check_int, check_number
from miniray.ps.current import Current
from miniray.ps.leaves import REAL
from miniray.ps.weights import Layout

_FORMAT = 1
_KEYS = (
    *("strategy", "strategy_state", "version", "worker_weights"),
    *("weights", "structure", "buffers"),
)


def save_state(
    model: Current, version: int, worker_weights: Mapping[Hashable, float]
) -> dict[str, Any]:
    """Return the state of a server, which doesn't depend on the number of servers."""
    weights = model.weights
    return {
        "format": _FORMAT,
        "version": version,
        "strategy": model.strategy.name,
        "strategy_state": model.strategy.state_dict(),
        "worker_weights": [[worker, weight] for worker, weight in worker_weights.items()],
        "weights": None if weights is None else list(_iterate_leaves(weights)),
        "structure": None if weights is None else _describe(weights),
        "buffers": model.buffers(),
    }


def load_state(model: Current, saved: Mapping[str, Any]) -> tuple[int, dict[Hashable, float]]:
    """Restore a saved state into ``model``. Return the version and the worker weights.

    Everything is checked first. Raise ``ValueError`` for a state that isn't valid or belongs to a
    different strategy; ``model`` is then unchanged.
    """
    if saved.get("format") != _FORMAT:
        raise ValueError(f"not the state of a parameter server: format {saved.get('format')!r}")
    if missing := [key for key in _KEYS if key not in saved]:
        raise ValueError(f"the state of the parameter server has no {', '.join(missing)}")
    _check_types(saved)
    strategy = model.strategy
    if saved["strategy"] != strategy.name:
        raise ValueError(
            f"the state is of strategy {saved['strategy']!r}, this server has {strategy.name!r}"
        )
    version = check_int("version of the state", saved["version"], 0)
    worker_weights = {
        _to_hashable(worker): check_number(f"the weight of worker {worker!r}", weight, 0)
        for worker, weight in saved["worker_weights"]
    }
    weights, buffers = None, {}
    if saved["structure"] is not None:
        weights = _restore_weights(saved["structure"], saved["weights"])
        buffers = {n: [np.asarray(a) for a in arrays] for n, arrays in saved["buffers"].items()}
        try:
            layout = Layout(weights)
        except TypeError as error:
            raise ValueError(f"the weights of the state aren't valid: {error}") from error
        _check_buffers(model, layout, buffers)
    # A copy, because a strategy that rejects the state may have taken over a part of it.
    copy.deepcopy(strategy).load_state_dict(saved["strategy_state"])
    strategy.load_state_dict(saved["strategy_state"])
    if weights is not None:
        model.set(weights)
        model.load_buffers(buffers)
    return version, worker_weights


def _check_types(saved: Mapping[str, Any]) -> None:
    pairs, leaves, buffers = saved["worker_weights"], saved["weights"], saved["buffers"]
    has_weights = saved["structure"] is not None
    valid = {
        "strategy_state": isinstance(saved["strategy_state"], Mapping),
        "worker_weights": isinstance(pairs, (list, tuple))
        and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs),
        "weights": not has_weights or isinstance(leaves, (list, tuple)),
        "buffers": not has_weights
        or (
            isinstance(buffers, Mapping)
            and all(isinstance(arrays, (list, tuple)) for arrays in buffers.values())
        ),
    }
    for key, is_valid in valid.items():
        if not is_valid:
            raise ValueError(f"{key} of the state isn't valid: {saved[key]!r:.80}")


def _check_buffers(model: Current, layout: Layout, buffers: Mapping[str, Any]) -> None:
    leaves = [leaf for leaf in layout.leaves if leaf.role == REAL and leaf.size]
    if set(buffers) != set(model.strategy.buffers):
        raise ValueError(
            f"the state has buffers {sorted(buffers)}, strategy {model.strategy.name!r} has "
            f"{sorted(model.strategy.buffers)}"
        )
    for name, arrays in buffers.items():
        fits = [a.shape for a in arrays] == [(leaf.size,) for leaf in leaves] and all(
            np.can_cast(a.dtype, leaf.compute, "same_kind")
            for a, leaf in zip(arrays, leaves, strict=True)
        )
        if not fits:
            raise ValueError(f"buffer {name!r} of the state does not fit its weights")


def _to_hashable(value: Any) -> Any:
    """Return ``value`` with lists replaced by tuples, which JSON turns into lists."""
    return tuple(map(_to_hashable, value)) if isinstance(value, (list, tuple)) else value


# -- the structure of the weights ------------------------------------------------------------------


def _iterate_leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, (dict, list, tuple)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from _iterate_leaves(child)
    else:
        yield np.asarray(node) if isinstance(node, np.generic) else node


def _describe(node: Any) -> Any:
    """Return the structure, with a string for each leaf that names its kind."""
    if isinstance(node, dict):
        kind = "ordered" if isinstance(node, collections.OrderedDict) else "dict"
        return {"kind": kind, "keys": list(node), "items": [_describe(v) for v in node.values()]}
    if isinstance(node, (list, tuple)):
        items = [_describe(v) for v in node]
        if hasattr(node, "_fields"):
            cls = type(node)
            name = {"module": cls.__module__, "name": cls.__qualname__}
            return {"kind": "namedtuple", **name, "fields": list(node._fields), "items": items}
        return {"kind": "list" if isinstance(node, list) else "tuple", "items": items}
    return "scalar" if isinstance(node, np.generic) else "leaf"


def _restore_weights(structure: Any, leaves: list[Any]) -> Any:
    rest = collections.deque(leaves)
    try:
        weights = _rebuild(structure, rest)
    except (LookupError, TypeError) as error:
        raise ValueError(f"the structure of the state's weights is not valid: {error!r}") from error
    if rest:
        raise ValueError(f"the state has {len(rest)} arrays more than its structure")
    return weights


def _rebuild(structure: Any, leaves: collections.deque[Any]) -> Any:
    if isinstance(structure, str):
        leaf = leaves.popleft()
        return leaf[()] if structure == "scalar" else leaf
    items = [_rebuild(part, leaves) for part in structure["items"]]
    kind = structure["kind"]
    if kind in ("dict", "ordered"):
        pairs = zip(map(_to_hashable, structure["keys"]), items, strict=True)
        return collections.OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    if kind == "namedtuple":
        return _find_namedtuple(**{n: structure[n] for n in ("module", "name", "fields")})(*items)
    return items if kind == "list" else tuple(items)


def _find_namedtuple(module: str, name: str, fields: list[str]) -> Any:
    """Return the namedtuple class, or an equal one if a script or function defined it."""
    try:
        cls = operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError):
        cls = None
    is_same = isinstance(cls, type) and getattr(cls, "_fields", None) == tuple(fields)
    if is_same and issubclass(cls, tuple):
        return cls
    return collections.namedtuple(name.rpartition(".")[2], fields)
