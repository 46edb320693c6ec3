"""How far an epoch has come, as a few numbers that describe every rank, and what is left of it.

An epoch is the positions ``0 .. n-1`` of its order. A stage of its history is ``[world_size,
taken]``: what was left was cut into that many even parts, and each rank took that many rows from
the front of its part. A run that goes on with another number of ranks adds a stage. So the
intervals of positions that were consumed follow from the history, whose length depends neither on
the rows nor on the ranks, and at a step boundary, where every rank has taken the same number of
batches, any one rank can write it for all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from miniray.data.plan.shard import Even, part_bounds
from miniray.errors import DataError

#: Sorted, disjoint, half-open intervals of positions, none of them empty.
Intervals = Sequence[tuple[int, int]]

#: [world_size, rows each rank took], or with a list where ranks took different numbers of rows.
Stage = Sequence[Any]

#: Moves a position that would split a group to where the next group starts.
Snap = Callable[[int], int]

#: Of the positions of a chunk of rows, sorted, those not in its first so many batches.
ChunkLeft = Callable[[Sequence[int], int], Sequence[int]]

STATE_VERSION = 2
_SIZES_ONLY = 1  # of versions: files were known by their sizes, not by their content


def size(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


class _Numbered:
    """Intervals whose positions are numbered from 0."""

    def __init__(self, intervals: Intervals) -> None:
        self._intervals = intervals
        self._begins = list(accumulate((end - start for start, end in intervals), initial=0))
        self.total = self._begins.pop()

    def portion(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The intervals of the ``start``-th to ``stop``-th position."""
        which = max(0, bisect_right(self._begins, start) - 1)
        for (first, end), begin in zip(self._intervals[which:], self._begins[which:], strict=True):
            if begin >= stop:
                return
            low, high = max(first, first + start - begin), min(end, first + stop - begin)
            if low < high:
                yield low, high

    def positions(self, ordinals: Sequence[int]) -> list[int]:
        """The positions with these numbers."""
        if len(self._intervals) == 1:
            first = self._intervals[0][0]
            return [first + ordinal for ordinal in ordinals]
        found = []
        for ordinal in ordinals:
            which = bisect_right(self._begins, ordinal) - 1
            found.append(self._intervals[which][0] + ordinal - self._begins[which])
        return found

    def ordinal(self, position: int) -> int:
        """How many come before ``position``."""
        which = bisect_right(self._intervals, (position, float("inf"))) - 1
        start, end = self._intervals[which]
        return self._begins[which] + min(position, end) - start


def portion(intervals: Intervals, start: int, stop: int) -> Intervals:
    """The ``start``-th to ``stop``-th of the positions in ``intervals``."""
    return list(_Numbered(intervals).portion(start, stop))


def positions_at(intervals: Intervals, ordinals: Sequence[int]) -> list[int]:
    """The positions that are the ``ordinals``-th in ``intervals``."""
    return _Numbered(intervals).positions(ordinals)


def cuts(intervals: Intervals, world_size: int, even: Even, snap: Snap | None = None) -> list[int]:
    """Where parts of ``intervals`` begin and end, as ordinals: ``world_size + 1`` of them."""
    total = size(intervals)
    shared = total - total % world_size if even == "drop" else total
    edges = [part_bounds(shared, rank, world_size)[0] for rank in range(world_size)]
    if snap is not None and total:
        numbered = _Numbered(intervals)
        for number, edge in enumerate(edges):
            if number and edge < total:
                edges[number] = numbered.ordinal(snap(numbered.positions([edge])[0]))
    return [*edges, shared]


def after(
    intervals: Intervals,
    stage: Stage,
    even: Even,
    snap: Snap | None = None,
    chunk_left: ChunkLeft | None = None,
) -> Intervals:
    """What is left of ``intervals`` after a stage."""
    world_size, taken = int(stage[0]), stage[1]
    edges = cuts(intervals, world_size, even, snap)
    counts = taken if isinstance(taken, list) else [taken] * world_size
    numbered = _Numbered(intervals)
    left: list[tuple[int, int]] = []
    for start, end, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if isinstance(count, int):
            left += numbered.portion(min(start + count, end), end)
            continue
        # In the midst of a chunk that was cut into batches by length: not an interval.
        (rows, batches), chunk = count, int(stage[2])
        assert chunk_left is not None
        first = min(start + rows, end)
        after_chunk = min(first + chunk, end)
        some = chunk_left(numbered.positions(range(first, after_chunk)), batches)
        left += [(position, position + 1) for position in some]
        left += numbered.portion(after_chunk, end)
    left += numbered.portion(edges[-1], numbered.total)
    return _joined(left)


def remaining(
    n: int,
    history: Sequence[Stage],
    even: Even = "exact",
    snap: Snap | None = None,
    chunk_left: ChunkLeft | None = None,
) -> Intervals:
    """The positions of an epoch of ``n`` rows that nobody has consumed, after ``history``."""
    intervals: Intervals = [(0, n)] if n else []
    for stage in history:
        intervals = after(intervals, stage, even, snap, chunk_left)
    return intervals


def _joined(intervals: Intervals) -> Intervals:
    """Neighbours that touch made one."""
    found: list[tuple[int, int]] = []
    for start, end in intervals:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found


