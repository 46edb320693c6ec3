"""The samples that each rank read: the exact number of all, and the first ids of each pass.

The first 4,096 ids of a pass are kept in their order. Counts of distinct and shared samples are
exact up to there, and lower bounds beyond.
"""

from __future__ import annotations

import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from miniray.doctor import layout
from miniray.doctor.layout import Cell, Pass
from miniray.doctor.model import SamplePass

if TYPE_CHECKING:
    from miniray.doctor.box import Box


class PassWriter:
    """Write one pass over one loader into the record's next place for passes."""

    def __init__(self, box: Box, loader: int, epoch: int) -> None:
        self.loader = loader
        self.epoch = epoch
        self.count = 0
        number = box.ints[Cell.PASSES]
        start = layout.PASSES_AT + number % layout.PASS_SLOTS * layout.PASS_SIZE
        ids_at = start + layout.PASS_HEAD
        self._cells = cells = box.memory[start:ids_at].cast("q")
        self._ids = box.memory[ids_at : ids_at + layout.PASS_IDS * 8].cast("q")
        last_key = box.memory[ids_at + layout.PASS_IDS * 8 : start + layout.PASS_SIZE].cast("q")
        cells[Pass.KEY] = last_key[0] = 0
        cells[Pass.LOADER], cells[Pass.EPOCH] = loader, epoch
        cells[Pass.COUNT] = cells[Pass.IDS] = 0
        cells[Pass.KEY] = last_key[0] = number + 1
        last_key.release()
        box.ints[Cell.PASSES] = number + 1

    def add(self, ids: Iterable[int]) -> None:
        """Add the ids of a batch, in order. Raise ``TypeError`` if one isn't an integer."""
        batch = array.array("q", ids)
        before = self.count
        self.count = count = before + len(batch)
        kept = min(count, layout.PASS_IDS)
        if kept > before:
            self._ids[before:kept] = batch[: kept - before]
            self._cells[4] = kept  # Pass.IDS
        self._cells[3] = count  # Pass.COUNT


def count_distinct(*passes: SamplePass) -> int:
    """Return how many different ids the passes had; a lower bound unless all are exact."""
    return len({number for one in passes for number in one.ids})


def count_shared(a: SamplePass, b: SamplePass) -> int:
    """Return how many different ids both passes had; a lower bound unless both are exact."""
    return len(set(a.ids) & set(b.ids))


def overlap(a: SamplePass, b: SamplePass) -> float:
    """Return the share of the smaller pass's kept ids that the other pass also kept, 0 to 1."""
    smaller = min(len(set(a.ids)), len(set(b.ids)))
    return count_shared(a, b) / smaller if smaller else 0.0


def describe_overlap(a: SamplePass, b: SamplePass) -> str:
    """Format what two passes share: "50% of their samples", or "at least 4,096 samples"."""
    if a.is_exact and b.is_exact:
        return f"{overlap(a, b):.0%} of their samples"
    return f"at least {count_shared(a, b):,} samples"


def same_order(a: SamplePass, b: SamplePass) -> bool | None:
    """Whether two passes of one rank gave the same ids in the same order, as far as both went.

    None where fewer than 8 ids can be compared: too few to mean anything.
    """
    length = min(len(a.ids), len(b.ids))
    if length < 8:
        return None
    return a.ids[:length] == b.ids[:length]
