"""What a trainer can save and take up again: checkpoints, and the model itself.

What goes into a checkpoint is in ``resume``, how it lies on disk in ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import miniray
from miniray.train import resume as resuming
from miniray.train.callbacks import Callback
from miniray.train.lifecycle import Lifecycle
from miniray.train.modelfile import save_model
from miniray.train.rundir import RunDirectory


class Saving(Lifecycle):
    """The part of every trainer that is about its state; see the module."""

    def __init__(
        self,
        name: str | None,
        run_dir: str | Path | None,
        backend: str | None,
        keep_last: int,
        keep_best: tuple[str, str] | None,
        callbacks: Sequence[Callback],
    ) -> None:
        super().__init__(name, run_dir, backend, keep_last, keep_best)
        self.history: list[dict[str, Any]] = []
        self.epoch = 0  # epochs done so far
        self.callbacks = list(callbacks)
        self._loaded: dict[str, Any] | None = None  # a checkpoint to apply when workers are there

    def save_checkpoint(self, epoch: int | None = None) -> Path:
        """Write all there is to go on from here; returns where. Call it from ``on_epoch_end``."""
        if self.checkpoints is None:
            raise RuntimeError("there is nothing to save before train()")
        epoch = self.epoch - 1 if epoch is None else epoch
        return self.checkpoints.save(epoch, resuming.collect(self))

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Take up a checkpoint, now or when ``train`` starts the workers; returns its epoch."""
        store, where = resuming.locate(path, self.checkpoints, self._run_dir, self._name)
        epoch, state = store.load(where)
        if self.run is None:
            self.run = RunDirectory.reopen(store.directory.parent)
        self.checkpoints = self.checkpoints or self._store(store.directory)
        self.epoch = epoch + 1
        self.history = list(state["history"])
        self.run.truncate_metrics(epoch)
        self._loaded = state
        if self._group is not None:
            self._take_up(state)
            self._loaded = None
        return epoch

    def _take_up(self, state: dict[str, Any]) -> None:
        """Bring workers and trainer to where they were when a checkpoint was written."""
        resuming.apply(self, state)

    def _give(self, method: str, values: Mapping[int, Any]) -> None:
        """Call ``method(value)`` on the workers that have a value here, by worker id."""
        group = self._group
        assert group is not None
        group.call_some(values, lambda i: group.submit(i, method, values[i]), method)

    def _workers_in_sync(self) -> bool:
        """Whether all workers have the same weights, so that one copy is enough."""
        return False

    def _extra_state(self) -> dict[str, Any]:
        """What a subclass adds to a checkpoint."""
        return {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Take up what ``_extra_state`` gave."""

    def model_weights(self) -> Any:
        """The trained weights: worker 0's."""
        return miniray.get(self.workers[0].get_weights.remote())

    def save_final_model(self, path: str | Path | None = None) -> Path:
        """Write the weights as one safetensors file (default: ``final_model.safetensors``)."""
        if self.run is None or not self.workers:
            raise RuntimeError("there is no model before train()")
        target = Path(path) if path is not None else self.run.path / "final_model.safetensors"
        return save_model(target, self.model_weights())
