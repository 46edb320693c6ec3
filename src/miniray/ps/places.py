"""Weights in shared memory as a few long runs, however many tensors they are.

The store puts the arrays of a value one after another. Once it is known where each entry lies,
neighbours of one type are read as a single flat array, with the few bytes between them, and the
next weights of the same kind are recognised without unpickling or checking a single tensor.

The bytes between entries are nobody's: they may hold anything, and are left out of every check and
norm. A small entry of another type (a counter between two layers) may lie there too.

This works for weights that are arrays and nothing else, of types that numpy knows, each in memory
of its own. Others (Python numbers, bfloat16, tied or strided arrays) are combined entry by entry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from miniray.ps.leaves import NONE, REAL, Array, Leaf, Source, numpy_dtype
from miniray.ps.offer import digest_of
from miniray.ps.weights import Layout

#: Entries of one type are one run if they are not further apart, in bytes.
_REACH = 256
#: More kinds of values than this, of one layout, are not remembered.
_KINDS = 16


@dataclasses.dataclass
class Run:
    """Neighbouring entries as one flat array. ``starts`` and sizes count its numbers."""

    at: int
    dtype: np.dtype[Any]
    compute: np.dtype[Any]
    size: int = 0
    leaves: list[int] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)
    #: Places of the numbers between entries.
    gaps: Array = dataclasses.field(default_factory=lambda: np.empty(0, np.intp))

    @property
    def end(self) -> int:
        return self.at + self.size * self.dtype.itemsize

    def entry_at(self, place: int) -> str:
        """The entry with the number at ``place``."""
        return self.paths[int(np.searchsorted(self.starts, place, "right")) - 1]

    def add(self, which: int, leaf: Leaf, at: int) -> None:
        start = (at - self.at) // self.dtype.itemsize
        self.gaps = np.concatenate([self.gaps, np.arange(self.size, start)])
        self.leaves.append(which)
        self.starts.append(start)
        self.sizes.append(leaf.size)
        self.paths.append(leaf.path)
        self.size = start + leaf.size


class Places:
    """Where the entries of a layout lie, and which values in shared memory are known to be so."""

    def __init__(self, layout: Layout) -> None:
        self._leaves = layout.leaves
        self._dtypes = [_dtype(leaf) for leaf in layout.leaves]
        # "in" would compare, and numpy takes None for float64.
        self._possible = all(dtype is not None for dtype in self._dtypes)
        #: From the first entry, in bytes; None until seen.
        self._offsets: list[int] | None = None
        #: By key of a stored value: where its first entry is. By digest: the key.
        self._kinds: dict[Any, int] = {}
        self._digests: dict[bytes, Any] = {}
        self.runs: list[Run] = []

    def learn(self, stored: Any, sources: Sequence[Source]) -> None:
        """``sources`` are the entries of ``stored``, which were checked. Remember where they lie.

        Values that lie otherwise than the first one are not remembered.
        """
        if stored is None or not self._possible:
            return
        start, end = _span(stored.memory)
        at, last = [], start
        for leaf, source in zip(self._leaves, sources, strict=True):
            first, stop = _span(source) if leaf.size else (last, last)
            if not last <= first <= stop <= end:
                return  # a copy, or memory that is another entry's too
            at.append(first)
            last = stop
        offsets = [a - at[0] for a in at]
        if self._offsets is None:
            self._offsets = offsets
            self.runs = self._joined(offsets)
        # What is known stays known: somebody may be about to rely on it.
        if offsets == self._offsets and len(self._kinds) < _KINDS:
            self._kinds[stored.key] = at[0] - start
            stream, buffers, private = stored.key
            digest = digest_of(stream, [size for _, size in buffers], private)
            self._digests[digest] = stored.key

    def _joined(self, offsets: list[int]) -> list[Run]:
        runs: list[Run] = []
        for i, (leaf, dtype, at) in enumerate(
            zip(self._leaves, self._dtypes, offsets, strict=True)
        ):
            if leaf.role != REAL or not leaf.size:
                continue
            assert dtype is not None
            last = runs[-1] if runs else None
            if (
                last is None
                or (last.dtype, last.compute) != (dtype, leaf.compute)
                or at - last.end > _REACH
                or (at - last.at) % dtype.itemsize
            ):
                last = Run(at, dtype, leaf.compute)
                runs.append(last)
            last.add(i, leaf, at)
        return runs

    def knows(self, stored: Any) -> bool:
        return stored is not None and stored.key in self._kinds

    def view(self, stored: Any, memory: Array | None = None) -> Stowed:
        """A known value, or ``memory`` that is to become such a value."""
        start = self._kinds[stored.key]
        return Stowed(self, (stored.memory if memory is None else memory)[start:])

    def located(self, digest: bytes, buffers: Array) -> Array | None:
        """Addresses of the entries of a value in another process, whose buffers are at ``buffers``.

        None if it is not known to be weights that fit.
        """
        key = self._digests.get(digest)
        if key is None or len(buffers) != len(key[1]):
            return None
        begins = np.array([at for at, _ in key[1]], np.uint64)
        at = np.array(self._offsets, np.uint64) + np.uint64(self._kinds[key])
        which = np.searchsorted(begins, at, "right") - 1
        found: Array = buffers[which] + (at - begins[which])
        return found

    def shape(self, which: int) -> tuple[int, Any]:
        """(bytes, type) of an entry."""
        return self._leaves[which].nbytes, self._dtypes[which]

    def entry(self, which: int, memory: Array) -> Source:
        assert self._offsets is not None
        leaf, dtype, at = self._leaves[which], self._dtypes[which], self._offsets[which]
        return memory[at : at + leaf.nbytes].view(dtype)


class Stowed(Sequence[Source]):
    """The entries of weights in shared memory."""

    def __init__(self, places: Places, memory: Array) -> None:
        self._places = places
        self._memory = memory
        self.runs: list[Source] = [memory[r.at : r.end].view(r.dtype) for r in places.runs]

    def __len__(self) -> int:
        return len(self._places._leaves)

    def __getitem__(self, index: Any) -> Any:
        return self._places.entry(index, self._memory)


def _dtype(leaf: Leaf) -> np.dtype[Any] | None:
    """As which a leaf's memory is read; None if that is not possible."""
    if leaf.role == NONE:
        return np.dtype(np.uint8)
    dtype = numpy_dtype(leaf) if leaf.is_array else None
    if dtype is not None and dtype.kind == "c":
        return leaf.compute if dtype.isnative else None
    return dtype


def _span(array: Array) -> tuple[int, int]:
    """Addresses of the first byte and of that after the last one."""
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes
