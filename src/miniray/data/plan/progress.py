"""Progress of an epoch, as a few numbers that describe all ranks, and the states that save it.

At a step boundary, all ranks have taken the same number of rows, so the state of any rank is valid
for all of them. Otherwise, ``merge_states`` combines the states of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from miniray.data.plan.split import IntervalSet, Split, Stage, find_remaining
from miniray.errors import DataError

STATE_VERSION = 3

_SHARED_KEYS = (
    "version",
    "fingerprint",
    "seed",
    "epoch",
    "n",
    "order",
    "split",
    "even",
    "selection",
    "history",
    "world_size",
)  # fmt: skip
_KEYS = (*_SHARED_KEYS, "rank", "taken", "alone")


class Progress:
    """Progress of an epoch of ``n`` rows, whose world size may have changed any number of times."""

    def __init__(self, n: int, split: Split, history: Sequence[Stage] = ()) -> None:
        self.n, self.split = n, split
        self.history = [list(stage) for stage in history]

    @cached_property
    def remaining(self) -> IntervalSet:
        """Positions that no rank had taken when this run began."""
        return IntervalSet(find_remaining(self.n, self.history, self.split))

    def extend(self, stage: Stage) -> Progress:
        """Return the progress after ranks took the rows of ``stage``."""
        return Progress(self.n, self.split, self.split.extend_history(self.history, stage, self.n))


def merge_states(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks, in any order, into one state for the run.

    Required if ranks may have taken different numbers of batches: a run that was interrupted
    between two steps, or batches by tokens. At a step boundary, the state of any rank is enough. A
    rank that has reached the end of the epoch before others has taken all of its rows.

    Raises:
        DataError: The states are of different runs, epochs or data, or a rank is missing.
    """
    states = list(states)
    if not states:
        raise DataError("merge_states needs the states of all ranks, but the list is empty.")
    if all(isinstance(state, str) for state in states):
        raise DataError("merge_states takes a list with the states of all ranks, not one state.")
    for state in states:
        check_state(state)
    last = min(states, key=lambda state: int(state["epoch"]))
    states = [_move_to_epoch_of(last, state) for state in states]
    first = states[0]
    world_size = int(first["world_size"])
    for state in states:
        for key in _SHARED_KEYS:
            if state.get(key) != first.get(key):
                raise DataError(
                    f"Cannot merge states of different runs: {key} is {first.get(key)!r} on rank"
                    f" {first.get('rank')} and {state.get(key)!r} on rank {state.get('rank')}.",
                    rank=state.get("rank"),
                )
    by_rank: dict[int, Any] = {}
    for state in states:
        if state["rank"] is None:
            raise DataError("Cannot merge a state that is the result of merge_states.")
        if state["taken"] != by_rank.setdefault(int(state["rank"]), state["taken"]):
            raise DataError(
                f"Two states of rank {state['rank']} differ. Pass one per rank.",
                rank=state["rank"],
            )
    missing = sorted(set(range(world_size)) - set(by_rank))
    if missing:
        raise DataError(
            f"The states of ranks {missing} are missing ({len(by_rank)} of {world_size} passed)."
            " Their rows would be delivered again."
        )
    taken = [by_rank[rank] for rank in range(world_size)]
    is_same = all(count == taken[0] for count in taken) and not isinstance(taken[0], list)
    return {**first, "rank": None, "alone": False, "taken": taken[0] if is_same else taken}


def _move_to_epoch_of(last: Mapping[str, Any], state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a state at the start of the next epoch to one at the end of the epoch of ``last``."""
    if state["epoch"] != last["epoch"] + 1 or state["taken"] or state["history"]:
        return state
    return {**state, "epoch": last["epoch"], "history": last["history"], "taken": state["n"]}


def check_state(state: Any) -> None:
    """Raise ``DataError`` unless ``state`` was returned by ``state_dict`` of this version."""
    if not isinstance(state, Mapping):
        raise DataError(f"state must be a dict returned by state_dict(), not {state!r:.100}")
    if "version" not in state:
        keys = ", ".join(map(str, state)) or "no keys"
        raise DataError(f"state must be a dict returned by state_dict(), but it has only {keys}.")
    version = state["version"]
    if version in (1, 2):
        raise DataError(
            f"The state was saved by miniray 0.1 (state version {version}), which used a different"
            " row order. Finish the epoch with that version, or start the epoch without the state."
        )
    if version != STATE_VERSION:
        raise DataError(
            f"The state has version {version!r}, but this version of miniray can only load"
            f" version {STATE_VERSION}."
        )
    missing = [key for key in _KEYS if key not in state]
    if missing:
        raise DataError(f"The state has no {missing[0]!r}. It has only {', '.join(state)}.")


def check_single_state(state: Mapping[str, Any]) -> None:
    """Raise ``DataError`` if the state of one rank isn't valid for the others."""
    if state["alone"] and state["rank"] is not None:
        raise DataError(
            f"The state of rank {state['rank']} isn't valid for the other"
            f" {state['world_size'] - 1} ranks, which take different numbers of rows. Keep the"
            " states of all ranks and load merge_states([...]).",
            rank=state["rank"],
        )


def check_compatible(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise ``DataError`` that lists each difference between a state and a dataset."""
    differences = [
        f"{_LABELS[key]} {state[key]!r}, not {value!r}"
        for key, value in expected.items()
        if _normalize(state[key]) != _normalize(value)
    ]
    if differences:
        raise DataError(
            "The state is of different data or options than this dataset. It has"
            f" {'; '.join(differences)}."
        )


_LABELS = {
    "fingerprint": "the data fingerprint (names, sizes and content of files)",
    "seed": "seed=",
    "order": "the order (shuffle=, window_bytes=, group_by=)",
    "split": "split=",
    "even": "even=",
    "selection": "the selected rows (filter=, max_samples=)",
    "n": "the number of rows",
}


def _normalize(value: Any) -> Any:
    """Return ``value`` as JSON restores it: without tuples."""
    return list(value) if isinstance(value, tuple) else value
