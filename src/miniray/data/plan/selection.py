"""Selected rows of an epoch: those that the filter keeps, and a subset of them.

Uses one bit per row, and only if not all rows are selected.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from miniray.data.locations import Blocks, Int64s, Locations, cumulate
from miniray.data.plan.permutation import Permutation, derive_key

Bits = npt.NDArray[np.uint8]

_CHUNK_ROWS = 1 << 20  # unpacked at a time; a multiple of 8


class Selection:
    """Rows of a source that take part in the epochs, numbered in data order.

    Args:
        blocks: Blocks of the source.
        bits: The rows whose bit is set, in little-endian bit order; defaults to all rows.

    Attributes:
        sizes: Number of selected rows per block.
        edges: Number of selected rows before each block, and of all.
    """

    def __init__(self, blocks: Blocks, bits: Bits | None = None) -> None:
        self._blocks, self._bits = blocks, bits
        if bits is None:
            self.sizes, self.edges = blocks.rows, blocks.edges
        else:
            counts = [len(self.select_rows(block)) for block in range(len(blocks))]
            self.sizes = np.array(counts, dtype=np.int64)
            self.edges = cumulate(self.sizes)

    @property
    def count(self) -> int:
        """Number of selected rows."""
        return int(self.edges[-1])

    @cached_property
    def digest(self) -> str:
        """Identifier of the selected rows in states."""
        if self._bits is None:
            return "all"
        return hashlib.blake2b(np.ascontiguousarray(self._bits).data, digest_size=8).hexdigest()

    def for_blocks(self, blocks: Blocks) -> Selection:
        """Return the same rows for a copy of the data that is cut into different blocks."""
        return Selection(blocks, self._bits)

    def draw(self, count: int, seed: int | None) -> Selection:
        """Return a random subset of ``count`` rows, or all if there are no more."""
        if count >= self.count:
            return self
        permutation = Permutation(self.count, derive_key(seed, "subset"))
        chosen = np.zeros(-(-self.count // 8), dtype=np.uint8)
        fewer = min(count, self.count - count)  # draw the rows to keep, or those to leave out
        for start in range(0, fewer, _CHUNK_ROWS):
            drawn = permutation.map_positions(np.arange(start, min(fewer, start + _CHUNK_ROWS)))
            np.bitwise_or.at(chosen, drawn >> 3, np.left_shift(1, drawn & 7).astype(np.uint8))
        return self._narrow(chosen if fewer == count else ~chosen)

    def take_first(self, count: int) -> Selection:
        """Return the first ``count`` rows in data order."""
        if count >= self.count:
            return self
        byte, bit = divmod(int(self.number_rows(np.array([count]))[0]), 8)  # the first to leave out
        size = -(-self._blocks.total_rows // 8)
        bits = np.full(size, 255, dtype=np.uint8) if self._bits is None else self._bits.copy()
        bits[byte] &= (1 << bit) - 1
        bits[byte + 1 :] = 0
        return Selection(self._blocks, bits)

    def _narrow(self, chosen: Bits) -> Selection:
        """Keep the selected rows whose bit in ``chosen`` is set."""
        total, done = self._blocks.total_rows, 0
        bits = np.zeros(-(-total // 8), dtype=np.uint8)
        for start in range(0, total, _CHUNK_ROWS):
            rows = self._unpack(start, min(total, start + _CHUNK_ROWS))
            selected = np.flatnonzero(rows)
            rows[selected] = _unpack(chosen, done, done + len(selected))
            done += len(selected)
            packed = np.packbits(rows, bitorder="little")
            bits[start // 8 : start // 8 + len(packed)] = packed
        return Selection(self._blocks, bits)

    def _unpack(self, start: int, stop: int) -> Bits:
        """Return one byte per row."""
        if self._bits is None:
            return np.ones(stop - start, dtype=np.uint8)
        return _unpack(self._bits, start, stop)

    def select_rows(self, block: int) -> Int64s:
        """Return the selected rows of a block."""
        edges = self._blocks.edges
        return np.flatnonzero(self._unpack(int(edges[block]), int(edges[block + 1])))

    def locate(self, ordinals: Int64s, source: int = 0) -> Locations:
        """Return the locations of selected rows by their ordinal among the selected rows."""
        blocks = np.searchsorted(self.edges, ordinals, side="right") - 1
        rows = ordinals - self.edges[blocks]
        if self._bits is not None:
            for block in np.unique(blocks).tolist():
                inside = blocks == block
                rows[inside] = self.select_rows(block)[rows[inside]]
        return Locations.from_columns(source, blocks, rows)

    def number_rows(self, ordinals: Int64s) -> Int64s:
        """Return the numbers of selected rows among all rows of the source."""
        if self._bits is None:
            return ordinals
        array = self.locate(ordinals).array
        return self._blocks.edges[array[:, 1]] + array[:, 2]


def join_bits(parts: Sequence[Bits], rows: Sequence[int]) -> Bits:
    """Join bitmaps with the given numbers of rows into one."""
    joined = np.zeros(-(-sum(rows) // 8), dtype=np.uint8)
    start = 0
    for bits, count in zip(parts, rows, strict=True):
        for first in range(0, count, _CHUNK_ROWS):
            chunk = _unpack(bits, first, min(count, first + _CHUNK_ROWS))
            at, shift = divmod(start + first, 8)
            packed = np.packbits(np.pad(chunk, (shift, 0)), bitorder="little")
            joined[at : at + len(packed)] |= packed
        start += count
    return joined


def _unpack(bits: Bits, start: int, stop: int) -> Bits:
    """Return one byte per bit of ``bits[start:stop]``."""
    first = start // 8
    packed = bits[first : -(-stop // 8)]
    return np.unpackbits(packed, bitorder="little")[start - 8 * first : stop - 8 * first]
