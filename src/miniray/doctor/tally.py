"""Steps, losses and samples of a rank, counted as they come.

What shows that a rank moves (counts of steps, batches, samples; the loss) is in the box at once.
The records of steps and the ids of samples follow at most a tenth of a second later, or with the
next heartbeat when the rank is stuck: code that runs once a step runs cold, and in lots it costs a
fraction. A rank that is killed loses that tenth of a second.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from miniray.doctor import layout, model
from miniray.doctor.box import Box
from miniray.doctor.events import Events
from miniray.doctor.layout import Cell, Real
from miniray.doctor.model import site_from
from miniray.doctor.samples import PassWriter

_monotonic = time.monotonic
_isfinite = math.isfinite
_NO_LOSS = layout.NO_LOSS
_LOT_SECONDS = 0.1
_MOST_PENDING = 64

#: number, epoch, seconds, data, backward, collective, loss, batch size, when it ended
_Step = tuple[int, int, float, float, float, float, float, int, float]


class Tally(Events, ABC):
    """Events, and steps, losses and samples."""

    def __init__(self, box: Box) -> None:
        super().__init__(box)
        self._floats = box.floats
        self.step_number = 0
        self.explicit_steps = False  # the user calls doctor.step: nobody else counts
        # Seconds spent since the last step ended; see ``model.Steps``.
        self.data_seconds = 0.0
        self.backward_seconds = 0.0
        self.collective_seconds = 0.0
        self._step_began: float | None = None
        self._totals = [0.0] * 4  # seconds, data, backward, collective
        self._spans = [[0.0] * 4 for _ in layout.STEP_WIDTHS]  # at the end of the last span
        self._loss = _NO_LOSS
        self._samples: Sequence[int] = ()
        self._pass: PassWriter | None = None
        # One thread adds while another may be taking: what is in here is never lost between them.
        self._pending_steps: deque[_Step] = deque()
        self._pending_ids: deque[Sequence[int]] = deque()
        self._next_flush = 0.0
        self._tally_lock = threading.RLock()  # taken once a lot

    # -- steps ------------------------------------------------------------------------------------

    def begin_steps(self, began: float | None = None) -> None:
        """Steps are measured from here (or ``began``): what happened before belongs to none."""
        self._step_began = _monotonic() if began is None else began
        self.data_seconds = self.backward_seconds = self.collective_seconds = 0.0

    def end_step(self) -> None:
        """A step is done: count it, with the times gathered since the last one."""
        now = _monotonic()
        began = self._step_began
        self._step_began = now
        self.step_number = number = self.step_number + 1
        ints = self.ints
        ints[4] = number  # Cell.STEP
        self._pending_steps.append(
            (
                number,
                ints[5],  # Cell.EPOCH
                0.0 if began is None else now - began,
                self.data_seconds,
                self.backward_seconds,
                self.collective_seconds,
                self._loss,
                ints[6],  # Cell.BATCH_SIZE
                now,
            )
        )
        self.data_seconds = self.backward_seconds = self.collective_seconds = 0.0
        self._loss = _NO_LOSS
        if now > self._next_flush:
            self.flush_tally()

    def flush_tally(self) -> None:
        """Write what is pending. Any thread may: the heartbeat does when the rank is stuck."""
        with self._tally_lock:
            self._next_flush = _monotonic() + _LOT_SECONDS
            while self._pending_steps:
                self._write_step(self._pending_steps.popleft())
            for index, total in enumerate(self._totals):
                self._floats[Real.TOTAL_SECONDS + index] = total
            ids: list[int] = []
            while self._pending_ids:
                ids += self._pending_ids.popleft()
            # Ids of one pass only: a pass ends with a flush.
            if ids and self._pass is not None:
                self._pass.add(ids)

    def _write_step(self, step: _Step) -> None:
        number, epoch, *parts, loss, batch_size, ended = step
        box = self.box
        box.add_step(0, number, epoch, parts, loss, batch_size, ended)
        self._totals = totals = [sum(two) for two in zip(self._totals, parts, strict=True)]
        for level in (1, 2):
            if number % layout.STEP_WIDTHS[level] == 0:  # steps are kept in sixteens, ... too
                span = [now - then for now, then in zip(totals, self._spans[level], strict=True)]
                self._spans[level] = totals
                box.add_step(level, number, epoch, span, loss, batch_size, ended)

    def set_epoch(self, epoch: int, site: str = "") -> None:
        self.ints[Cell.EPOCH] = epoch
        self.event(model.EPOCH, "epoch", site=site, number=epoch)

    # -- losses -----------------------------------------------------------------------------------

    def set_loss(self, value: float, site: str, step: int | None = None) -> None:
        """A loss was seen, for the step that is going on (or ``step``)."""
        if step is None:
            step = self.step_number + 1
            self._loss = value
        self._floats[64] = value  # Real.LOSS
        self.ints[11] = step  # Cell.LOSS_STEP
        if not _isfinite(value):
            self._count_nonfinite(value, site, step)

    def _count_nonfinite(self, value: float, site: str, step: int) -> None:
        ints = self.ints
        ints[Cell.NONFINITE] += 1
        if ints[Cell.NONFINITE] == 1:
            first = {
                "step": step,
                "epoch": ints[Cell.EPOCH],
                "value": str(value),
                "samples": [int(number) for number in self._samples[:64]],
                "site": list(site_from(site)),
                "at": time.time(),
            }
            self.event(model.LOSS, str(value), site=site, number=step)
            self.update(first_nonfinite=first)

    # -- samples ----------------------------------------------------------------------------------

    def begin_pass(self, loader: int, epoch: int) -> None:
        """Samples from here on belong to this pass over this loader."""
        self.end_pass()
        self._pass = PassWriter(self.box, loader, epoch)

    def own_pass(self) -> None:
        """Samples are told by the user: their pass is the epoch, whatever loaders do."""
        epoch = max(0, self.ints[Cell.EPOCH])
        if self._pass is None or (self._pass.loader, self._pass.epoch) != (-1, epoch):
            self.begin_pass(-1, epoch)

    def end_pass(self) -> None:
        if self._pass is not None:
            self.flush_tally()
            self._pass.flush()
            self._pass = None

    def add_samples(self, ids: Sequence[int] | None, count: int) -> None:
        """A batch of ``count`` samples was taken; ``ids`` where they are known."""
        ints = self.ints
        ints[6] = count  # Cell.BATCH_SIZE
        ints[10] += count  # Cell.SAMPLES
        if ids is not None and self._pass is not None:
            self._samples = ids
            self._pending_ids.append(ids)
            if len(self._pending_ids) > _MOST_PENDING:
                self.flush_tally()
        else:
            self._samples = ()

    # -- given by the recorder --------------------------------------------------------------------

    @abstractmethod
    def update(self, **fields: Any) -> None:
        """Write fields of the box."""
