"""Which samples a rank saw: exact ids up to a limit, and a sketch of all of them beyond it.

The sketch keeps the 512 smallest hashes of the distinct ids (bottom-k, Cohen and Kaplan 2007,
https://doi.org/10.1145/1281100.1281133). All ranks use one hash, so the sketches of two ranks tell
how many ids they share to about 5 %, however many there were.
"""

from __future__ import annotations

import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from miniray.doctor import layout
from miniray.doctor.layout import Cell, Pass
from miniray.doctor.model import SamplePass

if TYPE_CHECKING:
    import numpy as np

    from miniray.doctor.box import Box


_PIECE = 1024


class PassWriter:
    """One pass over one loader, written into the box's next place for passes.

    Ids within the exact limit are in the box at once; the sketch of a longer pass follows in
    pieces of 1024 ids, because hashing a few at a time would cost more than the rest of a step.
    """

    def __init__(self, box: Box, loader: int, epoch: int) -> None:
        self.loader = loader
        self.epoch = epoch
        self.count = 0
        self._box = box
        number = box.ints[Cell.PASSES]
        start = layout.PASSES_AT + number % layout.PASS_SLOTS * layout.PASS_SIZE
        ids_at = start + layout.PASS_HEAD
        sketches_at = ids_at + layout.PASS_IDS * 8
        self._cells = cells = box.memory[start:ids_at].cast("q")
        self._ids = box.memory[ids_at:sketches_at].cast("q")
        self._places = tuple(
            box.memory[at : at + layout.SKETCH_SIZE * 8].cast("Q")
            for at in (sketches_at, sketches_at + layout.SKETCH_SIZE * 8)
        )
        self._pending = array.array("q")
        self._sketch: np.ndarray[Any, Any] | None = None
        self._version = 0
        cells[Pass.KEY] = 0
        cells[Pass.LOADER], cells[Pass.EPOCH] = loader, epoch
        for cell in (Pass.COUNT, Pass.IDS, Pass.SKETCH):
            cells[cell] = 0
        cells[Pass.KEY] = number + 1
        box.ints[Cell.PASSES] = number + 1

    def add(self, ids: Iterable[int]) -> None:
        """Add the ids of a batch, in order. ``TypeError`` for what is no integer."""
        batch = array.array("q", ids)
        size = len(batch)
        before = self.count
        self.count = count = before + size
        kept = min(count, layout.PASS_IDS)
        if kept > before:
            self._ids[before:kept] = batch[: kept - before]
            self._cells[4] = kept  # Pass.IDS
        self._cells[3] = count  # Pass.COUNT
        if count > layout.PASS_IDS:
            if not self._version and not self._pending:  # the ids from before are in it too
                self._pending.extend(self._ids[: min(before, layout.PASS_IDS)])
            self._pending.extend(batch)
            if len(self._pending) >= _PIECE:
                self.flush()

    def flush(self) -> None:
        """Bring the sketch up to date."""
        if not self._pending:
            return
        import numpy as np

        hashes = hash_ids(np.frombuffer(self._pending, np.int64))
        self._pending = array.array("q")
        sketch = self._sketch
        if sketch is not None:
            if len(sketch) == layout.SKETCH_SIZE:
                hashes = hashes[hashes < sketch[-1]]
                if not hashes.size:
                    return
            hashes = np.concatenate((sketch, hashes))
        hashes = np.sort(hashes)  # np.unique takes five times as long for as few
        hashes = hashes[np.append(True, hashes[1:] != hashes[:-1])]
        self._write(hashes[: layout.SKETCH_SIZE])

    def _write(self, sketch: np.ndarray[Any, Any]) -> None:
        self._sketch = sketch
        self._version = version = self._version + 1
        self._places[version % 2][: len(sketch)] = sketch.data.cast("B").cast("Q")
        self._cells[Pass.SKETCH_SIZE_0 + version % 2] = len(sketch)
        self._cells[Pass.SKETCH] = version


def hash_ids(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The finaliser of splitmix64: neighbours in, unrelated numbers out; the same on every rank."""
    import numpy as np

    with np.errstate(over="ignore"):
        x = ids.astype(np.int64).view(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray[Any, Any] = x ^ (x >> np.uint64(31))
    return mixed


def sketch_of(record: SamplePass) -> tuple[tuple[int, ...], bool]:
    """(the smallest hashes of all distinct ids, sorted; whether these are the hashes of all)."""
    import numpy as np

    if record.is_exact or not record.sketch:
        hashes = np.unique(hash_ids(np.asarray(record.ids, dtype=np.int64)))
        return tuple(hashes[: layout.SKETCH_SIZE].tolist()), hashes.size <= layout.SKETCH_SIZE
    return record.sketch, len(record.sketch) < layout.SKETCH_SIZE


def distinct(record: SamplePass) -> int:
    """How many different ids the pass gave; an estimate beyond the exact limit."""
    if record.is_exact or not record.sketch:
        return len(set(record.ids))
    if len(record.sketch) < layout.SKETCH_SIZE:
        return len(record.sketch)
    return round((len(record.sketch) - 1) / record.sketch[-1] * 2.0**64)


def overlap(a: SamplePass, b: SamplePass) -> float:
    """The share of the smaller pass's distinct ids that the other pass also gave, 0 to 1.

    Exact while both passes are; otherwise estimated from the sketches, to about 0.05.
    """
    if not a.count or not b.count:
        return 0.0
    if (a.is_exact or not a.sketch) and (b.is_exact or not b.sketch):
        ids_a, ids_b = set(a.ids), set(b.ids)
        return len(ids_a & ids_b) / min(len(ids_a), len(ids_b))
    sketch_a, sketch_b = set(sketch_of(a)[0]), set(sketch_of(b)[0])
    union = sorted(sketch_a | sketch_b)[: layout.SKETCH_SIZE]
    shared = sum(1 for value in union if value in sketch_a and value in sketch_b)
    jaccard = shared / len(union)
    smaller = min(distinct(a), distinct(b))
    both = jaccard / (1 + jaccard) * (distinct(a) + distinct(b))
    return min(1.0, both / max(1, smaller))


def same_order(a: SamplePass, b: SamplePass) -> bool | None:
    """Whether two passes of one rank gave the same ids in the same order, as far as both went.

    None where fewer than 8 ids can be compared: too few to mean anything.
    """
    length = min(len(a.ids), len(b.ids))
    if length < 8:
        return None
    return a.ids[:length] == b.ids[:length]
