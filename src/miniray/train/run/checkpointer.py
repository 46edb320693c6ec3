"""What a trainer does with its state: checkpoints to go on from, and the model itself, in a file or
judged on held-out data.

A checkpoint has the weights (one copy if all workers are in sync, else every worker's own), what
the workers' ``get_state`` gave, the state of the sync strategy, and the history. With the same
number of workers, a fixed seed and workers that save what they need (optimizer, random numbers,
position in the data), going on gives the same bits as never having stopped. How it lies on disk is
in ``checkpoint``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import miniray
from miniray.errors import CheckpointError
from miniray.tracebacks import hides_frames
from miniray.train import pretrained
from miniray.train.callbacks import Callback, check_callbacks
from miniray.train.options import warn
from miniray.train.run.checkpoint_store import CheckpointStore
from miniray.train.run.directory import RunDirectory
from miniray.train.run.modelfile import save_model
from miniray.train.run.records import simplify
from miniray.train.run.session import Lifecycle
from miniray.train.workers.evaluate import evaluate_on

_FORMAT = 1
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
        self._hooks_record: dict[str, Any] | None = None  # a record of the history hooks may add to
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
        self._number_record()
        return self.checkpoints.save(done - 1, self._state_of_run())

    def _number_record(self) -> None:
        """Give the record that hooks add to its epoch, whatever they made of that."""
        if self._hooks_record is not None:
            self._hooks_record["epoch"] = self.epoch - 1

    def _write_record(self) -> None:
        """Into ``metrics.jsonl``, unless it is there: no hook has it any more."""
        self._number_record()
        latest, self._hooks_record = self._hooks_record, None
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
        store, where = _locate(path, self.checkpoints, wanted, self._title)
        epoch, state = store.load(where)
        self._write_record()  # of the epoch that a hook takes back
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

    def _state_of_run(self) -> dict[str, Any]:
        """What a checkpoint has, between two epochs."""
        group = self._group
        assert group is not None
        state: dict[str, Any] = {
            "format": _FORMAT,
            "kind": self._kind,
            "num_workers": len(group.handles),
            "history": [simplify(record) for record in self.history],
            "callbacks": [callback.get_state() for callback in self.callbacks],
            "callback_types": self._callback_types(),
            "weights": None,
            "worker_states": None,
            "extra": self._extra_state(),
        }
        if group.has("get_weights"):
            if self._workers_in_sync():
                state["weights"] = [self.model_weights()]
            else:
                state["weights"] = group.call("get_weights", lambda _: (), {})
        if group.has("get_state"):
            state["worker_states"] = group.call("get_state", lambda _: (), {})
        return state

    def _take_up(self, state: dict[str, Any]) -> None:
        """Bring workers and trainer to where they were; says so where their number is another.

        A worker that is lost meanwhile is replaced within ``max_failures``, and gets it too.
        """
        workers = self.workers
        if state.get("format") != _FORMAT:
            raise CheckpointError(
                f"the checkpoint has format {state.get('format')!r}, not {_FORMAT}"
            )
        kind = state.get("kind", self._kind)  # the first checkpoints did not say
        if kind != self._kind:
            raise CheckpointError(
                f"this is no checkpoint of a {type(self).__name__}, but one of {kind!r}. "
                "From one kind of trainer to another the weights go as a file: save_final_model(), "
                "and load_model() where the model is made"
            )
        weights, states = state["weights"], state["worker_states"]
        before = state["num_workers"]
        if before != len(workers):
            kept = min(before, len(workers))
            text = f"resuming a run of {before} workers on {len(workers)}: data is sharded anew"
            if weights is not None and len(weights) > 1:
                text += ", the workers' weights are averaged"
            if states is not None:
                others = (
                    "the others start fresh" if kept == before else "that of the others is dropped"
                )
                text += f", workers 0 to {kept - 1} take up their own state and {others}"
            self._tell_of_change("resumed_on_other_size", text)
        self._give_callbacks(state)
        if weights is not None and len(weights) != len(workers):
            from miniray.ps.weights import mean

            one = mean(weights) if len(weights) > 1 else weights[0]
            weights = [miniray.put(one)] * len(workers)
        complete = False
        while not complete:  # one that is lost meanwhile is replaced, and needs all of it again
            before = list(workers)
            if weights is not None:
                self._give("set_weights", dict(enumerate(weights)))
            if states is not None:
                self._give("set_state", dict(enumerate(states[: len(workers)])))
            complete = list(workers) == before
        self._load_extra_state(state["extra"])

    def _give_callbacks(self, state: dict[str, Any]) -> None:
        """Each gets the state of the next one of its type: there may be other callbacks by now."""
        types = self._callback_types()
        saved = list(zip(state.get("callback_types", types), state["callbacks"], strict=False))
        for callback, kind in zip(self.callbacks, types, strict=True):
            mine = next((i for i, (type_, _) in enumerate(saved) if type_ == kind), None)
            if mine is not None:
                callback.set_state(saved.pop(mine)[1])

    def _callback_types(self) -> list[str]:
        return [type(callback).__qualname__ for callback in self.callbacks]

    def _tell_of_change(self, event: str, text: str) -> None:
        """Say that the run goes on otherwise than it was: a warning, and an event of the run."""
        warn(text)
        self._on_worker_event({"event": event, "message": text})

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
        return miniray.get(self.workers[0].get_weights.remote())  # one in its place has not trained

    def save_final_model(self, path: str | Path | None = None) -> Path:
        """Write the weights as one safetensors file (default: ``final_model.safetensors``)."""
        if self.run is None or not self.workers:
            raise RuntimeError(NO_WORKERS)
        target = Path(path) if path is not None else self.run.path / "final_model.safetensors"
        return save_model(target, self.model_weights())

    def save_pretrained(self, path: str | Path) -> Path:
        """Save the trained Hugging Face model to the directory ``path``, and return the path.

        Saves the configuration, the full weights as safetensors, and the worker's ``tokenizer`` and
        ``processor`` if it has them. A PEFT model saves its adapter. Load the model with
        ``AutoModelForCausalLM.from_pretrained(path)`` or a different ``Auto`` class.

        Raises:
            TypeError: The model isn't a ``PreTrainedModel`` or a PEFT model. Use
                ``save_final_model``.
            FileExistsError: ``path`` exists and isn't a saved model.
            CheckpointError: The files can't be written. ``path`` is unchanged.
        """
        if not self.workers:
            raise RuntimeError(NO_WORKERS)
        return pretrained.save_pretrained(path, self._write_pretrained)

    def _write_pretrained(
        self, directory: str | None, send_files: bool, *weights: Any
    ) -> pretrained.SavedFiles:
        """Let worker 0 write the model; see ``pretrained.save_pretrained``."""
        group, method = self._group, "_write_pretrained"
        assert group is not None
        if not group.has(method):
            raise TypeError(
                f"save_pretrained() needs a TorchWorker, not {self.workers[0]._info.class_name}. "
                "Use save_final_model()."
            )
        arguments = (directory, send_files, *weights)
        saved = group.call_some([0], lambda i: group.submit(i, method, *arguments), method)
        return saved[0]  # type: ignore[no-any-return]

    @hides_frames
    def evaluate(self, data: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Evaluate on all workers, every sample exactly once."""
        if self._group is None:
            raise RuntimeError(NO_WORKERS)
        with self._with_final_weights():
            return evaluate_on(self._group, data, kwargs)

    def _with_final_weights(self) -> contextlib.AbstractContextManager[None]:
        """While workers are evaluated they have the weights that count."""
        return contextlib.nullcontext()


