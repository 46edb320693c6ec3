"""One pass over the weights of all workers: combine, check, measure, piece by piece.

A ``Combiner`` is responsible for some ranges of the weights and keeps the strategy's buffers for
them. Nothing it does is final until ``commit``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from miniray.ps.blocks import Crew, Piece, Range, Scratch, all_finite, pieces_of
from miniray.ps.leaves import Array, Source, read, write
from miniray.ps.strategies.base import Buffers, Context, Strategy
from miniray.ps.weights import Layout

#: Up to this many numbers norms are exact; beyond, a quarter of every fourth piece is looked at.
EXACT = 4_000_000
_SAMPLE = 4


class NotFiniteError(Exception):
    """The result is not finite, or a worker's weights are not; ``place`` is an entry with one."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.place = place


@dataclasses.dataclass
class Tally:
    """Sums of squares: of the change, and of each worker's distance to the mean of the workers.

    Above ``EXACT`` numbers they are estimates from the first quarter of every fourth piece.
    """

    change: float
    distances: Array

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.change + other.change, self.distances + other.distances)


class Combiner:
    """Combines some ranges of the weights with a strategy."""

    def __init__(self, strategy: Strategy, layout: Layout, ranges: list[Range], crew: Crew) -> None:
        self.ranges = ranges
        self.buffers = Buffers(strategy.buffers, ranges, layout.leaves)
        self._strategy = strategy
        self._leaves = layout.leaves
        self._pieces = pieces_of(ranges)
        self._crew = crew
        total = sum(r.stop - r.start for r in ranges)
        self._sample = 1 if total <= EXACT else _SAMPLE
        measured = sum(map(self._measured, self._pieces))
        self._scale = total / measured if measured else 1.0

    def distances(self, workers: Sequence[Sequence[Source]]) -> Array:
        """Squared distances of each two workers, over these ranges."""
        count = len(workers)
        found = np.zeros((len(self._pieces), count, count))

        def measure(piece: Piece, scratch: Scratch) -> None:
            blocks = self._blocks(piece, workers)
            gap = scratch.get("gap", piece.stop - piece.start, blocks[0].dtype)
            for i in range(count):
                for j in range(i):
                    np.subtract(blocks[i], blocks[j], out=gap)
                    found[piece.number, i, j] = found[piece.number, j, i] = _square(gap)

        self._crew.run(self._pieces, measure)
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
            blocks = self._blocks(piece, workers)
            old = None
            if current is not None:
                old = read(current[piece.leaf], piece.start, piece.stop, leaf.compute)
            target, at = targets[piece.range], piece.start - piece.base
            direct = rate is None and getattr(target, "dtype", None) == leaf.compute
            out = target[at : at + size] if direct else scratch.get("out", size, leaf.compute)
            if not strategy.shows_nonfinite and not all(map(all_finite, blocks)):
                raise NotFiniteError(leaf.path)
            part = self._measured(piece)
            gap = scratch.get("gap", part, leaf.compute)
            if part and count > 1:
                _distances([block[:part] for block in blocks], gap, apart[piece.number])
            if rate is not None:
                blocks = [_towards(old, blocks[0], rate, scratch.get("rate", size, leaf.compute))]
            strategy.enter(Context(out, scratch, *self.buffers.of(piece)))
            if only_mean:
                result = strategy.mean(blocks, weights, out)
                self.buffers.keep(piece)
            else:
                result = strategy.combine(old, blocks, weights)
            if not all_finite(result):
                raise NotFiniteError(leaf.path)
            if part and old is not None:
                change[piece.number] = _square(np.subtract(result[:part], old[:part], out=gap))
            if result is not out:
                if result.shape != out.shape:
                    raise ValueError(
                        f"strategy {strategy.name!r} gave an array of shape {result.shape} for a "
                        f"piece of shape {out.shape}"
                    )
                np.copyto(out, result)
            if not direct:
                write(target, at, out)

        self._crew.run(self._pieces, work)
        return Tally(float(change.sum()) * self._scale, apart.sum(axis=0) * self._scale)

    def broken(self, sources: Sequence[Source]) -> str | None:
        """The first entry of one worker's that holds NaN or infinity; None if there is none."""
        found: list[Piece] = []

        def look(piece: Piece, scratch: Scratch) -> None:
            if not all_finite(self._blocks(piece, [sources])[0]):
                found.append(piece)

        self._crew.run(self._pieces, look)
        return self._leaves[min(found).leaf].path if found else None

    def commit(self) -> None:
        self.buffers.commit()

    # -- helpers -----------------------------------------------------------------------------------

    def _blocks(self, piece: Piece, workers: Sequence[Sequence[Source]]) -> list[Array]:
        which, start, stop = piece.leaf, piece.start, piece.stop
        compute = self._leaves[which].compute
        return [read(sources[which], start, stop, compute) for sources in workers]

    def _measured(self, piece: Piece) -> int:
        """How many numbers of a piece are looked at for the norms."""
        size = piece.stop - piece.start
        return 0 if piece.number % self._sample else max(1, size // self._sample)


def _distances(blocks: list[Array], gap: Array, squares: Array) -> None:
    """Write each worker's squared distance to the plain mean of all to ``squares``."""
    center = np.add(blocks[0], blocks[1])
    for block in blocks[2:]:
        np.add(center, block, out=center)
    np.multiply(center, 1 / len(blocks), out=center)
    for i, block in enumerate(blocks):
        squares[i] = _square(np.subtract(block, center, out=gap))


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
    if like.type != "torch":
        flat = memory.view(like.dtype)
        return flat.view(like.compute) if flat.dtype.kind == "c" else flat
    import torch

    try:
        as_numpy = torch.empty(0, dtype=like.dtype).numpy().dtype
    except TypeError:
        return torch.frombuffer(memory, dtype=like.dtype)
    flat = memory.view(as_numpy)
    return flat.view(like.compute) if as_numpy.kind == "c" else flat
