"""Small classes over the hooks that trainers call; write your own the same way.

An exception in a callback ends the run, like one in a trainer's own hook. Callbacks are called in
the order given, after the trainer's own hook. All of them run on the driver.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import miniray
from miniray.checks import check_bool, check_int, suggest_options
from miniray.train.options import warn
from miniray.train.run import records
from miniray.train.run.result import better_direction
from miniray.train.workers.group import WorkerGroup, setting_up

__all__ = ["CSVLogger", "Callback", "Checkpoint", "EarlyStopping", "LRSchedule", "TensorBoard"]


class Callback:
    """Base class of callbacks. ``kwargs`` are those of ``train()``.

    Implement ``get_state`` and ``set_state`` to keep state across a resume: a dict of plain values,
    stored in checkpoints. A ``Checkpoint`` saves callbacks that come after it in the state before
    the epoch.
    """

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        """Called when the workers are ready, before the first epoch."""

    def on_epoch_start(self, trainer: Any, epoch: int, **kwargs: Any) -> None:
        """Called before each epoch."""

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        """Called after each epoch. Values that are added to ``result`` appear in the history."""

    def on_worker_replaced(self, trainer: Any, worker_id: int) -> None:
        """Called when a replacement has the shard and weights of the lost worker.

        This can be at any time, also inside an epoch. Call no other worker here: if it is lost, the
        replacement is taken for lost.
        """

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        """Called after the last epoch with the result, unless the run failed."""

    def get_state(self) -> dict[str, Any]:
        """Return plain values that a resumed run needs."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the values of ``get_state`` before the first epoch of a resumed run."""


@suggest_options(
    {
        "save_top_k": "Use keep_best=True and keep_last=.",
        "dirpath": "Checkpoints are in the run directory. Pass run_dir= to the trainer.",
    }
)
class Checkpoint(Callback):
    """Saves a checkpoint every ``every`` epochs, and after the last one.

    Args:
        keep_last: how many of the newest to keep; None keeps all. As many as the trainer was told
            (``keep_last=3``) where it is not said here.
        keep_best: keep the best one too, by ``monitor``: the lowest with ``mode="min"``, the
            highest with ``"max"``; ``"auto"`` goes by the metric's name (``better_direction``).
            Otherwise the trainer's ``keep_best`` counts. A metric that never came is warned of at
            the end.
    """

    def __init__(
        self,
        every: int = 1,
        keep_last: int | EllipsisType | None = ...,
        keep_best: bool = False,
        monitor: str = "loss",
        mode: str = "auto",
    ) -> None:
        self.every = check_int("every", every, 1)
        self.keep_last = keep_last
        self.keep_best = (
            (monitor, better_direction(monitor, mode))
            if check_bool("keep_best", keep_best)
            else None
        )
        self._saved: int | None = None
        self._last: int | None = None

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        store = trainer.checkpoints
        store.configure(
            keep_last=store.keep_last if self.keep_last is ... else self.keep_last,
            keep_best=self.keep_best or store.keep_best,
        )

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        self._last = epoch
        if (epoch + 1) % self.every == 0:
            self._save(trainer)

    def _save(self, trainer: Any) -> None:
        trainer.save_checkpoint(self._last)
        self._saved = self._last

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        if self._saved != self._last:
            self._save(trainer)
        if self.keep_best is not None:
            _warn_unless_seen("Checkpoint kept no best one", self.keep_best[0], trainer.history)


