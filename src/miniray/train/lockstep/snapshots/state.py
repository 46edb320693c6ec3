"""``RankSnapshots``: the state from which all ranks restart.

It is in the memory of the driver until the ranks can write it to shared memory.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import miniray
from miniray.train.lockstep.snapshots.arena import Snapshot


class Keep(enum.Enum):
    """Which state may have changed in a call, and is therefore kept after it."""

    NOTHING = "nothing"
    OWN = "own"  # of each rank alone: its random numbers
    ALL = "all"


class LoadCall(NamedTuple):
    """The call that restores a state: a method of the ranks, and its arguments by rank."""

    method: str
    arguments: Callable[[int], tuple[Any, ...]]


class RankSnapshots:
    """The newest state of all ranks after a call of the driver.

    Args:
        merge_weights, merge_shared: Combine what the ranks' ``gather_weights`` and
            ``gather_shared`` return, by rank.
    """

    def __init__(
        self,
        merge_weights: Callable[[Sequence[Any]], Any],
        merge_shared: Callable[[Sequence[Any]], Any],
    ) -> None:
        self._merge_weights, self._merge_shared = merge_weights, merge_shared
        self._state: dict[str, Any] | None = None
        self._local: Snapshot | None = None  # in place of ``_state``
        #: Whether the state is the newest one in the memory of ``StepSnapshots``.
        self.is_stored = False
        #: Completed steps of the run in this state.
        self.step: int | None = None

    @property
    def is_empty(self) -> bool:
        return self._state is None and self._local is None and not self.is_stored

    def set(self, step: int, weights: Any, shared: Any, own: Sequence[Any]) -> None:
        """Keep a merged state; ``own`` may be of a different number of ranks."""
        self.clear()
        self.step, self._state = step, {"weights": weights, "shared": shared, "own": own}

    def set_local(self, snapshot: Snapshot) -> None:
        """Keep a copy of a state that the ranks wrote to shared memory."""
        self.clear()
        self.step, self._local = snapshot.step, snapshot

    def set_stored(self, step: int) -> None:
        """Leave the state to ``StepSnapshots``."""
        self.clear()
        self.step, self.is_stored = step, True

    def set_own(self, own: Sequence[Any]) -> None:
        """Replace the states of the ranks alone, if there is a snapshot."""
        if self._state is not None:
            self._state["own"] = own
        if self._local is not None:
            for mine, state in zip(self._local.own, own, strict=True):
                mine["state"] = state

    def collect(self, parts: Sequence[Any]) -> None:
        """Merge and keep what ``get_snapshot`` of all ranks returned."""
        weights = self._merge_weights([part["weights"] for part in parts])
        shared = self._merge_shared([part["shared"] for part in parts])
        self.set(parts[0]["step"], weights, shared, [part["own"] for part in parts])

    def resize(self, count: int) -> None:
        """Convert the state to a different number of ranks."""
        if self._state is not None:
            self._state["own"] = resize_states(self._state["own"], count)
        if self._local is not None:
            own = _resize_own(self._local.own, count)
            self._local = self._local._replace(own=own)

    def get_parts(
        self, convert: Callable[[Snapshot], tuple[Any, Any, Sequence[Any]]]
    ) -> tuple[Any, Any, Sequence[Any]]:
        """Return the weights, the shared state and the states of the ranks.

        ``convert`` does this for a state from shared memory.
        """
        if self._local is not None:
            return convert(self._local)
        assert self._state is not None
        return self._state["weights"], self._state["shared"], self._state["own"]

    def clear(self) -> None:
        self.step, self._state, self._local, self.is_stored = None, None, None, False

    def create_call(self) -> LoadCall:
        """Return the call that restores this state."""
        if self._local is not None:
            common, mine = miniray.put(self._local.shared), self._local.own
            return LoadCall("restore_snapshot", lambda rank: (common, mine[rank]))
        assert self._state is not None
        weights, shared = miniray.put(self._state["weights"]), miniray.put(self._state["shared"])
        own = self._state["own"]
        return LoadCall(
            "load_snapshot",
            lambda rank: (weights, shared, own[rank] if rank < len(own) else None),
        )


def resize_states(states: Sequence[Any], count: int) -> list[Any]:
    """Return what ``get_state`` of ``count`` ranks would be, from that of a different number.

    Each rank that both have keeps its state. The means of dropped ranks are added to those of rank
    0, so that metrics of the epoch cover all of its samples. A new rank has no random numbers and
    no state of the user's object. If loaders of ``miniray.data`` have their own positions, all
    ranks get the merged position.
    """
    ranks = [state["rank"] for state in states]
    position = _merge_positions([rank["loader"]["own"] for rank in ranks])
    resized = []
    for number in range(count):
        is_new = number >= len(states)
        rank = {**ranks[0 if is_new else number]}
        if position is not None:
            rank["loader"] = {**rank["loader"], "own": position}
        if is_new:
            rank |= {"random": None, "means": {}, "loader": {**rank["loader"], "generator": None}}
        elif number == 0:
            dropped = [other["means"] for other in ranks[count:]]
            rank["means"] = _add_means([rank["means"], *dropped])
        resized.append({"rank": rank, "worker": None if is_new else states[number]["worker"]})
    return resized


def share_positions(states: Sequence[Any], count: int) -> Sequence[Any]:
    """Return the states for ranks of a different number than the run that saved them.

    If loaders of ``miniray.data`` have their own positions, none of these is valid for these ranks.
    """
    loaders = [(state["rank"].get("loader") or {"own": None})["own"] for state in states]
    return states if _merge_positions(loaders) is None else resize_states(states, count)


def _resize_own(own: Sequence[Any], count: int) -> list[Any]:
    """Convert what snapshots in shared memory have of each rank, like ``resize_states``."""
    states = resize_states([mine["state"] for mine in own], count)
    first, dropped = own[0]["window"], [mine["window"] for mine in own[count:]]
    # New ranks start with the buffers of rank 0, as all ranks do in an epoch.
    empty = {**first, "means": {"sums": {}, "counts": {}, "samples": 0}, "tokens": 0}
    resized = [
        {**own[number], "state": state}
        if number < len(own)
        else {**own[0], "window": empty, "state": state}
        for number, state in enumerate(states)
    ]
    resized[0]["window"] = {
        **first,
        "means": _add_means([window["means"] for window in (first, *dropped)]),
        "tokens": sum((window["tokens"] for window in dropped), first["tokens"]),
    }
    return resized


def _add_means(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up states of ``Means``; {} is a state without samples."""
    total: dict[str, Any] = {}
    for state in filter(None, states):
        total = total or {"sums": {}, "counts": {}, "samples": 0}
        for key in ("sums", "counts"):
            sums = total[key]
            total[key] = sums | {name: sums.get(name, 0) + v for name, v in state[key].items()}
        total["samples"] += state["samples"]
    return total


def _merge_positions(positions: Sequence[Any]) -> dict[str, Any] | None:
    """Merge the positions of loaders of ``miniray.data``; None for other loaders."""
    if not all(isinstance(state, Mapping) and "fingerprint" in state for state in positions):
        return None
    from miniray.data import merge_states

    return positions[0] if positions[0]["rank"] is None else merge_states(positions)
