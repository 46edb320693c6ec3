"""Rows that belong together (turns of one conversation) kept on one rank, next to each other.

The key column is read once when the plan is made. The order permutes whole groups, and parts of
ranks begin where a group does, so parts differ by up to the rows of a group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from miniray.data.plan.order import Order, SequentialOrder, starts_of
from miniray.data.plan.permutation import Permutation, Positions, derive_key
from miniray.data.plan.selection import Selection
from miniray.data.sources.base import Source
from miniray.errors import DataError

Ranges = npt.NDArray[np.int64]


def group_starts(source: Source, column: str, selection: Selection) -> list[int]:
    """Where groups begin among the selected rows, in the order of the data.

    Raises ``DataError`` where rows of a group are not next to each other.
    """
    blocks = source.blocks
    starts: list[int] = []
    seen: dict[object, tuple[str, int]] = {}
    previous = object()
    for position, (block, row, key) in enumerate(_keys(source, column, selection)):
        if key != previous:
            where = blocks.files[blocks.file[block]], blocks.first[block] + row
            if not isinstance(key, Hashable):
                raise DataError(
                    f"{where[0]}, row {where[1]}: {column}={key!r} cannot name a group; group_by"
                    " takes a column of numbers or text"
                )
            if key in seen:
                raise DataError(
                    f"rows of group {column}={key!r} are not next to each other: one run begins at"
                    f" {seen[key][0]}, row {seen[key][1]}, another at {where[0]}, row {where[1]}."
                    f" Sort the data by {column!r} first"
                )
            seen[key] = where
            starts.append(position)
            previous = key
    return starts


def _keys(source: Source, column: str, selection: Selection) -> Iterator[tuple[int, int, object]]:
    blocks = source.blocks
    for block in range(len(blocks)):
        count = selection.sizes[block]
        if not count:
            continue
        chosen = selection.rows([block] * count, range(count))
        rows = source.read(block, 0, blocks.rows[block], [column])
        inside = [row - rows.start for row in chosen]
        for row, found in zip(chosen, rows.rows(inside), strict=True):
            yield block, row, found[column]


class GroupedOrder(Order):
    """Groups in the order of the data, or permuted within windows of blocks, or all together."""

    def __init__(
        self,
        sizes: Sequence[int],
        nbytes: Sequence[int],
        starts: Sequence[int],
        shuffle: str | None,
        seed: int | None,
        epoch: int,
        window: int,
    ) -> None:
        super().__init__(sizes)
        self._natural = SequentialOrder(sizes)
        self._starts = np.array([*starts, self.n], dtype=np.int64)
        self._key = (seed, "groups", epoch)
        self._shuffled = shuffle is not None
        if shuffle == "window":
            self._windows = self._cut(sizes, nbytes, window)
        else:
            self._windows = [np.array([[0, len(starts)]])]
        lengths = [
            int((self._starts[w[:, 1]] - self._starts[w[:, 0]]).sum()) for w in self._windows
        ]
        self._edges = np.cumsum([0, *lengths])
        self._arranged = lru_cache(maxsize=4)(self._arrange)

    def _cut(self, sizes: Sequence[int], nbytes: Sequence[int], window: int) -> list[Ranges]:
        """Windows, each some ranges of groups."""
        # A group belongs to the block it begins in.
        first = np.searchsorted(self._starts[:-1], starts_of(sizes))
        last = np.append(first[1:], len(self._starts) - 1)
        shuffle = Permutation(len(sizes), derive_key(*self._key, "blocks"))
        windows: list[Ranges] = []
        ranges: list[tuple[int, int]] = []
        held = 0
        for block in shuffle.rows(range(len(sizes))):
            size = nbytes[block]
            if ranges and held + size > window:
                windows.append(np.array(ranges))
                ranges, held = [], 0
            edges = np.linspace(first[block], last[block], -(-size // window) + 1 if size else 2)
            edges = edges.astype(np.int64)
            pieces = list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))
            windows += [np.array([piece]) for piece in pieces[:-1]]
            ranges.append(pieces[-1])
            held += size // len(pieces)
        if ranges:
            windows.append(np.array(ranges))
        return windows

    def _arrange(self, window: int) -> tuple[Positions, Positions]:
        """The groups of a window in order: where each begins in the data, and in the window."""
        ranges = self._windows[window]
        groups = np.concatenate([np.arange(a, b) for a, b in ranges.tolist()])
        if self._shuffled:
            shuffle = Permutation(len(groups), derive_key(*self._key, "rows", window))
            groups = groups[shuffle.rows(range(len(groups)))]
        lengths = self._starts[groups + 1] - self._starts[groups]
        return self._starts[groups], np.cumsum(lengths) - lengths

    def places(self, positions: Sequence[int]) -> tuple[list[int], list[int]]:
        asked = np.array(positions, dtype=np.int64)
        natural = np.empty_like(asked)
        windows = np.searchsorted(self._edges, asked, side="right") - 1
        for window in set(windows.tolist()):
            inside = windows == window
            data, own = self._arranged(window)
            at = asked[inside] - self._edges[window]
            group = np.searchsorted(own, at, side="right") - 1
            natural[inside] = data[group] + at - own[group]
        return self._natural.places(natural.tolist())

    def snap(self, position: int) -> int:
        """The position, or the next at which a group begins."""
        window = int(np.searchsorted(self._edges, position, side="right")) - 1
        own = self._arranged(window)[1] + self._edges[window]
        at = int(np.searchsorted(own, position))
        return int(own[at] if at < len(own) else self._edges[window + 1])
