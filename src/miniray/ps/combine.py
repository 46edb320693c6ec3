"""One pass over the weights of all workers: combine, check, measure, piece by piece.

A ``Combiner`` is responsible for some ranges of the weights and keeps the strategy's buffers for
them. Nothing it does is final until ``commit``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from miniray.ps.blocks import (
    Buffers,
    Crew,
    Piece,
    Range,
    Scratch,
    all_finite,
    pieces_of,
    readers,
)
from miniray.ps.leaves import Array, Leaf, Source, as_floats, numpy_dtype, read, write
from miniray.ps.places import Run
from miniray.ps.reading import FarRun
from miniray.ps.strategies.base import Context, Strategy

#: Up to this many numbers norms are exact; beyond, an eighth of every eighth piece is looked at.
EXACT = 4_000_000
_SAMPLE = 8


class NotFiniteError(Exception):
    """The result is not finite, or a worker's weights are not; ``place`` is an entry with one."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


@dataclasses.dataclass
class Tally:
    """Sums of squares: of the change, and of each worker's distance to the mean of the workers.

    Above ``EXACT`` numbers they are estimates from the first eighth of every eighth piece.
    """

    change: float
    distances: Array

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.change + other.change, self.distances + other.distances)


class Combiner:
    """Combines some ranges of the weights with a strategy.

    Ranges are of ``leaves``: the entries of the weights, or runs of neighbouring ones. ``buffers``
    are those of another combiner of the same weights, if there is one.
    """

    def __init__(
        self,
        strategy: Strategy,
        leaves: Sequence[Leaf | Run],
        ranges: list[Range],
        crew: Crew,
        buffers: Buffers | None = None,
    ) -> None:
        self.ranges = ranges
        self.buffers = buffers or Buffers(strategy.buffers, ranges, leaves)
        self._strategy = strategy
        self._leaves = leaves
        self._pieces = pieces_of(ranges)
        #: For each piece, where in it are numbers that are no entry's.
        self._gaps = [_gaps_in(piece, leaves[piece.leaf].gaps) for piece in self._pieces]
        self._crew = crew
        total = sum(self._numbers(p, p.stop - p.start) for p in self._pieces)
        self._nbytes = sum((r.stop - r.start) * leaves[r.leaf].compute.itemsize for r in ranges)
        self._sample = 1 if total <= EXACT else _SAMPLE
        measured = sum(self._numbers(p, self._measured(p)) for p in self._pieces)
        self._scale = total / measured if measured else 1.0

    def distances(self, workers: Sequence[Sequence[Source]]) -> Array:
        """Squared distances of each two workers, over these ranges."""
        count = len(workers)
        found = np.zeros((len(self._pieces), count, count))

        def measure(piece: Piece, scratch: Scratch) -> None:
            blocks = self._blocks(piece, workers, scratch)
            gap = scratch.get("gap", piece.stop - piece.start, blocks[0].dtype)
            for i in range(count):
                for j in range(i):
                    np.subtract(blocks[i], blocks[j], out=gap)
                    square = _square(self._cleared(piece, gap))
                    found[piece.number, i, j] = found[piece.number, j, i] = square

        self._run(measure, workers)
        total: Array = found.sum(axis=0)
        return total

    def combine(
        self,
        current: Sequence[Source] | None,
        workers: Sequence[Sequence[Source]],
        weights: Sequence[float],
        targets: Sequence[Source],
        rate: float | None = None,
    ) -> Tally:
        """Write the new weights to ``targets``, a flat array for each range.

        With ``rate``, one worker's weights go in only to that part, and a target may be the
        current weights themselves. Raises ``NotFiniteError``; then the targets hold rubbish.
        """
        count = len(workers)
        change = np.zeros(len(self._pieces))
        apart = np.zeros((len(self._pieces), count))
        strategy = self._strategy
        only_mean = strategy.needs_global and current is None

        def work(piece: Piece, scratch: Scratch) -> None:
            size = piece.stop - piece.start
            leaf = self._leaves[piece.leaf]
            blocks = self._blocks(piece, workers, scratch)
            old = None
            if current is not None:
                old = read(current[piece.leaf], piece.start, piece.stop, leaf.compute)
            target, at = targets[piece.range], piece.start - piece.base
            direct = rate is None and getattr(target, "dtype", None) == leaf.compute
            out = target[at : at + size] if direct else scratch.get("out", size, leaf.compute)
            if not strategy.shows_nonfinite:
                for block in blocks:
                    self._check(piece, block)
            part = self._measured(piece)
            gap = scratch.get("gap", part, leaf.compute)
            if part and count > 1:
                parts = [block[:part] for block in blocks]
                for i, difference in enumerate(_differences(parts, gap)):
                    apart[piece.number, i] = _square(self._cleared(piece, difference))
            if rate is not None:
                blocks = [_towards(old, blocks[0], rate, scratch.get("rate", size, leaf.compute))]
            strategy.enter(Context(out, scratch, *self.buffers.of(piece)))
            if only_mean:
                result = strategy.mean(blocks, weights, out)
                self.buffers.keep(piece)
            else:
                result = strategy.combine(old, blocks, weights)
            if result is not out:
                if result.shape != out.shape:
                    raise ValueError(
                        f"strategy {strategy.name!r} gave an array of shape {result.shape} for a "
                        f"piece of shape {out.shape}"
                    )
                np.copyto(out, result)
            self._check(piece, self._cleared(piece, out))
            if part and old is not None:
                np.subtract(out[:part], old[:part], out=gap)
                change[piece.number] = _square(self._cleared(piece, gap))
            if not direct:  # last: the target may be the current weights
                write(target, at, out)
                if _is_half(target):  # what fits float32 may be too large for it
                    self._check(piece, target[at : at + size].astype(leaf.compute))

        self._run(work, workers)
        return Tally(float(change.sum()) * self._scale, apart.sum(axis=0) * self._scale)

    def broken(self, sources: Sequence[Source]) -> str | None:
        """The first entry of one worker's that holds NaN or infinity; None if there is none."""
        found: list[tuple[Piece, str]] = []

        def look(piece: Piece, scratch: Scratch) -> None:
            try:
                self._check(piece, self._blocks(piece, [sources], scratch)[0])
            except NotFiniteError as error:
                found.append((piece, error.place))

        self._run(look, [sources])
        return min(found)[1] if found else None

    def commit(self) -> None:
        self.buffers.commit()

    # -- helpers -----------------------------------------------------------------------------------

    def _run(
        self, work: Callable[[Piece, Scratch], None], workers: Sequence[Sequence[Source]]
    ) -> None:
        """Do it for all pieces; for runs that are read each thread needs room."""
        far = sum(
            type(runs) is list and any(isinstance(r, FarRun) for r in runs) for runs in workers
        )
        most = max(1, readers(far, self._nbytes)) if far else None
        self._crew.run(self._pieces, work, most)

    def _blocks(
        self, piece: Piece, workers: Sequence[Sequence[Source]], scratch: Scratch
    ) -> list[Array]:
        which, start, stop = piece.leaf, piece.start, piece.stop
        compute = self._leaves[which].compute
        blocks = []
        for i, source in enumerate(sources[which] for sources in workers):
            if isinstance(source, FarRun):
                near = source.read(start, stop, scratch.room(i, source.dtype))
                block = read(near, 0, stop - start, compute)
            else:
                block = read(source, start, stop, compute)
            blocks.append(block)
        return blocks

    def _measured(self, piece: Piece) -> int:
        """How many numbers of a piece are looked at for the norms, from its start."""
        size = piece.stop - piece.start
        return 0 if piece.number % self._sample else max(1, size // self._sample)

    def _check(self, piece: Piece, block: Array) -> None:
        """Raise ``NotFiniteError`` if an entry has NaN or infinity in this piece."""
        if all_finite(block):
            return
        broken = ~np.isfinite(block)
        broken[self._gaps[piece.number]] = False
        if broken.any():
            place = piece.start + int(broken.argmax())
            raise NotFiniteError(self._leaves[piece.leaf].entry_at(place))

    def _cleared(self, piece: Piece, block: Array) -> Array:
        """``block``, the start of a piece or all of it, with 0 where no entry is."""
        gaps = self._gaps[piece.number]
        if len(gaps):
            block[gaps[: np.searchsorted(gaps, len(block))]] = 0
        return block

    def _numbers(self, piece: Piece, size: int) -> int:
        """How many of the first ``size`` numbers of a piece are an entry's."""
        return size - int(np.searchsorted(self._gaps[piece.number], size))


def _is_half(target: Source) -> bool:
    return isinstance(target, np.ndarray) and target.dtype.kind == "f" and target.itemsize == 2


def _gaps_in(piece: Piece, gaps: Array) -> Array:
    first, last = np.searchsorted(gaps, (piece.start, piece.stop))
    inside: Array = gaps[first:last] - piece.start
    return inside


def _differences(blocks: list[Array], gap: Array) -> Iterator[Array]:
    """Each worker's difference to the plain mean of all, in the memory of ``gap``."""
    center = np.add(blocks[0], blocks[1])
    for block in blocks[2:]:
        np.add(center, block, out=center)
    np.multiply(center, 1 / len(blocks), out=center)
    for block in blocks:
        yield np.subtract(block, center, out=gap)


def _square(block: Array) -> float:
    return float(np.dot(block, block))


def _towards(old: Array | None, new: Array, rate: float, out: Array) -> Array:
    if old is None:
        return new
    np.subtract(new, old, out=out)
    np.multiply(out, rate, out=out)
    return np.add(out, old, out=out)


def typed(memory: Array, like: Any) -> Source:
    """Bytes as a flat array of the leaf's own type; complex numbers as pairs of floats."""
    dtype = numpy_dtype(like)
    if dtype is not None:
        return as_floats(memory.view(dtype))
    import torch

    return torch.frombuffer(memory, dtype=like.dtype)
