"""Which rows make a batch: so many rows, or as many as a number of tokens allows.

Plans are functions of the dataset's part alone, so a loader that starts again makes the same
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from miniray.data.dataset import Dataset
from miniray.data.loader.blocks import BlockCache
from miniray.data.plan.permutation import Permutation, derive_key
from miniray.errors import RowError


@dataclass(frozen=True)
class Batch:
    """Rows of a rank's part, and what the rank has taken once they are delivered."""

    index: Sequence[int]
    taken: Any
    last: bool


class FixedBatches:
    """``size`` rows each; the last may have fewer, or is left out."""

    alone = False  # whether other ranks may make batches of other sizes at the same step

    def __init__(self, dataset: Dataset, size: int, drop_last: bool) -> None:
        self._rows, self._size, self._drop_last = len(dataset), size, drop_last

    def __len__(self) -> int:
        return self._rows // self._size if self._drop_last else -(-self._rows // self._size)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self)):
            start = number * self._size
            stop = min(self._rows, start + self._size)
            # Not the rows this rank took but what a full batch has: with this, a rank whose part is
            # shorter speaks for those whose part is longer.
            yield Batch(range(start, stop), start + self._size, number + 1 == len(self))


class TokenBatches:
    """Batches of rows of similar length, at most ``tokens`` of them once padded to the longest.

    The part is taken in chunks of ``chunk`` rows; each is sorted by length, cut into batches, and
    these come in a keyed random order. ``length`` names a column or is a function of a row.
    """

    alone = True

    def __init__(
        self,
        dataset: Dataset,
        tokens: int,
        length: str | Callable[[Any], int],
        chunk: int,
    ) -> None:
        self._dataset, self._tokens, self._length, self._chunk = dataset, tokens, length, chunk
        self._count: int | None = None

    def __len__(self) -> int:
        if self._count is None:
            self._count = sum(1 for _ in self)
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        total, cache = len(self._dataset), self._length_cache()
        for start in range(0, total, self._chunk):
            index = range(start, min(total, start + self._chunk))
            found = self.cut(self._dataset.positions(index), cache)
            for number, inside in enumerate(found, 1):
                after = index[-1] + 1 if number == len(found) else [start, number]
                yield Batch([index[i] for i in inside], after, after == total)

    def _length_cache(self) -> BlockCache:
        columns = [self._length] if isinstance(self._length, str) else None
        return self._dataset.new_cache(max(1, self._dataset.memory_budget // 4), columns)

    def cut(self, positions: Sequence[int], cache: BlockCache | None = None) -> list[list[int]]:
        """The batches of one chunk, as indices into ``positions``."""
        cache = cache or self._length_cache()
        lengths = self._lengths(positions, cache)
        found: list[list[int]] = []
        # Ascending, so that the newest row is the longest.
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if found and (len(found[-1]) + 1) * lengths[i] <= self._tokens:
                found[-1].append(i)
            else:
                found.append([i])
        seed, epoch = self._dataset.seed or 0, self._dataset.epoch
        key = derive_key(seed, "tokens", epoch, positions[0], len(positions))
        return [found[i] for i in Permutation(len(found), key).rows(range(len(found)))]

    def _lengths(self, positions: Sequence[int], cache: BlockCache) -> list[int]:
        places = self._dataset.places_of(positions)
        if isinstance(self._length, str):
            values = cache.columns(places)[self._length]
            lengths = [len(v) if hasattr(v, "__len__") else int(v) for v in values]
        else:
            lengths = [int(self._length(row)) for row in cache.rows(places)]
        longest = lengths.index(max(lengths))
        if lengths[longest] > self._tokens:
            file, row = self._dataset.name_rows(places[longest : longest + 1])[0]
            raise RowError(
                f"{file}, row {row} has {lengths[longest]} tokens, more than a batch may have"
                f" ({self._tokens}). Filter or truncate such rows, or allow larger batches",
                file,
                row,
            )
        return lengths
