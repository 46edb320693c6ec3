"""Locations of blocks and rows, shared by ``plan/`` and ``sources/``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]


class RowLocation(NamedTuple):
    """Location of one row."""

    source: int  # 0 unless the dataset is a mixture
    block: int  # index into the source's blocks
    row: int  # index within the block


class BlockKey(NamedTuple):
    """Identifier of a block across the sources of a mixture."""

    source: int
    block: int


@dataclass(frozen=True, slots=True)
class Block:
    """Rows that are read together, about 8 MB when decoded."""

    file: int  # index into ``Source.files``
    run: int  # row group, record batch or file; blocks of a run are cheap only in order
    first_row: int  # within the file
    rows: int
    nbytes: int  # decoded size, estimated from metadata


class Blocks:
    """Blocks of a source in data order, stored as one array per field of ``Block``."""

    def __init__(self, *fields: Sequence[int] | Int64s) -> None:
        self.file, self.run, self.first_row, self.rows, self.nbytes = self._fields = [
            np.asarray(values, dtype=np.int64) for values in fields
        ]
        #: Number of rows before each block, and the number of all rows.
        self.edges: Int64s = cumulate(self.rows)

    @property
    def total_rows(self) -> int:
        return int(self.edges[-1])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, block: int) -> Block:
        return Block(*(int(values[block]) for values in self._fields))


class Locations(Sequence[RowLocation]):
    """Row locations, stored as an array with the columns source, block and row."""

    def __init__(self, array: Int64s) -> None:
        self.array = array

    @classmethod
    def from_columns(cls, source: Any, block: Int64s, row: Int64s) -> Locations:
        """Create locations from one array per column; ``source`` can be a single number."""
        array = np.empty((len(block), 3), dtype=np.int64)
        array[:, 0], array[:, 1], array[:, 2] = source, block, row
        return cls(array)

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> RowLocation: ...
    @overload
    def __getitem__(self, index: slice) -> Locations: ...
    def __getitem__(self, index: int | slice) -> RowLocation | Locations:
        if isinstance(index, slice):
            return Locations(self.array[index])
        return RowLocation(*self.array[index].tolist())

    def __iter__(self) -> Iterator[RowLocation]:
        return (RowLocation(*row) for row in self.array.tolist())


def cumulate(counts: Sequence[int] | Int64s) -> Int64s:
    """Return 0 and the running totals of ``counts``."""
    edges = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=edges[1:])
    return edges
