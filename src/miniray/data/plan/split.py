"""Assign the remaining positions of an epoch to ranks, and remove what ranks have taken.

An epoch is the positions ``0 .. n-1`` of its order. A *stage* of its history is ``[world_size,
taken]``: each rank took the first ``taken`` positions of its share. The remaining positions follow
from the history, whose length depends neither on the number of rows nor on the number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from miniray.data.locations import Int64s, cumulate
from miniray.data.plan.shard import Even, split_evenly

#: Sorted, disjoint, half-open, nonempty intervals of positions.
Intervals = Sequence[tuple[int, int]]

#: ``[world_size, taken]``, where ``taken`` is the number of rows that each rank took, or a list
#: with the number of each rank. With batches by tokens, an entry can be ``[rows, batches]``, and
#: the stage has a third item, the number of rows that are cut into batches at a time.
Stage = Sequence[Any]

#: Returns the position, or the next position at which a group begins.
FindGroupStart = Callable[[int], int]

#: Returns those of the positions of a chunk, sorted, that aren't in its first batches.
FindChunkRest = Callable[[Sequence[int], int], Sequence[int]]


class IntervalSet:
    """Positions in intervals, numbered from 0."""

    def __init__(self, intervals: Intervals) -> None:
        self.intervals = intervals
        array = np.array(intervals, dtype=np.int64).reshape(-1, 2)
        self._starts, self._edges = array[:, 0], cumulate(array[:, 1] - array[:, 0])
        self.total = int(self._edges[-1])

    def slice(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the intervals of the ``start``-th to ``stop``-th position."""
        first = max(0, bisect_right(self._edges, start) - 1)
        for (low, high), edge in zip(self.intervals[first:], self._edges[first:-1], strict=True):
            if edge >= stop:
                return
            begin, end = max(low, low + start - int(edge)), min(high, low + stop - int(edge))
            if begin < end:
                yield begin, end

    def find_positions(self, numbers: Int64s) -> Int64s:
        """Return the positions with these numbers."""
        which = np.searchsorted(self._edges, numbers, side="right") - 1
        return self._starts[which] + numbers - self._edges[which]

    def find_number(self, position: int) -> int:
        """Return the number of positions before ``position``."""
        which = int(np.searchsorted(self._starts, position, side="right")) - 1
        low, high = self.intervals[which]
        return int(self._edges[which]) + min(position, high) - low