def extended(
    history: Sequence[Stage], stage: Stage, n: int, joinable: bool = True
) -> list[list[Any]]:
    """``history`` with one more stage, joined to the last where that says the same.

    Even parts from which all took the same number cut again into as many parts are themselves, as
    long as none ran out.
    """
    stages = [list(earlier) for earlier in history]
    world_size, taken = int(stage[0]), stage[1]
    if taken == 0 or (isinstance(taken, list) and not any(taken)):
        return stages
    if isinstance(taken, list) and any(isinstance(count, list) for count in taken):
        return [*stages, [world_size, taken, stage[2]]]
    if stages and stages[-1][0] == world_size:
        before = stages[-1][1]
        if isinstance(before, int) and isinstance(taken, int) and joinable:
            least = size(remaining(n, stages[:-1])) // world_size
            if before + taken <= least:
                stages[-1] = [world_size, before + taken]
                return stages
    return [*stages, [world_size, taken]]


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for the whole run from the states of all its ranks, in any order.

    Needed where ranks may have taken different numbers of batches (a run that was interrupted
    between two steps, batches by tokens). At a step boundary the state of any one rank will do.
    A rank that has come to the end of the epoch before others has taken all of its part. States
    of different runs, epochs or data are refused, and so is a missing rank: what it had
    consumed would be delivered again.
    """
    states = list(states)
    if not states:
        raise DataError("merge_states needs the states of all ranks, and got none")
    if all(isinstance(state, str) for state in states):
        raise DataError("merge_states takes a list with the states of all ranks, and not one state")
    for state in states:
        check_whole(state)
    behind = min(states, key=lambda state: int(state["epoch"]))
    states = [_in_epoch_of(behind, state) for state in states]
    first = states[0]
    world_size = int(first["world_size"])
    for state in states:
        for key in _COMMON:
            if state.get(key) != first.get(key):
                raise DataError(
                    f"states of different runs cannot be merged: {key} is {first.get(key)!r} on"
                    f" rank {first.get('rank')} and {state.get(key)!r} on rank {state.get('rank')}"
                )
    by_rank: dict[int, Any] = {}
    for state in states:
        if state["rank"] is None:
            raise DataError("a state that was merged already cannot be merged again")
        if state["taken"] != by_rank.setdefault(int(state["rank"]), state["taken"]):
            raise DataError(f"two states of rank {state['rank']} differ: give one of each rank")
    missing = sorted(set(range(world_size)) - set(by_rank))
    if missing:
        raise DataError(
            f"states of ranks {missing} are missing ({len(by_rank)} of {world_size} given): rows"
            " these ranks consumed would be delivered again"
        )
    taken = [by_rank[rank] for rank in range(world_size)]
    same = all(count == taken[0] for count in taken) and not isinstance(taken[0], list)
    return {**first, "rank": None, "alone": False, "taken": taken[0] if same else taken}


def _in_epoch_of(behind: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a rank at the start of the next epoch as one at the end of this one."""
    if state["epoch"] != behind["epoch"] + 1 or state["taken"] or state["history"]:
        return state
    ours = {key: behind[key] for key in ("epoch", "history", "plan")}
    return {**state, **ours, "taken": state["n"]}


_COMMON = ("version", "kind", "n", "fingerprint", "seed", "epoch", "plan", "history", "world_size")


def check_whole(state: Any) -> None:
    """Refuse, with ``DataError``, what ``state_dict`` did not make."""
    if not isinstance(state, Mapping):
        raise DataError(f"a state is the dict that state_dict() gave, not {state!r:.100}")
    missing = [key for key in (*_COMMON, "rank", "taken", "alone") if key not in state]
    if missing:
        raise DataError(f"a state has {missing[0]!r}; this has only {', '.join(map(str, state))}")
    if state["version"] not in (STATE_VERSION, _SIZES_ONLY):
        raise DataError(f"a state of version {state['version']!r} cannot be loaded")


def check_state(
    state: Mapping[str, Any], kind: str, fingerprint: str, plan: Mapping[str, Any]
) -> None:
    """Refuse, with ``DataError``, a state that does not fit the data or the plan, or is partial."""
    check_whole(state)
    if state["alone"] and state["rank"] is not None:
        raise DataError(
            f"the state of rank {state['rank']} says nothing about the other"
            f" {state['world_size'] - 1} ranks, which take batches of their own sizes. Keep the"
            " states of all ranks and load merge_states([...])"
        )
    if (state["kind"], state["fingerprint"]) != (kind, fingerprint):
        if state["version"] == _SIZES_ONLY:
            raise DataError(
                "the state was taken by an earlier version of miniray, which knew files by their"
                " names and sizes alone. Whether these are the files of then cannot be told: begin"
                " the epoch without it"
            )
        raise DataError(
            f"the state is of other data: {state['kind']} {state['fingerprint']}, and this is"
            f" {kind} {fingerprint}. Names of files, their sizes or their content have changed"
            " since it was taken: give the files of then, or begin without it"
        )
    given = state["plan"]
    for key in plan:
        if key not in ("window", "began_with") and given.get(key) != plan[key]:
            raise DataError(
                f"the state was taken with {key}={given.get(key)!r}, and this dataset has"
                f" {key}={plan[key]!r}; make it with the same"
            )