@suggest_options()
class EarlyStopping(Callback):
    """Ends the run after ``patience`` epochs in which ``monitor`` has not improved.

    Improved means: better than the best by more than ``min_delta``; NaN is no improvement. Sets
    ``trainer.should_stop`` and says why in ``trainer.stop_reason`` and in the last record of the
    history. Epochs without the metric (it may come from an evaluation every few epochs) do not
    count; one that never came is warned of. ``mode``: see ``Checkpoint``.
    """

    def __init__(
        self, monitor: str = "loss", patience: int = 3, mode: str = "auto", min_delta: float = 0.0
    ) -> None:
        check_int("patience", patience, 1)
        if not min_delta >= 0:
            raise ValueError(f"min_delta must be a number >= 0, not {min_delta!r}")
        self.monitor = monitor
        self.patience = patience
        self.mode = better_direction(monitor, mode)
        self.min_delta = min_delta
        self.best: float | None = None
        self.waited = 0
        self._seen: int | None = None  # the last epoch it knows of

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        if self._seen is not None:  # a checkpoint may have been written before it saw the epoch
            for record in trainer.history:
                if record["epoch"] > self._seen:
                    self._look_at(record["epoch"], record)

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        if not self._look_at(epoch, result) and self.waited >= self.patience:
            best = "never was a number" if self.best is None else f"is {self.best:.6g} at best"
            reason = f"early stopping: {self.monitor} {best}, {self.waited} epochs without better"
            trainer.should_stop = True
            trainer.stop_reason = result["stop_reason"] = reason

    def _look_at(self, epoch: int, result: Mapping[str, Any]) -> bool:
        """Return False if the metric isn't better than the best so far."""
        self._seen = epoch
        value = records.number(result.get(self.monitor))
        if value is None and self.monitor in result:
            kind = type(result[self.monitor]).__name__
            raise TypeError(f"EarlyStopping: {self.monitor!r} is no number but a {kind}")
        if value is None:
            return True
        if self._improved(value):
            self.best, self.waited = value, 0
            return True
        self.waited += 1
        return False

    def _improved(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        if self.best is None and not self.waited:
            _warn_unless_seen("EarlyStopping never stopped", self.monitor, trainer.history)

    def get_state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "seen": self._seen}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited, self._seen = state["best"], state["waited"], state.get("seen")


@suggest_options()
class LRSchedule(Callback):
    """Calls ``set_lr(schedule(epoch))`` on every worker before each epoch.

    Workers without ``set_lr`` are refused at the start of training with ``TypeError``. ``lr`` is
    the current value; a worker that replaces another begins with it.
    """

    def __init__(self, schedule: Callable[[int], float]) -> None:
        if not callable(schedule):
            raise TypeError(f"schedule must be a function of the epoch, not {schedule!r}")
        self.schedule = schedule
        self.lr: float | None = None

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        for worker_id, worker in enumerate(trainer.workers):
            if not hasattr(worker, "set_lr"):
                raise TypeError(
                    f"LRSchedule needs workers with a method set_lr(self, lr); worker {worker_id} "
                    f"({worker!r}) has none"
                )

    def on_epoch_start(self, trainer: Any, epoch: int, **kwargs: Any) -> None:
        value = records.finite(self.schedule(epoch))
        if value is None or value < 0:
            raise ValueError(f"schedule({epoch}) must give a number >= 0")
        self.lr = value
        trainer.call_workers("set_lr", value, epoch=epoch)

    def on_worker_replaced(self, trainer: Any, worker_id: int) -> None:
        if self.lr is not None:
            miniray.get(trainer.workers[worker_id].set_lr.remote(self.lr))


