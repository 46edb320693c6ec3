"""Weights as users have them, and as the server computes with them.

Weights are a nested list, tuple or dict of torch tensors, numpy arrays and Python numbers. A
``Layout`` describes one such structure; ``extract`` checks another worker's weights against it and
gives its leaves as flat arrays over the same memory, without a copy.

Leaves have one of three roles:

* *real* (floats; complex numbers as pairs of them): the strategy combines them. Types narrower than
  float32 are computed with in float32 and rounded once at the end.
* *count* (integers and booleans, such as BatchNorm's counters): never given to a strategy, because
  momentum or a median of counters means nothing. They become the weighted mean of the same workers,
  rounded to the nearest integer (halves up); a boolean is true where at least half of the weight
  says so. Where all workers agree the value is kept exactly.
* *none* (``None``): must be ``None`` everywhere.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from miniray.errors import WeightsMismatchError
from miniray.ps.leaves import (
    PYTHON,
    REAL,
    Array,
    Leaf,
    Source,
    combine_counts,
    describe,
    flatten_leaf,
    read,
    to_prefix,
    write,
)


class Layout:
    """The structure of some weights: where each leaf is, its shape and its type.

    Raises ``TypeError`` if an entry can't be combined, and ``ValueError`` if there are no entries.
    The message starts with ``who``, the owner of the weights, unless it is empty.
    """

    def __init__(self, weights: Any, who: str = "") -> None:
        self.leaves: list[Leaf] = []
        if not isinstance(weights, (list, tuple, dict)):
            raise TypeError(
                f"{to_prefix(who)}weights must be a list, tuple or dict of arrays, tensors and "
                f"numbers, not {type(weights).__name__}"
                + ("; return its state_dict()" if hasattr(weights, "state_dict") else "")
            )
        self.skeleton = self._describe(weights, "", who)
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        if not self.leaves:
            raise ValueError(f"{to_prefix(who)}weights are empty")

    def _describe(self, node: Any, path: str, who: str) -> Any:
        if isinstance(node, dict):
            keys = list(node)
            return (
                dict,
                type(node),
                keys,
                [self._describe(node[k], f"{path}[{k!r}]", who) for k in keys],
            )
        if isinstance(node, (list, tuple)):
            parts = [self._describe(item, f"{path}[{i}]", who) for i, item in enumerate(node)]
            return list if isinstance(node, list) else tuple, type(node), None, parts
        self.leaves.append(describe(node, path, who))
        return len(self.leaves) - 1

    # -- another worker's weights ------------------------------------------------------------------

    def extract(self, weights: Any, who: str, reference: str) -> list[Source]:
        """The leaves of ``weights`` as flat arrays, in order; small ones may be copies.

        Raises ``WeightsMismatchError`` naming ``who``, the entry and what ``reference`` has there.
        """
        found: list[Source] = []
        self._walk(self.skeleton, weights, "", found, who, reference)
        return found

    def _walk(
        self, part: Any, node: Any, path: str, found: list[Source], who: str, reference: str
    ) -> None:
        if isinstance(part, int):
            found.append(_checked(self.leaves[part], node, who, reference))
            return
        kind, _, keys, parts = part
        if not isinstance(node, kind):
            raise _mismatch(who, path, type(node).__name__, reference, kind.__name__)
        if len(node) != len(parts):
            entries = f"{len(node)} entries"
            raise _mismatch(who, path, entries, reference, str(len(parts)), _difference(node, keys))
        if keys is not None:
            # Their order too: a worker may zip its parameters with ``weights.values()``.
            if list(node) != keys:
                at = next(i for i, (a, b) in enumerate(zip(node, keys, strict=True)) if a != b)
                mine = f"the key {list(node)[at]!r} at position {at}"
                raise _mismatch(who, path, mine, reference, repr(keys[at]))
            node = node.values()
        for i, (child, value) in enumerate(zip(parts, node, strict=True)):
            if isinstance(child, int):
                found.append(_checked(self.leaves[child], value, who, reference))
            else:
                step = f"[{keys[i]!r}]" if keys is not None else f"[{i}]"
                self._walk(child, value, path + step, found, who, reference)

    def same_as(self, other: Layout) -> bool:
        return self.leaves == other.leaves and _shape_of(self.skeleton) == _shape_of(other.skeleton)

    # -- building weights --------------------------------------------------------------------------

    def build(self, values: Sequence[Any]) -> Any:
        """The structure with ``values`` as its leaves."""
        return _build(self.skeleton, values)

    def empty(self, leaf: Leaf) -> Any:
        """An uninitialised array or tensor like ``leaf``."""
        if leaf.type == "torch":
            return sys.modules["torch"].empty(leaf.shape, dtype=leaf.dtype)
        return np.empty(leaf.shape, leaf.dtype)

    def finished(self, leaf: Leaf, flat: Array) -> Any:
        """What the user sees of a leaf whose numbers are ``flat``, of the leaf's own type."""
        if leaf.type == "none":
            return None
        if leaf.type in PYTHON:
            return PYTHON[leaf.type](flat[0])
        if leaf.type == "torch":
            return sys.modules["torch"].from_numpy(flat).reshape(leaf.shape)
        array = flat.astype(leaf.dtype, copy=False).reshape(leaf.shape)
        return array[()] if leaf.type == "scalar" else array

    def shown(self, leaf: Leaf, source: Source) -> Any:
        """What the user sees of a leaf, over the memory of its flat array."""
        if not isinstance(source, np.ndarray):
            return source.reshape(leaf.shape)
        if source.dtype != leaf.dtype and leaf.type in ("numpy", "scalar"):
            source = source.view(leaf.dtype)  # complex numbers
        elif leaf.type == "torch" and leaf.dtype.is_complex:
            source = source.view(f"c{2 * source.itemsize}")
        return self.finished(leaf, source)


