"""``RankSnapshots``: the state from which all ranks restart."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import miniray


class Keep(enum.Enum):
    """Which state may have changed in a call, and is therefore kept after it."""

    NOTHING = "nothing"
    OWN = "own"  # of each rank alone: its random numbers
    ALL = "all"


class RankSnapshots:
    """The newest state of all ranks, in the memory of the driver.

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

    @property
    def is_empty(self) -> bool:
        return self._state is None

    def set(self, weights: Any, shared: Any, own: Sequence[Any]) -> None:
        """Keep a merged state; ``own`` may be of a different number of ranks."""
        self._state = {"weights": weights, "shared": shared, "own": own}

    def set_own(self, own: Sequence[Any]) -> None:
        """Replace the states of the ranks alone, if there is a snapshot."""
        if self._state is not None:
            self._state["own"] = own

    def collect(self, parts: Sequence[Any]) -> None:
        """Merge and keep what ``get_snapshot`` of all ranks returned."""
        weights = self._merge_weights([part["weights"] for part in parts])
        shared = self._merge_shared([part["shared"] for part in parts])
        self.set(weights, shared, [part["own"] for part in parts])

    def clear(self) -> None:
        self._state = None

    def create_arguments(self) -> Callable[[int], tuple[Any, ...]]:
        """Return a function from ranks to the arguments of their ``load_snapshot``."""
        assert self._state is not None
        weights, shared = miniray.put(self._state["weights"]), miniray.put(self._state["shared"])
        own = self._state["own"]
        return lambda rank: (weights, shared, own[rank] if rank < len(own) else None)