def _locate(
    path: str | Path,
    store: CheckpointStore | None,
    run: Path | None,
    trainer: str,
) -> tuple[CheckpointStore, str | Path]:
    """(the store, what to load from it) for what a user may call a checkpoint.

    ``"latest"`` is that of the store, else of ``run``, else of the newest run of the trainer.
    """
    if str(path) == "latest":
        if store is not None:
            return store, "latest"
        path = run / "checkpoints" if run is not None else _newest(trainer)
    where = Path(path).expanduser()
    if where.name == "checkpoints":
        return CheckpointStore(where), "latest"
    if (where / "checkpoints").is_dir() or (where / "run.json").is_file():
        return CheckpointStore(where / "checkpoints"), "latest"
    return CheckpointStore(where.parent), where


def _newest(trainer: str) -> Path:
    """The checkpoints of the newest run of a trainer that has any."""
    found = Path("runs").glob(f"{trainer}-[0-9]*/checkpoints")
    runs = [p for p in found if any(p.iterdir())]
    if not runs:
        raise CheckpointError(
            f"resume=True, but {Path('runs').resolve()} has no run of {trainer} with a checkpoint; "
            "name the run with run_dir=, name= or resume=PATH"
        )
    return max(runs, key=lambda p: p.stat().st_mtime)
