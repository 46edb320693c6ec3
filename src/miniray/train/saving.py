"""What a trainer does with its state: checkpoints to go on from, and the model itself, in a file or
judged on held-out data.

What goes into a checkpoint is in ``resume``, how it lies on disk in ``checkpoint``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import miniray
from miniray.train import resume as resuming
from miniray.train.callbacks import Callback, check_callbacks
from miniray.train.checkpoint import CheckpointStore
from miniray.train.evaluate import evaluate_on
from miniray.train.lifecycle import Lifecycle
from miniray.train.modelfile import save_model
from miniray.train.rundir import RunDirectory

NO_WORKERS = "there are no workers before train(), and none after shutdown()"


class Saving(Lifecycle):
    """The part of every trainer that is about its state; see the module."""

    #: What runs: trainers of one kind take up each other's checkpoints.
    _kind = "workers"

    def __init__(self, callbacks: Callback | Iterable[Callback], *options: Any) -> None:
        super().__init__(*options)
        self.history: list[dict[str, Any]] = []
        self.epoch = 0  # epochs done so far
        self._in_epoch = False  # whether another one is being trained
        self._latest: dict[str, Any] | None = None  # a record of the history hooks may add to
        self.callbacks = check_callbacks(callbacks)
        self._loaded: dict[str, Any] | None = None  # a checkpoint to apply when workers are there

    def save_checkpoint(self, epoch: int | None = None) -> Path:
        """Write all there is to go on from here; returns where. Call it from ``on_epoch_end``.

        It is of the last epoch that was trained; ``epoch`` matters within ``train_epoch`` only,
        where it says that this one counts.
        """
        if self.checkpoints is None or self._group is None:
            raise RuntimeError(NO_WORKERS)
        done = self.epoch + (self._in_epoch and epoch is not None)
        if not done:
            raise RuntimeError(
                "no epoch was trained yet, so there is nothing to go on from: train() first, or "
                "save_final_model() for the weights as they are"
            )
        self._number_latest()
        return self.checkpoints.save(done - 1, resuming.collect(self))

    def _number_latest(self) -> None:
        """Give the record that hooks add to its epoch, whatever they made of that."""
        if self._latest is not None:
            self._latest["epoch"] = self.epoch - 1

    def _write_latest(self) -> None:
        """Into ``metrics.jsonl``, unless it is there: no hook has it any more."""
        self._number_latest()
        latest, self._latest = self._latest, None
        if latest is not None:
            assert self.run is not None
            self.run.append_metrics(latest)

    def load_checkpoint(self, path: str | Path = "latest") -> int:
        """Take up a checkpoint, now or when ``train`` starts the workers; returns its epoch.

        The run goes on in the directory it was in. Where ``name`` or ``run_dir`` is another one, or
        the checkpoint lies in no run's directory, a new run begins from it.
        """
        named = Path("runs") / self._name if self._name is not None else None
        wanted = self._run_dir or named
        store, where = resuming.locate(path, self.checkpoints, wanted, self._title)
        epoch, state = store.load(where)
        self._write_latest()  # of the epoch that a hook takes back
        self.epoch = epoch + 1
        self.history = list(state["history"])
        if self.run is None:
            self.run = self._run_from(store, wanted)
        self.checkpoints = self.checkpoints or self._store(self.run.checkpoints)
        self.run.truncate_metrics(epoch)
        written = {record.get("epoch") for record in self.run.read_metrics()}
        for record in self.history:  # of the last epoch, if a hook was killed; of all in a new run
            if record["epoch"] not in written:
                self.run.append_metrics(record)
        self._loaded = state
        if self._group is not None:
            self._take_up(state)
            self._loaded = None
        return epoch

    def _run_from(self, store: CheckpointStore, wanted: Path | None) -> RunDirectory:
        """The run that ``store`` is of, or a new one with what was done before it as its own."""
        before = store.directory.parent
        same = wanted is None or wanted.resolve() == before.resolve()
        if same and (before / "run.json").exists():
            return RunDirectory.reopen(before)
        run = RunDirectory.open(self._run_dir, self._name, self._title)
        run.append_event({"event": "started_from", "checkpoint": str(store.loaded)})
        return run

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
        if not self.workers:
            raise RuntimeError(NO_WORKERS)
        return miniray.get(self.workers[0].get_weights.remote())

    def save_final_model(self, path: str | Path | None = None) -> Path:
        """Write the weights as one safetensors file (default: ``final_model.safetensors``)."""
        if self.run is None or not self.workers:
            raise RuntimeError(NO_WORKERS)
        target = Path(path) if path is not None else self.run.path / "final_model.safetensors"
        return save_model(target, self.model_weights())

    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once; see ``miniray.train.evaluate``."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        with self._with_final_weights():
            return evaluate_on(self._group, data, kwargs)

    def _with_final_weights(self) -> contextlib.AbstractContextManager[None]:
        """While workers are evaluated they have the weights that count."""
        return contextlib.nullcontext()