@suggest_options()
class CSVLogger(Callback):
    """Writes a table with a row an epoch (default: ``metrics.csv`` in the run directory).

    Columns may appear later: the file is then replaced whole, with empty cells above. Rows of
    epochs that are done again (a resumed run, or a new one with the same path) are replaced. Lists
    and dicts are written as JSON.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = path
        self._path: Path | None = None
        self._columns: list[str] = []

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        self._path = Path(self._given) if self._given is not None else None
        self._columns = []

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        path = self._path = self._path or Path(trainer.run.path) / "metrics.csv"
        row = {"epoch": str(epoch), **{k: _cell(v) for k, v in result.items() if k != "epoch"}}
        new = [name for name in row if name not in self._columns]
        if not new and path.exists():
            with open(path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerow(row)
            return
        before = _rows_before(path, epoch)
        older = list(before[0]) if before else []
        self._columns = list(dict.fromkeys([*older, *self._columns, *row]))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, self._columns, restval="")
        table.writeheader()
        table.writerows([*before, row])
        path.parent.mkdir(parents=True, exist_ok=True)
        records.replace_text(path, text.getvalue())


@suggest_options()
class TensorBoard(Callback):
    """Writes the numbers of every epoch as TensorBoard scalars (default: in the run directory).

    ``ImportError`` at the start of training where tensorboard is not installed.
    """

    def __init__(self, directory: str | Path | None = None) -> None:
        self._directory = directory
        self._writer: Any = None

    def on_train_start(self, trainer: Any, **kwargs: Any) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"the TensorBoard callback needs torch and tensorboard ({error}): "
                "pip install torch tensorboard"
            ) from None
        directory = self._directory or Path(trainer.run.path) / "tensorboard"
        # What a run that is taken up again wrote of epochs that are now to be done is not shown.
        self._writer = SummaryWriter(str(directory), purge_step=trainer.epoch)

    def on_epoch_end(self, trainer: Any, epoch: int, result: dict[str, Any], **kwargs: Any) -> None:
        for key, value in result.items():
            plain = records.number(value)
            if plain is not None and key != "epoch":  # which is the axis
                self._writer.add_scalar(key, plain, epoch)
        self._writer.flush()  # so that a run that is killed later can be looked at

    def on_train_end(self, trainer: Any, history: Any, **kwargs: Any) -> None:
        self._writer.close()


class CallbackStates:
    """The states of callbacks, as a part of checkpoints.

    Each callback receives the state of the next one of its type, because a resumed run may have
    other callbacks.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def state_dict(self) -> list[dict[str, Any]]:
        """Return types and states, in order."""
        return [{"type": _get_type(c), "state": c.get_state()} for c in self._callbacks]

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states."""
        left = list(saved)
        for callback in self._callbacks:
            kind = _get_type(callback)
            mine = next((i for i, entry in enumerate(left) if entry["type"] == kind), None)
            if mine is not None:
                callback.set_state(left.pop(mine)["state"])


def _get_type(callback: Callback) -> str:
    return type(callback).__qualname__


class CallbackSetup:
    """Call ``on_worker_replaced`` of all callbacks when a replacement is prepared."""

    def __init__(self, trainer: Any, callbacks: Sequence[Callback]) -> None:
        self._trainer, self._callbacks = trainer, callbacks

    def start(self, group: WorkerGroup) -> None:
        """Do nothing: ``on_train_start`` is called for new workers."""

    def set_up(self, group: WorkerGroup, worker_id: int) -> None:
        """Call the callbacks. A replacement that is lost during this is replaced too."""
        for callback in self._callbacks:
            with setting_up("on_worker_replaced"):
                callback.on_worker_replaced(self._trainer, worker_id)


def check_callbacks(callbacks: Callback | Iterable[Any]) -> list[Callback]:
    """Return the callbacks as a list. Raise ``TypeError`` for other objects and for classes."""
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    for callback in found:
        if not isinstance(callback, Callback):
            hint = f"; write {callback.__name__}()" if isinstance(callback, type) else ""
            raise TypeError(f"callbacks must be Callback objects, not {callback!r}{hint}")
    return found


def _warn_unless_seen(consequence: str, metric: str, history: list[dict[str, Any]]) -> None:
    if history and all(metric not in record for record in history):
        known = ", ".join(history[-1])
        warn(f"{consequence}: no epoch had {metric!r}, only {known}")


def _cell(value: Any) -> str:
    if value is None:
        return ""
    plain = records.to_json(value)
    return json.dumps(plain) if isinstance(plain, (dict, list, bool)) else str(plain)


def _rows_before(path: Path, epoch: int) -> list[dict[str, str]]:
    """The table's rows of earlier epochs, as they are."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, restval=""))
    except FileNotFoundError:
        return []
    return [row for row in rows if row.get("epoch", "").isdigit() and int(row["epoch"]) < epoch]
