"""The position of a run and its history."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from miniray.train.run.records import finite, simplify


@dataclasses.dataclass
class TrainState:
    """The position of a run: a part of every checkpoint.

    Attributes:
        epoch: Number of completed epochs, which is the index of the next one.
        step: Number of completed optimizer steps, if the workers report them, as their position or
            as ``num_steps``. Each epoch without it counts as one step.
        history: One record per epoch.
        in_epoch: Whether ``train_epoch`` is running.
    """

    epoch: int = 0
    step: int = 0
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    in_epoch: bool = False
    _reported_step: int | None = dataclasses.field(default=None, repr=False)
    #: The last record of the history, while hooks may change it.
    _open_record: dict[str, Any] | None = dataclasses.field(default=None, repr=False)

    def report_step(self, step: int) -> None:
        """Note that ``step`` optimizer steps of the run are completed at the end of this epoch."""
        self._reported_step = step

    def end_epoch(self, epoch: int, record: dict[str, Any]) -> None:
        """Add the record of ``epoch`` to the history. Hooks may change it until it is closed."""
        steps = finite(record.get("num_steps"))
        step, self._reported_step = self._reported_step, None
        if step is None:
            step = self.step + (1 if steps is None else int(steps))
        self.step = step
        self.history.append(record)
        self.epoch = epoch + 1
        self._open_record = record
        self.number_record()

    def number_record(self) -> None:
        """Set ``epoch`` of the open record, whatever hooks and workers have written there."""
        if self._open_record is not None:
            self._open_record["epoch"] = self.epoch - 1

    def close_record(self) -> dict[str, Any] | None:
        """Return the record that hooks could change. None if it is closed already."""
        self.number_record()
        record, self._open_record = self._open_record, None
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "history": [simplify(record) for record in self.history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position that ``state_dict`` returned."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.history = list(state["history"])
        self._open_record = None
