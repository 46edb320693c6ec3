"""Work on large weights in pieces that fit the cache, on all cores.

A plain ``stack().mean()`` reads and writes main memory once for every operation. Here a piece of at
most a megabyte is taken through all operations and all workers before the next one is touched, so
memory is read once for each worker and written once. numpy releases the interpreter's lock inside
each operation, so threads do run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miniray.limits import cpu_count
from miniray.ps.leaves import Array, Leaf
from miniray.ps.reading import Room

if TYPE_CHECKING:
    from miniray.ps.places import Run

#: Numbers in a piece: large enough that Python's share is small, small enough for the cache. Twice
#: as many where there are many: a thread that finds the interpreter's lock taken between two
#: operations is woken late, and with larger pieces that happens less often.
PIECE = 131_072
_MANY = 16_000_000
#: Room for pieces that are read may take this part of the weights.
_ROOM = 0.25
#: Below this many numbers a second thread costs more than it brings.
_WORTH_THREADS = 1_000_000


class Range(NamedTuple):
    """A part of a leaf: what one server is responsible for. Usually the whole leaf."""

    leaf: int
    start: int
    stop: int


class Piece(NamedTuple):
    """A part of a range: what is computed at once. ``range`` is the range's number."""

    number: int
    range: int
    leaf: int
    start: int
    stop: int
    #: Where the range begins in its leaf; state of a strategy is kept by range.
    base: int


def whole(leaves: Iterable[int], all_leaves: list[Leaf]) -> list[Range]:
    return [Range(i, 0, all_leaves[i].size) for i in leaves]


def pieces_of(ranges: Sequence[Range]) -> list[Piece]:
    size = _piece(sum(r.stop - r.start for r in ranges))
    cuts = (
        (which, leaf, low, min(low + size, stop), start)
        for which, (leaf, start, stop) in enumerate(ranges)
        for low in range(start, stop, size)
    )
    return [Piece(number, *cut) for number, cut in enumerate(cuts)]