@dataclass(frozen=True)
class Assignment:
    """Positions of one rank: its i-th is the ``first + i * step``-th remaining position.

    ``length`` is ``count``, or more if rows are repeated (``even="pad"``).
    """

    remaining: IntervalSet
    first: int
    step: int
    count: int
    length: int
    spare: int  # number of the remaining position that pads an empty share

    def find_positions(self, indices: Int64s) -> Int64s:
        """Return the positions of the rank's rows at ``indices``, padding included."""
        if not self.count:
            return self.remaining.find_positions(np.full(len(indices), self.spare, dtype=np.int64))
        indices = np.where(indices < self.count, indices, 0)
        return self.remaining.find_positions(self.first + indices * self.step)

    def iter_intervals(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield the rank's positions from ``start`` on; only for contiguous shares."""
        return self.remaining.slice(self.first + start, self.first + self.count)


class Split(ABC):
    """Divides the remaining positions among ranks."""

    def __init__(self, even: Even = "exact") -> None:
        self.even = even

    def count_shared(self, total: int, world_size: int) -> int:
        """Return how many of ``total`` remaining positions are assigned to ranks."""
        return total - total % world_size if self.even == "drop" else total

    def assign_positions(self, remaining: IntervalSet, rank: int, world_size: int) -> Assignment:
        """Return the positions of ``rank``."""
        first, step, count = self._place(remaining, rank, world_size)
        length = -(-remaining.total // world_size) if self.even == "pad" else count
        return Assignment(remaining, first, step, count, length, rank % max(1, remaining.total))

    def count_step_rows(
        self, remaining: IntervalSet, world_size: int, batch_size: int
    ) -> list[list[int]]:
        """Return the rows of each rank in each step, without communication."""
        ranks = range(world_size)
        lengths = [self.assign_positions(remaining, rank, world_size).length for rank in ranks]
        full = min(lengths) // batch_size
        return [
            *[[batch_size] * world_size] * full,  # one list: most steps are full
            *(
                [min(batch_size, max(0, length - start)) for length in lengths]
                for start in range(full * batch_size, max(lengths), batch_size)
            ),
        ]

    @abstractmethod
    def _place(self, remaining: IntervalSet, rank: int, world_size: int) -> tuple[int, int, int]:
        """Return the number of the rank's first position, the step and the count."""

    @abstractmethod
    def remove_taken(self, remaining: IntervalSet, stage: Stage) -> Intervals:
        """Return the positions that remain after a stage."""

    @abstractmethod
    def extend_history(self, history: Sequence[Stage], stage: Stage, n: int) -> list[list[Any]]:
        """Append a stage, or merge it with the last one if the result is the same."""


class Contiguous(Split):
    """Each rank gets a contiguous range of the remaining positions."""

    def __init__(
        self,
        even: Even = "exact",
        find_group_start: FindGroupStart | None = None,
        find_chunk_rest: FindChunkRest | None = None,
    ) -> None:
        super().__init__(even)
        self._find_group_start, self._find_chunk_rest = find_group_start, find_chunk_rest

    def find_edges(self, remaining: IntervalSet, world_size: int) -> list[int]:
        """Return the numbers at which shares begin, and the end of the last one."""
        shared = self.count_shared(remaining.total, world_size)
        edges = [split_evenly(shared, rank, world_size)[0] for rank in range(world_size)]
        if self._find_group_start is not None and remaining.total:
            for rank, edge in enumerate(edges):
                if rank and edge < remaining.total:
                    position = int(remaining.find_positions(np.array([edge]))[0])
                    edges[rank] = remaining.find_number(self._find_group_start(position))
        return [*edges, shared]

    def _place(self, remaining: IntervalSet, rank: int, world_size: int) -> tuple[int, int, int]:
        if self._find_group_start is None:
            shared = self.count_shared(remaining.total, world_size)
            start, stop = split_evenly(shared, rank, world_size)
        else:
            start, stop = self.find_edges(remaining, world_size)[rank : rank + 2]
        return start, 1, stop - start

    def remove_taken(self, remaining: IntervalSet, stage: Stage) -> Intervals:
        world_size, taken = int(stage[0]), stage[1]
        edges = self.find_edges(remaining, world_size)
        counts = taken if isinstance(taken, list) else [taken] * world_size
        rest: list[tuple[int, int]] = []
        for start, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
            if isinstance(count, int):
                rest += remaining.slice(min(start + count, end), end)
                continue
            # Within a chunk that was cut into batches by length: not an interval.
            (rows, batches), chunk_rows = count, int(stage[2])
            assert self._find_chunk_rest is not None
            first = min(start + rows, end)
            chunk_end = min(first + chunk_rows, end)
            positions = remaining.find_positions(np.arange(first, chunk_end)).tolist()
            rest += [(p, p + 1) for p in self._find_chunk_rest(positions, batches)]
            rest += remaining.slice(chunk_end, end)
        rest += remaining.slice(edges[-1], remaining.total)
        return join_intervals(rest)

    def extend_history(self, history: Sequence[Stage], stage: Stage, n: int) -> list[list[Any]]:
        stages = [list(earlier) for earlier in history]
        world_size, taken = int(stage[0]), stage[1]
        if not any(taken) if isinstance(taken, list) else taken == 0:
            return stages
        if isinstance(taken, list) and any(isinstance(count, list) for count in taken):
            return [*stages, [world_size, taken, stage[2]]]
        # Equal shares, cut again into as many shares, are the same shares unless one ran out.
        if stages and stages[-1][0] == world_size and self._find_group_start is None:
            before = stages[-1][1]
            if isinstance(before, int) and isinstance(taken, int):
                total = count_positions(find_remaining(n, stages[:-1], self))
                if before + taken <= total // world_size:
                    stages[-1] = [world_size, before + taken]
                    return stages
        return [*stages, [world_size, taken]]


class Interleaved(Split):
    """Each step takes the next ``world_size × batch_size`` positions, one per rank in turn.

    The rows of a step don't depend on the number of ranks if that product is constant.
    """

    def _place(self, remaining: IntervalSet, rank: int, world_size: int) -> tuple[int, int, int]:
        shared = self.count_shared(remaining.total, world_size)
        return rank, world_size, max(0, -(-(shared - rank) // world_size))

    def remove_taken(self, remaining: IntervalSet, stage: Stage) -> Intervals:
        world_size, taken = int(stage[0]), stage[1]
        shared = self.count_shared(remaining.total, world_size)
        counts = np.array(taken if isinstance(taken, list) else [taken], dtype=np.int64)
        low, high = (min(shared, int(edge) * world_size) for edge in (counts.min(), counts.max()))
        numbers = np.arange(low, high)
        numbers = numbers[numbers // world_size >= counts[numbers % world_size % len(counts)]]
        rest = [(p, p + 1) for p in remaining.find_positions(numbers).tolist()]
        return join_intervals([*rest, *remaining.slice(high, remaining.total)])

    def extend_history(self, history: Sequence[Stage], stage: Stage, n: int) -> list[list[Any]]:
        stages = [list(earlier) for earlier in history]
        world_size, taken = int(stage[0]), stage[1]
        if isinstance(taken, list):
            return [*stages, [world_size, taken]] if any(taken) else stages
        # A prefix was consumed, whatever the number of ranks: one number is enough.
        total = count_positions(find_remaining(n, stages, self))
        consumed = min(taken * world_size, self.count_shared(total, world_size))
        if stages and stages[-1][0] == 1 and isinstance(stages[-1][1], int):
            consumed += stages.pop()[1]
        return [*stages, [1, consumed]] if consumed else stages


def find_remaining(n: int, history: Iterable[Stage], split: Split) -> Intervals:
    """Return the positions of an epoch of ``n`` rows that remain after ``history``."""
    remaining: Intervals = [(0, n)] if n else []
    for stage in history:
        remaining = split.remove_taken(IntervalSet(remaining), stage)
    return remaining


def count_positions(intervals: Intervals) -> int:
    """Return the number of positions in ``intervals``."""
    return sum(end - start for start, end in intervals)


def join_intervals(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Join adjacent intervals."""
    joined: list[tuple[int, int]] = []
    for start, end in intervals:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((int(start), int(end)))
    return joined
