"""Parts of the checkpoints of RL trainers, besides those of all trainers.

The position in the data can be restored on any number of workers. The reference model is stored
once, and so is the optimizer if all workers are equal.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import miniray
from miniray.rl.config import AdaptiveKL
from miniray.rl.rollouts.sources import place_of_all
from miniray.train.workers.group import WorkerGroup

#: Returns the current ``WorkerGroup``, which replaces lost workers.
GetGroup = Callable[[], Any]


def _send_to_all(group: Any, method: str, value: Any) -> Any:
    """Call ``method(value)`` on all workers, and return the ref that was sent."""
    ref = miniray.put(value)
    group.map(method, dict.fromkeys(range(len(group.handles)), ref))
    return ref


class RunStatePart:
    """The seed of all workers and the KL coefficient, as the part ``rl``.

    Args:
        sync: How the workers of this run are kept in sync.
        seed: The seed; None for any. Workers use the same one to draw the same mini-batches.
        adaptive: Adapts the KL coefficient, or None.
    """

    def __init__(self, sync: str, seed: int | None, adaptive: AdaptiveKL | None) -> None:
        self._sync, self._adaptive = sync, adaptive
        self.seed = secrets.randbits(62) if seed is None else seed

    def continue_run(self, state: Mapping[str, Any]) -> None:
        """Take the seed of a loaded run. Raise ``ValueError`` if it had a different ``sync``."""
        if state["sync"] != self._sync:
            raise ValueError(
                f"the checkpoint was saved with sync={state['sync']!r}, but this trainer has "
                f"sync={self._sync!r}"
            )
        self.seed = state["seed"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        kl = None if self._adaptive is None else self._adaptive.state_dict()
        return {"sync": self._sync, "seed": self.seed, "kl": kl}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the seed and the KL coefficient."""
        self.continue_run(state)
        if self._adaptive is not None and state["kl"] is not None:
            self._adaptive.load_state_dict(state["kl"])


class SourcePart:
    """The position in the prompts, as the part ``source``."""

    def __init__(self, get_group: GetGroup) -> None:
        self._get_group = get_group

    def state_dict(self) -> dict[str, Any]:
        """Return one position for all workers, and their number."""
        places = self._get_group().call("get_source", lambda _: (), {})
        return {"place": place_of_all(places), "num_workers": len(places)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position, unless the states of the workers already contain it."""
        group = self._get_group()
        place, is_other_size = state["place"], state["num_workers"] != len(group.handles)
        if "loader" not in place or not (is_other_size or place.get("to_all")):
            return
        if place["loader"] is None:  # all workers read and drop as many steps as were trained
            place = {**place, "step": 0, "epoch": 0, "used": 0, "ended": False}
            place["apart"] = "the loaders have no state_dict() and no load_state_dict()"
        if "apart" in place:
            warnings.warn(
                "Workers may continue at different positions in the data, so rows may be repeated "
                f"or skipped: {place['apart']}",
                stacklevel=2,
            )
        group.call("set_source", lambda _: (place,), {})


class ReferencePart:
    """The reference model, as the part ``reference``; also a ``WorkerSetup`` for replacements.

    Args:
        get_group: Returns the workers.
        keep: Keep the weights in the object store, for replacements.
    """

    def __init__(self, get_group: GetGroup, *, keep: bool) -> None:
        self._get_group, self._keep = get_group, keep
        self._kept: Any = None

    def start(self, group: WorkerGroup) -> None:
        """Keep the initial weights, which are those of the reference model."""
        self._kept = group.ref_of(0, "get_weights") if self._keep else None

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Set the reference model of a replacement."""
        if self._kept is not None:
            group.set_up_call(worker_id, "set_reference", self._kept)

    def stop(self) -> None:
        """Drop the weights."""
        self._kept = None

    def state_dict(self) -> Any:
        """Return the weights of the reference model, or None if it doesn't exist."""
        return miniray.get(self._get_group().ref_of(0, "get_reference"))

    def load_state_dict(self, weights: Any) -> None:
        """Set the reference model of all workers."""
        ref = _send_to_all(self._get_group(), "set_reference", weights)
        if self._kept is not None and weights is not None:
            self._kept = ref


class OptimizerPart:
    """The optimizer of workers with equal state, as the part ``optimizer``."""

    def __init__(self, get_group: GetGroup) -> None:
        self._get_group = get_group

    def state_dict(self) -> Any:
        """Return the state of the optimizer of worker 0."""
        return miniray.get(self._get_group().ref_of(0, "get_optimizer"))

    def load_state_dict(self, state: Any) -> None:
        """Set the state of the optimizer on all workers."""
        _send_to_all(self._get_group(), "set_optimizer", state)
