"""Weights and states of workers, as parts of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import miniray

#: Returns the current ``WorkerGroup``. ``LockstepGroup`` has the methods that saving needs.
GetGroup = Callable[[], Any]


class WorkerWeights:
    """The part ``weights``: the weights of all workers, or one copy if they are in sync.

    Args:
        get_group: Returns the workers.

    Attributes:
        get_shared: Returns the weights that all workers have, in a list; None if they differ.
    """

    def __init__(self, get_group: GetGroup) -> None:
        self._get_group = get_group
        self.get_shared: Callable[[], list[Any] | None] = lambda: None

    def state_dict(self) -> list[Any] | None:
        """Return a list of weights. None if the workers have no ``get_weights``."""
        group = self._get_group()
        if not group.has("get_weights"):
            return None
        return self.get_shared() or group.call("get_weights", lambda _: (), {})

    def load_state_dict(self, weights: Sequence[Any] | None) -> None:
        """Set the weights. On a different number of workers, all get the average."""
        if weights is None:
            return
        group = self._get_group()
        count = len(group.handles)
        if len(weights) != count:
            from miniray.ps.weights import mean

            one = mean(weights) if len(weights) > 1 else weights[0]
            weights = [miniray.put(one)] * count
        group.map("set_weights", dict(enumerate(weights)))


class WorkerStates:
    """The part ``workers``: their number, and the results of ``get_state``."""

    def __init__(self, get_group: GetGroup) -> None:
        self._get_group = get_group

    def state_dict(self) -> dict[str, Any]:
        """Return the number and the states. These are None without ``get_state``."""
        group = self._get_group()
        has_states = group.has("get_state")
        states = group.call("get_state", lambda _: (), {}) if has_states else None
        return {"count": len(group.handles), "states": states}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the states of the workers that both runs have."""
        if saved["states"] is not None:
            group = self._get_group()
            group.map("set_state", dict(enumerate(saved["states"][: len(group.handles)])))


def describe_other_size(loaded: Mapping[str, Any], count: int) -> str:
    """Return how a run on ``count`` workers continues from a checkpoint of a different number."""
    weights, saved = loaded["weights"], loaded["workers"]
    kept = min(saved["count"], count)
    text = f"resuming a run of {saved['count']} workers on {count}: data is sharded again"
    if weights is not None and len(weights) > 1:
        text += ", the workers' weights are averaged"
    if saved["states"] is not None:
        rest = (
            "the others start without one"
            if kept == saved["count"]
            else "that of the others is dropped"
        )
        text += f", workers 0 to {kept - 1} restore their state and {rest}"
    return text