def readers(workers: int, nbytes: int) -> int:
    """How many threads may have room for a piece of each of so many workers' weights."""
    return int(_ROOM * nbytes / (4 * _piece(nbytes // 4) * workers))


def _piece(numbers: int) -> int:
    return PIECE if numbers < _MANY else 2 * PIECE


def split(ranges: list[Range], leaves: list[Leaf], parts: int) -> list[list[Range]]:
    """Cut ``ranges`` into ``parts`` lists of about the same number of bytes, large leaves too."""
    width = [leaves[r.leaf].nbytes / max(leaves[r.leaf].size, 1) for r in ranges]
    total = sum((r.stop - r.start) * w for r, w in zip(ranges, width, strict=True))
    shares: list[list[Range]] = [[] for _ in range(parts)]
    done = 0.0
    for (leaf, start, stop), bytes_each in zip(ranges, width, strict=True):
        while start < stop:
            part = min(int(done * parts / total), parts - 1) if total else 0
            room = (part + 1) * total / parts - done
            # Not less than one number, and for the last part everything that is left.
            count = stop - start if part == parts - 1 else max(1, round(room / bytes_each))
            end = min(stop, start + count)
            shares[part].append(Range(leaf, start, end))
            done += (end - start) * bytes_each
            start = end
    return shares


class Crew:
    """Run a function on pieces with several threads.

    The threads are started when they are first needed, and kept for later runs.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or min(cpu_count(), 8)
        self._pool: ThreadPoolExecutor | None = None
        #: Intermediate results, one per thread. Kept because fresh memory is ten times slower.
        self._scratches: list[Scratch] = []

    def run(
        self,
        pieces: list[Piece],
        work: Callable[[Piece, Scratch], None],
        most: int | None = None,
    ) -> None:
        """Call ``work`` for every piece, in at most ``most`` threads.

        If a call raises, start no further ones, wait for the running ones, and raise its exception,
        whatever its type.
        """
        total = sum(p.stop - p.start for p in pieces)
        threads = self.threads if most is None else min(self.threads, most)
        threads = 1 if total < _WORTH_THREADS else min(threads, len(pieces))
        while len(self._scratches) < threads:
            self._scratches.append(Scratch())
        queue = iter(pieces)  # shared by the threads: each takes the next piece
        errors: list[BaseException] = []

        def run_pieces(scratch: Scratch) -> None:
            try:
                # The results are checked for overflow and NaN. The setting is per thread.
                with np.errstate(all="ignore"):
                    for piece in queue:
                        work(piece, scratch)
                        if errors:
                            break
            except BaseException as error:
                errors.append(error)

        if threads > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "miniray-ps")
        helpers = self._pool.map(run_pieces, self._scratches[1:threads]) if self._pool else ()
        run_pieces(self._scratches[0])
        list(helpers)  # wait for them
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # a reference cycle with the traceback would keep the weights in memory


class Scratch:
    """Room for intermediate results of one thread, used again for every piece."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[Any, np.dtype[Any]], Array] = {}
        self._rooms: dict[tuple[int, np.dtype[Any]], Room] = {}

    def get(self, name: Any, size: int, dtype: np.dtype[Any]) -> Array:
        array = self._arrays.get((name, dtype))
        if array is None or len(array) < size:
            array = self._arrays[name, dtype] = np.empty(max(size, min(PIECE, 4096)), dtype)
        return array[:size]

    def room(self, worker: int, dtype: np.dtype[Any]) -> Room:
        """Room for a piece of this worker's weights, always at the same place."""
        room = self._rooms.get((worker, dtype))
        if room is None:
            room = self._rooms[worker, dtype] = Room(2 * PIECE, dtype)
        return room


class Buffers:
    """A strategy's buffers for some ranges, twice: as they were, and as they will be.

    A sync writes the second set; ``commit`` makes it the first. So a sync that fails at its very
    end, when a worker does not take the new weights, changes nothing. The memory of the old set is
    used for the next new one.
    """

    def __init__(
        self, start: Mapping[str, float], ranges: list[Range], leaves: Sequence[Leaf | Run]
    ) -> None:
        self._start = start
        self._ranges = ranges
        self._leaves = leaves
        self._old: dict[str, list[Array]] = {n: self._make(value) for n, value in start.items()}
        self._new: dict[str, list[Array]] = {n: self._make(None) for n in start}
        self._joined: Buffers | None = None

    def joined(self, ranges: list[Range], runs: Sequence[Run]) -> Buffers:
        """The same memory by runs of entries: what is written to one is seen in the other."""
        joined = Buffers(self._start, ranges, runs)
        for name, arrays in self._old.items():
            places = _entries(joined._old[name], runs)
            for place, array in zip(places, arrays, strict=True):
                np.copyto(place, array)
            self._old[name] = places
            self._new[name] = _entries(joined._new[name], runs)
        self._joined = joined
        return joined

    def _make(self, value: float | None) -> list[Array]:
        arrays = []
        for leaf, low, high in self._ranges:
            compute = self._leaves[leaf].compute
            if value is None:
                arrays.append(np.empty(high - low, compute))
            else:
                # zeros() costs nothing until it is written to
                arrays.append(
                    np.full(high - low, value, compute) if value else np.zeros(high - low, compute)
                )
        return arrays

    def of(self, piece: Piece) -> tuple[dict[str, Array], dict[str, Array]]:
        part = slice(piece.start - piece.base, piece.stop - piece.base)
        old = {n: arrays[piece.range][part] for n, arrays in self._old.items()}
        new = {n: arrays[piece.range][part] for n, arrays in self._new.items()}
        return old, new

    def keep(self, piece: Piece) -> None:
        """Nothing changes for ``piece`` in this sync."""
        old, new = self.of(piece)
        for name, array in new.items():
            array[:] = old[name]

    def commit(self) -> None:
        self._old, self._new = self._new, self._old
        if self._joined is not None:
            self._joined.commit()

    def state(self) -> dict[str, list[Array]]:
        """A copy, by name and range."""
        return {n: [a.copy() for a in arrays] for n, arrays in self._old.items()}

    def load(self, state: Mapping[str, Sequence[Array]]) -> None:
        """Take over what ``state`` of the same weights gave."""
        for name, arrays in state.items():
            for target, array in zip(self._old[name], arrays, strict=True):
                np.copyto(target, array)


def _entries(arrays: list[Array], runs: Sequence[Run]) -> list[Array]:
    """Arrays of entries over those of runs."""
    return [
        array[start : start + size]
        for array, run in zip(arrays, runs, strict=True)
        for start, size in zip(run.starts, run.sizes, strict=True)
    ]


def all_finite(block: Array) -> bool:
    """Return True if ``block`` contains neither NaN nor infinity."""
    # The sum of squares is five times faster than np.isfinite, and finite only if all numbers are.
    # It overflows for finite numbers above 1e19, which need the slow check.
    return math.isfinite(np.dot(block, block)) or bool(np.isfinite(block).all())
