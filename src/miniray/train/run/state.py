"""The position of a run and its history."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from miniray.checks import check_int
from miniray.counting import format_epoch
from miniray.train.run.records import finite, simplify


@dataclasses.dataclass
class TrainState:
    """The position of a run: a part of every checkpoint.

    Attributes:
        epoch: Number of completed epochs, which is the index of the current or next one.
        step: Number of completed optimizer steps, if the workers report them, as their position or
            as ``num_steps``. Each epoch without it counts as one step.
        step_in_epoch: Completed steps of an epoch that isn't complete; 0 between epochs.
        history: One record per epoch. If the run stopped inside an epoch, the last record is of a
            part of it and has ``"complete": False``.
        part_metrics: Metrics of the epoch up to this step, if it isn't complete.
        in_epoch: Whether ``train_epoch`` is running.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    part_metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    in_epoch: bool = False
    #: Whether the last record has replaced that of an earlier part of the same epoch.
    replaces_part: bool = False
    _is_reported: bool = dataclasses.field(default=False, repr=False)
    #: The last record of the history, while hooks may change it.
    _open_record: dict[str, Any] | None = dataclasses.field(default=None, repr=False)

    @property
    def position(self) -> dict[str, int]:
        """The numbers that say how far the run is: step, epoch and step in the epoch."""
        return {"step": self.step, "epoch": self.epoch, "step_in_epoch": self.step_in_epoch}

    def report_step(self, step: int, step_in_epoch: int = 0) -> None:
        """Set the position inside an epoch, or at its end, that ranks have reported."""
        self.step, self.step_in_epoch, self._is_reported = step, step_in_epoch, True

    def end_epoch(self, epoch: int, record: dict[str, Any]) -> None:
        """Add the record of ``epoch`` to the history. Hooks may change it until it is closed."""
        if not self._is_reported:
            steps = finite(record.get("num_steps"))
            self.step += 1 if steps is None else int(steps)
        self.epoch = epoch + 1
        self.step_in_epoch = 0
        self._add_record(record)

    def stop_inside_epoch(self, record: dict[str, Any]) -> None:
        """Add the record of a part of the epoch to the history."""
        self.part_metrics = {**record, "complete": False}
        self._add_record(self.part_metrics)

    def _add_record(self, record: dict[str, Any]) -> None:
        self.replaces_part = bool(self.history) and self.history[-1].get("complete") is False
        if self.replaces_part:
            del self.history[-1]
        self.history.append(record)
        self._open_record = record
        self.number_record()

    def number_record(self) -> None:
        """Set ``epoch`` of the open record, whatever hooks and workers have written there."""
        if self._open_record is not None:
            is_part = self._open_record.get("complete") is False
            self._open_record["epoch"] = self.epoch if is_part else self.epoch - 1

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics at this position, by which checkpoints are compared."""
        if self.step_in_epoch:
            return self.part_metrics
        return self.history[-1] if self.history else {}

    def close_record(self) -> dict[str, Any] | None:
        """Return the record that hooks could change. None if it is closed already."""
        self.number_record()
        record, self._open_record = self._open_record, None
        return record

    def describe_position(self, unit: str, epochs: int | None) -> str:
        """Return the last completed step or epoch for people, such as ``epoch 2 of 3``."""
        if self.step_in_epoch or unit == "step":
            return f"step {self.step}"
        return format_epoch(self.epoch - 1, epochs)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "step_in_epoch": self.step_in_epoch,
            "history": [simplify(record) for record in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position that ``state_dict`` returned."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.step_in_epoch = state["step_in_epoch"]
        self.history = list(state["history"])
        self.part_metrics = {}
        self._open_record = None


@dataclasses.dataclass
class RankState:
    """The position of a rank in the run.

    Attributes:
        step: Completed optimizer steps of the run, including those before a restart or resume.
        epoch: The current epoch, or the next one between epochs.
        step_in_epoch: Completed steps of this epoch; 0 between epochs.
        samples: Samples of this epoch that this rank has trained on.
    """

    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0

    def start_epoch(self, epoch: int) -> None:
        """Set the position to the start of an epoch, unless it is already inside this epoch."""
        if epoch != self.epoch or not self.step_in_epoch:
            self.epoch, self.step_in_epoch, self.samples = epoch, 0, 0

    def end_epoch(self) -> None:
        self.epoch, self.step_in_epoch, self.samples = self.epoch + 1, 0, 0

    def advance(self, samples: int, steps: int = 1) -> None:
        """Count ``steps`` completed optimizer steps on ``samples`` of this rank's samples."""
        self.step += steps
        self.step_in_epoch += steps
        self.samples += samples

    def state_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def check_length(epochs: int | None, steps: int | None, unit: str) -> tuple[int | None, int | None]:
    """Return the length of a run. Raise ``TypeError`` unless exactly one number is set."""
    if (epochs is None) == (steps is None):
        given = "neither" if epochs is None else "both"
        raise TypeError(f"train() needs epochs= or steps=, and got {given}")
    return (
        None if epochs is None else check_int(f"{unit}s", epochs, 0),
        None if steps is None else check_int("steps", steps, 0),
    )


@dataclasses.dataclass(frozen=True)
class TrainTarget:
    """The position at which a call of ``train`` ends: a number of epochs or of steps of the run."""

    epochs: int | None = None
    steps: int | None = None

    @classmethod
    def create(
        cls, epochs: int | None, steps: int | None, is_total: bool, state: TrainState
    ) -> TrainTarget:
        """Return the target for the arguments of ``train``.

        Args:
            epochs: Number of epochs.
            steps: Number of steps; one of both is None.
            is_total: They are totals of the run, instead of additional epochs or steps.
            state: The position at the start of the call.
        """
        if epochs is not None:
            return cls(epochs=epochs if is_total else state.epoch + epochs)
        assert steps is not None
        return cls(steps=steps if is_total else state.step + steps)

    def to_dict(self) -> dict[str, int]:
        """Return the number of epochs or steps, for ``run.json``."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    def describe(self, unit: str) -> str:
        """Return the length of the run, such as ``3 epochs``."""
        return f"{self.steps} steps" if self.epochs is None else f"{self.epochs} {unit}s"

    def count_steps(self, state: Any, steps_per_epoch: int | None) -> int | None:
        """Return the step at which the call ends; None if epochs have no known number of steps.

        ``state`` is a position with ``step``, ``epoch`` and ``step_in_epoch``.
        """
        if self.epochs is None or steps_per_epoch is None:
            return self.steps
        epochs_left: int = self.epochs - state.epoch
        start_of_epoch: int = state.step - state.step_in_epoch
        return start_of_epoch + epochs_left * steps_per_epoch

    def is_reached(self, state: TrainState) -> bool:
        if self.epochs is not None:
            return state.epoch >= self.epochs
        assert self.steps is not None
        return state.step >= self.steps