def _checked(leaf: Leaf, node: Any, who: str, reference: str) -> Source:
    """``node`` as a flat array if it is like ``leaf``."""
    # Tensors and arrays of the right kind, quickly: there may be hundreds in each of many workers.
    kind = np.ndarray if leaf.type == "numpy" else getattr(sys.modules.get("torch"), "Tensor", ())
    if isinstance(node, kind) and node.dtype == leaf.dtype and node.shape == leaf.shape:
        return flatten_leaf(node)
    other = describe(node, leaf.path, who)
    same = (other.type, other.dtype, other.shape) == (leaf.type, leaf.dtype, leaf.shape)
    if not same and not _same_number(other, leaf):
        hint = ": begin with 0.0 instead of 0" if (leaf.type, other.role) == ("int", REAL) else ""
        words = _words(other, leaf), reference, _words(leaf, other) + hint
        raise _mismatch(who, leaf.path, *words)
    if leaf.type == "none":
        return np.empty(0)
    try:
        return flatten_leaf(np.asarray(node, leaf.dtype))
    except OverflowError:
        raise TypeError(f"{who}: entry {leaf.path} is {node}, beyond 64 bits") from None


def _same_number(one: Leaf, other: Leaf) -> bool:
    """Whether both are one number: ``b = 0.0`` is numpy's after ``b -= lr * error.mean()``."""
    kinds = {(leaf.role, leaf.compute.kind, leaf.size, leaf.shape) for leaf in (one, other)}
    return len(kinds) == 1 and one.shape == () and "torch" not in (one.type, other.type)


def mean(weights: Sequence[Any]) -> Any:
    """The plain mean of several workers' weights, with the checks and rules of a server.

    Raises ``WeightsMismatchError`` naming the worker by its position.
    """
    layout = Layout(weights[0], "worker 0")
    workers: list[list[Source]] = []
    for i, each in enumerate(weights):
        try:
            workers.append(layout.extract(each, f"worker {i}", "worker 0"))
        except WeightsMismatchError as error:
            error.add_fields(worker=i)
            raise
    values: list[Any] = []
    for i, leaf in enumerate(layout.leaves):
        sources = [worker[i] for worker in workers]
        if leaf.role == REAL and leaf.size:
            total = read(sources[0], 0, leaf.size, leaf.compute).copy()
            for source in sources[1:]:
                total += read(source, 0, leaf.size, leaf.compute)
            total /= len(sources)
            result = (
                np.empty_like(sources[0])
                if isinstance(sources[0], np.ndarray)
                else sources[0].clone()
            )
            write(result, 0, total)
            values.append(layout.shown(leaf, result))
        elif leaf.size:
            values.append(layout.finished(leaf, combine_counts(sources, [1.0] * len(sources))))
        else:
            values.append(layout.empty(leaf) if leaf.is_array else None)
    return layout.build(values)


def to_host(weights: Any) -> Any:
    """The same structure with CUDA tensors replaced by CPU tensors; everything else as it is.

    For the Ray engine, whose pickling is Ray's own, or to overlap the copy with other work: on the
    embedded engines a CUDA tensor that travels is copied so, and arrives as a CPU tensor.

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


# -- words -----------------------------------------------------------------------------------------


def _words(leaf: Leaf, other: Leaf) -> str:
    if leaf.type != other.type:
        words = {"torch": "a torch tensor", "numpy": "a numpy array", "none": "None"}
        words |= {"scalar": f"a numpy {leaf.dtype}", "int": "an int"}
        return words.get(leaf.type, f"a {leaf.type}")
    if leaf.shape != other.shape:
        return f"shape {leaf.shape}"
    return f"dtype {leaf.dtype}"


def _mismatch(
    who: str, path: str, mine: str, reference: str, theirs: str, extra: str = ""
) -> WeightsMismatchError:
    place = f"entry {path}" if path else "the whole"
    return WeightsMismatchError(
        f"{who}: {place} has {mine}, {reference} has {theirs}{extra}", entry=path or None
    )


def _difference(node: Any, keys: list[Any] | None) -> str:
    if keys is None:
        return ""
    missing = [k for k in keys if k not in node]
    added = [k for k in node if k not in keys]
    parts = [f"missing {missing[:5]}"] if missing else []
    parts += [f"unexpected {added[:5]}"] if added else []
    return f" ({', '.join(parts)})" if parts else ""


def _shape_of(part: Any) -> Any:
    if isinstance(part, int):
        return part
    kind, _, keys, parts = part
    return kind, keys, [_shape_of(p) for p in parts]


def _build(part: Any, values: Sequence[Any]) -> Any:
    if isinstance(part, int):
        return values[part]
    kind, cls, keys, parts = part
    built = [_build(p, values) for p in parts]
    if kind is dict:
        pairs = zip(keys, built, strict=True)
        return OrderedDict(pairs) if issubclass(cls, OrderedDict) else dict(pairs)
    if kind is list:
        return built
    return cls(*built) if hasattr(cls, "_fields") else tuple(built)
