"""The entries of weights: tensors, arrays and numbers, each as one flat array over its own memory.

The roles of entries, and the rule for counters, are described in ``weights.py``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

REAL, COUNT, NONE = "real", "count", "none"

#: A flat leaf: a numpy array, or a torch tensor of a type that numpy does not have (bfloat16).
Source = Any
Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One entry of the weights. ``type`` is ``numpy``, ``scalar``, ``torch``, ``float``, ...

    ``size`` counts numbers of ``compute``, the type to compute in: a complex entry has two each.
    """

    path: str
    role: str
    type: str
    dtype: Any
    shape: tuple[int, ...]
    size: int
    nbytes: int
    compute: np.dtype[Any]

    @property
    def is_array(self) -> bool:
        return self.type in ("numpy", "torch")

    @property
    def gaps(self) -> Array:
        """Places of numbers that are not part of it: none. A run of entries may have some."""
        return _NO_GAPS

    def entry_at(self, place: int) -> str:
        """The entry with the number at ``place``."""
        return self.path


_NO_GAPS = np.empty(0, np.intp)

PYTHON: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "bool": bool,
}


def describe(node: Any, path: str, who: str = "") -> Leaf:
    """Return the leaf that describes ``node``. Raise ``TypeError`` if it can't be combined.

    ``who`` names the owner of the weights in the error.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(node, torch.Tensor):
        if node.layout is not torch.strided or node.is_quantized:
            raise TypeError(
                f"{to_prefix(who)}entry {path} is a {node.layout} tensor; only dense ones work"
            )
        sample = flatten_leaf(node)
        role, compute, _ = _role(sample, who, path)
        size, nbytes = len(sample), node.numel() * node.element_size()
        return Leaf(path, role, "torch", node.dtype, tuple(node.shape), size, nbytes, compute)
    if node is None:
        return Leaf(path, NONE, "none", None, (), 0, 0, np.dtype(bool))
    if isinstance(node, (np.ndarray, np.generic)):
        kind = "numpy" if isinstance(node, np.ndarray) else "scalar"
        role, compute, factor = _role(np.asarray(node), who, path)
        return Leaf(
            path, role, kind, node.dtype, node.shape, node.size * factor, node.nbytes, compute
        )
    if isinstance(node, bool):
        return Leaf(path, COUNT, "bool", bool, (), 1, 1, np.dtype(bool))
    if isinstance(node, int):
        return Leaf(path, COUNT, "int", int, (), 1, 8, np.dtype(np.int64))
    if isinstance(node, float):
        return Leaf(path, REAL, "float", float, (), 1, 8, np.dtype(np.float64))
    raise TypeError(
        f"{to_prefix(who)}entry {path} is a {type(node).__qualname__}; weights are torch "
        "tensors, numpy arrays and numbers in lists, tuples and dicts"
    )


def _role(flat: Source, who: str, path: str) -> tuple[str, np.dtype[Any], int]:
    """(role, type to compute in, numbers an element)."""
    if not isinstance(flat, np.ndarray):  # a narrow float that only torch has
        return REAL, np.dtype(np.float32), 1
    dtype = flat.dtype
    if dtype.kind in "biu":
        return COUNT, dtype.newbyteorder("="), 1
    if dtype.kind == "f":
        return REAL, np.dtype(np.float32) if dtype.itemsize < 4 else dtype.newbyteorder("="), 1
    if dtype.kind == "c":
        return REAL, np.dtype(f"f{dtype.itemsize // 2}"), 2
    raise TypeError(f"{to_prefix(who)}entry {path} is an array of {dtype}; it must hold numbers")


def to_prefix(who: str) -> str:
    """Return the start of a message about the weights of ``who``, empty if that isn't known."""
    return f"{who}: " if who else ""


def flatten_leaf(node: Any) -> Source:
    """An array or tensor as one flat array over the same memory; complex as pairs of floats."""
    if not isinstance(node, np.ndarray):
        plain = node.device.type == "cpu" and not node.is_conj() and not node.is_neg()
        # There may be hundreds of tensors on each of many workers: no call that is not needed.
        flat = node.detach() if node.requires_grad else node
        flat = (flat if plain else flat.cpu().resolve_conj().resolve_neg()).reshape(-1)
        try:
            node = flat.numpy()
        except TypeError:
            if not flat.is_floating_point():
                raise
            return flat
    return as_floats(node.reshape(-1))


def as_floats(flat: Array) -> Array:
    """Complex numbers as pairs of floats in the same byte order; others as they are."""
    if flat.dtype.kind != "c":
        return flat
    return np.ascontiguousarray(flat).view(flat.real.dtype)


def numpy_dtype(leaf: Leaf) -> np.dtype[Any] | None:
    """The type of an entry's memory; None where only torch has it."""
    dtype: np.dtype[Any] = leaf.dtype
    if leaf.type == "torch":
        try:
            dtype = sys.modules["torch"].empty(0, dtype=leaf.dtype).numpy().dtype
        except TypeError:
            return None
    return dtype


def read(source: Source, start: int, stop: int, compute: np.dtype[Any]) -> Array:
    """A piece to compute with: a view where the type is the same, otherwise converted."""
    part = source[start:stop]
    if isinstance(part, np.ndarray):
        return part if part.dtype == compute else part.astype(compute)
    converted: Array = part.float().numpy()
    return converted


def write(target: Source, start: int, block: Array) -> None:
    """Put a computed piece in its place, rounded to the type it has there."""
    part = target[start : start + len(block)]
    if isinstance(part, np.ndarray):
        np.copyto(part, block, casting="unsafe")
    else:
        part.copy_(sys.modules["torch"].from_numpy(np.ascontiguousarray(block)))


def combine_counts(values: Sequence[Array], weights: Sequence[float]) -> Array:
    """Integers and booleans of several workers: see the top of the module."""
    values = [value.astype(value.dtype.newbyteorder("="), copy=False) for value in values]
    first = values[0]
    if all(np.array_equal(first, other) for other in values[1:]):
        agreed: Array = first.copy()
        return agreed
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if first.dtype.kind == "b":
        yes: Any = sum(v * share for v, share in zip(values, shares, strict=True))
        majority: Array = yes >= 0.5
        return majority
    # Distances from the smallest, as unsigned numbers: exact, and they cannot overflow.
    low = np.minimum.reduce(values)
    unsigned = np.dtype(f"u{first.dtype.itemsize}")
    above = [(v - low).view(unsigned).astype(np.float64) for v in values]
    mean: Any = sum(a * share for a, share in zip(above, shares, strict=True))
    most = (np.maximum.reduce(values) - low).view(unsigned)
    # As a float the largest 64-bit distance rounds up to one that does not fit.
    fits = np.floor(mean + 0.5) < most.astype(np.float64)
    step = np.where(fits, np.floor(np.where(fits, mean, 0) + 0.5).astype(unsigned), most)
    combined: Array = (low.view(unsigned) + step).view(first.dtype)
    return combined
