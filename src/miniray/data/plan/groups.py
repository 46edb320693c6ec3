"""Order that keeps rows with the same group key together, on one rank and next to each other.

The order permutes whole groups. Shards begin at the start of a group, so their sizes differ by up
to the rows of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from miniray.data.locations import Blocks, Int64s, cumulate
from miniray.data.plan.order import EpochOrder, permute_runs
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.data.plan.selection import Selection


class GroupedOrder(EpochOrder):
    """Groups in data order, permuted within windows of blocks, or permuted globally.

    Args:
        blocks: Blocks of the source.
        selection: Selected rows.
        starts: Ordinals of the first rows of groups.
        shuffle: ``None``, ``"window"`` or ``"global"``.
        seed: Seed of the permutation.
        epoch: Number of the epoch.
        window_bytes: Maximum size of a window.
    """

    def __init__(
        self,
        blocks: Blocks,
        selection: Selection,
        starts: Sequence[int],
        shuffle: str | None,
        seed: int | None,
        epoch: int,
        window_bytes: int,
    ) -> None:
        super().__init__(selection.count)
        self._starts = np.array([*starts, self.n], dtype=np.int64)
        self._key = (seed, "groups", epoch)
        self._is_shuffled = shuffle is not None
        if shuffle == "global":
            self._ranges = [np.array([[0, len(starts)]])]
        else:
            self._ranges = self._cut_windows(blocks, selection, window_bytes)
        lengths = [int(np.diff(self._starts[ranges]).sum()) for ranges in self._ranges]
        self._edges = cumulate(lengths)
        self._arranged = lru_cache(maxsize=4)(self._arrange)

    def _cut_windows(self, blocks: Blocks, selection: Selection, window_bytes: int) -> list[Int64s]:
        """Return the ranges of groups of each window. A group belongs to its first block."""
        edges = np.searchsorted(self._starts[:-1], selection.edges)
        if self._is_shuffled:
            sequence = permute_runs(blocks, derive_key(*self._key, "blocks"))
        else:
            sequence = np.arange(len(blocks))
        windows: list[Int64s] = []
        ranges: list[tuple[int, int]] = []
        total = 0
        for block in sequence.tolist():
            if edges[block] == edges[block + 1]:
                continue
            nbytes = int(blocks.nbytes[block])
            if ranges and total + nbytes > window_bytes:
                windows.append(np.array(ranges))
                ranges, total = [], 0
            ranges.append((int(edges[block]), int(edges[block + 1])))
            total += nbytes
        if ranges:
            windows.append(np.array(ranges))
        return windows

    def _arrange(self, window: int) -> tuple[Int64s, Int64s]:
        """Return the first ordinal and the first position in the window of each of its groups."""
        groups = np.concatenate([np.arange(a, b) for a, b in self._ranges[window].tolist()])
        if self._is_shuffled:
            permutation = Permutation(len(groups), derive_key(*self._key, "rows", window))
            groups = groups[permutation.map_positions(np.arange(len(groups)))]
        lengths = self._starts[groups + 1] - self._starts[groups]
        return self._starts[groups], cumulate(lengths)[:-1]

    def find_window_end(self, position: int) -> int:
        return int(self._edges[np.searchsorted(self._edges, position, side="right")])

    def map_positions(self, positions: Int64s) -> Int64s:
        ordinals = np.empty_like(positions)
        windows = np.searchsorted(self._edges, positions, side="right") - 1
        for window in np.unique(windows).tolist():
            inside = windows == window
            starts, offsets = self._arranged(window)
            places = positions[inside] - self._edges[window]
            groups = np.searchsorted(offsets, places, side="right") - 1
            ordinals[inside] = starts[groups] + places - offsets[groups]
        return ordinals

    def find_group_start(self, position: int) -> int:
        window = int(np.searchsorted(self._edges, position, side="right")) - 1
        offsets = self._arranged(window)[1] + self._edges[window]
        group = int(np.searchsorted(offsets, position))
        return int(offsets[group] if group < len(offsets) else self._edges[window + 1])
