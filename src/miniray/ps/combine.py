"""One pass over the weights of all workers: combine, check, measure, piece by piece.

A ``Combiner`` is responsible for some ranges of the weights and keeps the strategy's buffers for
them. Nothing it does is final until ``commit``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miniray.errors import StrategyError
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

#: Sums of squares below this are computed in float64: squares of float32 may have become 0.
_TINY = 1e-25
#: Numbers that are summed in their own type.
_ROW = 4096


class NotFiniteError(Exception):
    """The result or a worker's weights contain NaN or Inf.

    ``place`` is such an entry, or empty if only a distance between workers overflows.
    """

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


@dataclasses.dataclass
class Tally:
    """Squared norm of the change, and squared distance of each worker to the workers' mean."""

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
        self._nbytes = sum((r.stop - r.start) * leaves[r.leaf].compute.itemsize for r in ranges)

    def distances(self, workers: Sequence[Sequence[Source]]) -> Array:
        """Squared distances of each two workers, over these ranges."""
        count = len(workers)
        found = np.zeros((len(self._pieces), count, count))

        def measure(piece: Piece, scratch: Scratch) -> None:
            blocks = self._blocks(piece, workers, scratch)
            gap = scratch.get("gap", piece.stop - piece.start, blocks[0].dtype)
            for i in range(count):
                for j in range(i):
                    square = self._square(piece, blocks[i], blocks[j], gap)
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
        """Write the new weights to ``targets``, which has a flat array for each range.

        With ``rate``, move the current weights only by this fraction towards one worker's weights.
        Raise ``NotFiniteError`` or ``StrategyError``; the contents of ``targets`` are then
        undefined.
        """
        count = len(workers)
        equal = [1 / count] * count
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
            direct = getattr(target, "dtype", None) == leaf.compute
            out = target[at : at + size] if direct else scratch.get("out", size, leaf.compute)
            if rate is not None:
                blocks = [_towards(old, blocks[0], rate, scratch.get("rate", size, leaf.compute))]
            context = Context(out, scratch, *self.buffers.of(piece))
            strategy.enter(context)
            gap = scratch.get("gap", size, leaf.compute)
            if count > 1:
                center = strategy.mean(blocks, equal, scratch.get("center", size, leaf.compute))
                squares = [self._square(piece, block, center, gap) for block in blocks]
                if not math.isfinite(sum(squares)):  # the sum of finite weights may overflow
                    wide = np.asarray(np.mean(blocks, axis=0, dtype=np.float64))
                    squares = [self._square(piece, block, wide, gap) for block in blocks]
                apart[piece.number] = squares
                context.blocks, context.center = blocks, center
            # Finite distances prove that the weights are finite.
            known_finite = count > 1 and math.isfinite(apart[piece.number].sum())
            if not strategy.shows_nonfinite and not known_finite:
                for block in blocks:
                    self._check(piece, block)
            if only_mean:
                strategy.mean(blocks, weights, out)
                self.buffers.keep(piece)
            else:
                self._apply(piece, old, blocks, weights, out)
            self._cleared(piece, out)
            if old is not None:
                change[piece.number] = self._square(piece, out, old, gap)
            if old is None or not math.isfinite(change[piece.number]):
                self._check(piece, out)
            if not direct:
                write(target, at, out)
                if _is_half(target):  # what fits float32 may be too large for it
                    self._check(piece, target[at : at + size].astype(leaf.compute))

        self._run(work, workers)
        return Tally(float(change.sum()), apart.sum(axis=0))

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

    def _apply(
        self,
        piece: Piece,
        old: Array | None,
        blocks: Sequence[Array],
        weights: Sequence[float],
        out: Array,
    ) -> None:
        """Write the strategy's result for ``piece`` to ``out``. Raise ``StrategyError``."""
        name = self._strategy.name
        try:
            result = self._strategy.combine(old, blocks, weights)
            if result is not out:
                if np.shape(result) != out.shape:
                    raise ValueError(
                        f"combine must return an array of shape {out.shape}, not {np.shape(result)}"
                    )
                np.copyto(out, result)
        except Exception as error:  # user code may raise anything
            entry = self._leaves[piece.leaf].entry_at(piece.start)
            raise StrategyError(
                f"Strategy {name!r} failed in entry {entry}: {type(error).__name__}: {error}. "
                "The server's weights are unchanged.",
                strategy=name,
                entry=entry,
            ) from error

    def _square(self, piece: Piece, one: Array, other: Array, room: Array) -> float:
        """Return the squared distance of two blocks of ``piece``. Overwrite ``room``."""
        difference = self._cleared(piece, np.subtract(one, other, out=room))
        total = _sum_of_squares(difference)
        if _TINY < total < math.inf or not difference.any():
            return total
        # Squares of float32 numbers overflow above 1e19, and are 0 below 1e-23.
        wide = self._cleared(piece, np.subtract(one, other, dtype=np.float64))
        return _sum_of_squares(wide)

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
        """Return ``block`` after setting the numbers between entries to 0."""
        gaps = self._gaps[piece.number]
        if len(gaps):
            block[gaps] = 0
        return block


def _is_half(target: Source) -> bool:
    return isinstance(target, np.ndarray) and target.dtype.kind == "f" and target.itemsize == 2


def _gaps_in(piece: Piece, gaps: Array) -> Array:
    first, last = np.searchsorted(gaps, (piece.start, piece.stop))
    inside: Array = gaps[first:last] - piece.start
    return inside


def _sum_of_squares(block: Array) -> float:
    """Return the sum over rows of a few thousand numbers, which keeps float32 rounding below 1e-5.

    One ``matmul`` for all rows is as fast as one ``dot``.
    """
    body = block[: len(block) // _ROW * _ROW].reshape(-1, _ROW)
    rest = block[body.size :]
    rows = np.matmul(body[:, None, :], body[:, :, None])
    return float(rows.sum(dtype=np.float64)) + float(np.dot(rest, rest))


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
