"""How workers come to one state: at the start, in the place of one that died, from a checkpoint.

On top of weights and the workers' own state a checkpoint of reinforcement learning has the run's
seed, the KL controller, the reference model, a place in the data that any number of workers can
take up and, where workers are always equal, one optimizer for all.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import miniray
from miniray.core import session
from miniray.errors import CapabilityError
from miniray.rl.config import AdaptiveKL, Algorithm
from miniray.rl.sources import place_of_all
from miniray.train.data_parallel import DataParallelTrainer


class Resumable(DataParallelTrainer):
    """The part of ``RLTrainer`` that sets up workers, and saves and takes up checkpoints."""

    sync: str
    config: Algorithm
    _run_seed: int
    _adaptive: AdaptiveKL | None
    _setup_ref: Any
    _reference_ref: Any
    _group_options: dict[str, Any]

    def _set_up_all(self) -> None:
        if self.sync == "weights":
            super()._set_up_all()
            if self._max_failures and self.config.kl.coef > 0:
                self._reference_ref = miniray.put(self.model_weights())
            return
        assert self._group is not None
        first = self.workers[0].get_weights.remote()
        miniray.get([worker.set_weights.remote(first) for worker in self.workers[1:]])
        if self.num_workers == 1:
            return
        engine = session.engine().name
        if engine == "inline":
            raise CapabilityError(
                'sync="grad" with more than one worker needs workers that run at the same time: '
                'use backend="local" or "ray", or sync="weights", or one worker'
            )
        opened = self.workers[0].host_group.remote(
            self.num_workers, other_machines=engine == "ray", **self._group_options
        )
        spec = miniray.get(opened)
        self._group.call("join_group", lambda _: (spec,), {})

    def _set_up_worker(self, worker_id: int) -> None:
        super()._set_up_worker(worker_id)
        if self._reference_ref is not None:
            miniray.get(self.workers[worker_id].set_reference.remote(self._reference_ref))

    def _workers_in_sync(self) -> bool:
        return self.sync == "grad" or super()._workers_in_sync()

    def shutdown(self) -> None:
        """End the workers; safe to call twice."""
        super().shutdown()
        self._setup_ref = self._reference_ref = None

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """As every trainer does; the run's seed is the checkpoint's from here on."""
        epoch = super().load_checkpoint(path)
        if self._loaded is not None:  # before the run is described and its workers are there
            self._run_seed = self._loaded["extra"]["rl"]["seed"]
        return epoch

    def _extra_state(self) -> dict[str, Any]:
        state = super()._extra_state() if self.sync == "weights" else {}
        worker = self.workers[0]
        shared = self.sync == "grad"  # workers' optimizers are equal: one is enough for any number
        state["rl"] = {
            "sync": self.sync,
            "seed": self._run_seed,
            "num_workers": self.num_workers,
            "source": place_of_all(miniray.get([w.get_source.remote() for w in self.workers])),
            "kl": None if self._adaptive is None else self._adaptive.state_dict(),
            "reference": miniray.get(worker.get_reference.remote()),
            "optimizer": miniray.get(worker.get_optimizer.remote()) if shared else None,
        }
        return state

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        own = state["rl"]
        if own["sync"] != self.sync:
            raise ValueError(
                f"the checkpoint was made with sync={own['sync']!r}, this trainer has {self.sync!r}"
            )
        if self.sync == "weights":
            super()._load_extra_state(state)
        if self._adaptive is not None and own["kl"] is not None:
            self._adaptive.load_state_dict(own["kl"])
        place, other = own["source"], own["num_workers"] != self.num_workers
        if "loader" in place and (other or place.get("to_all")):
            if place["loader"] is None:  # all read as many steps as were made, and drop them
                place = {**place, "step": 0, "epoch": 0, "used": 0, "ended": False}
                place["apart"] = "the loaders have no state_dict() and no load_state_dict()"
            if "apart" in place:
                warnings.warn(
                    "workers may not go on from one place in the data, and rows may come again or "
                    f"not at all: {place['apart']}",
                    stacklevel=2,
                )
            miniray.get([worker.set_source.remote(place) for worker in self.workers])
        reference = miniray.put(own["reference"])
        calls = [worker.set_reference.remote(reference) for worker in self.workers]
        if own["optimizer"] is not None:
            optimizer = miniray.put(own["optimizer"])
            calls += [worker.set_optimizer.remote(optimizer) for worker in self.workers]
        miniray.get(calls)
        if self._reference_ref is not None and own["reference"] is not None:
            self._reference_ref = reference
        self._run_seed = own["seed"]
