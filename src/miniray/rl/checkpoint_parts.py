"""Parts of the checkpoints of RL trainers, besides those of all trainers.

The position in the data can be restored on any number of workers. The reference model is stored
once, and so is the optimizer if all workers are equal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import miniray
from miniray.rl.sources import place_of_all
from miniray.train.workers.group import WorkerGroup

#: Returns the handles of the current workers.
GetWorkers = Callable[[], Sequence[Any]]


class SourcePart:
    """The position in the prompts, as the part ``source``."""

    def __init__(self, get_workers: GetWorkers) -> None:
        self._get_workers = get_workers

    def state_dict(self) -> dict[str, Any]:
        """Return one position for all workers, and their number."""
        workers = self._get_workers()
        place = place_of_all(miniray.get([worker.get_source.remote() for worker in workers]))
        return {"place": place, "num_workers": len(workers)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position, unless the workers' own states contain it."""
        workers = self._get_workers()
        place, is_other_size = state["place"], state["num_workers"] != len(workers)
        if "loader" not in place or not (is_other_size or place.get("to_all")):
            return
        if place["loader"] is None:  # all workers read and drop as many steps as were trained
            place = {**place, "step": 0, "epoch": 0, "used": 0, "ended": False}
            place["apart"] = "the loaders have no state_dict() and no load_state_dict()"
        if "apart" in place:
            warnings.warn(
                "workers may not continue at one position in the data, so rows may be repeated or "
                f"skipped: {place['apart']}",
                stacklevel=2,
            )
        miniray.get([worker.set_source.remote(place) for worker in workers])


class ReferencePart:
    """The reference model, as the part ``reference``; also a ``WorkerSetup`` for replacements.

    Args:
        get_workers: Returns the workers.
        keep: Keep the weights in the object store, for replacements.
    """

    def __init__(self, get_workers: GetWorkers, *, keep: bool) -> None:
        self._get_workers, self._keep = get_workers, keep
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
        """Return the weights of the reference model; None if there is none."""
        return miniray.get(self._get_workers()[0].get_reference.remote())

    def load_state_dict(self, weights: Any) -> None:
        """Set the reference model of all workers."""
        ref = miniray.put(weights)
        miniray.get([worker.set_reference.remote(ref) for worker in self._get_workers()])
        if self._kept is not None and weights is not None:
            self._kept = ref


class OptimizerPart:
    """The optimizer of workers that are equal, as the part ``optimizer``."""

    def __init__(self, get_workers: GetWorkers) -> None:
        self._get_workers = get_workers

    def state_dict(self) -> Any:
        """Return the state of the optimizer of worker 0."""
        return miniray.get(self._get_workers()[0].get_optimizer.remote())

    def load_state_dict(self, state: Any) -> None:
        """Set it on all workers."""
        ref = miniray.put(state)
        miniray.get([worker.set_optimizer.remote(ref) for worker in self._get_workers()])
