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
from miniray.doctor.history import StepHistory
from miniray.doctor.layout import Cell, Real
from miniray.doctor.model import site_from
from miniray.doctor.samples import PassWriter

_monotonic_ns = time.monotonic_ns
_isfinite = math.isfinite
_NO_LOSS = layout.NO_LOSS
_LOT_NS = 100_000_000

#: Nanoseconds: now, and ever spent in data, backward and collectives.
_Clocks = tuple[int, int, int, int]
#: These when it ended, its loss and batch size.
_Step = tuple[int, int, int, int, float, int]


def _minus(a: _Clocks, b: _Clocks) -> _Clocks:
    return a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]


class Tally(Events, ABC):
    """Events, and steps, losses and samples."""

    def __init__(self, box: Box) -> None:
        super().__init__(box)
        self.floats = box.floats
        self.explicit_steps = False  # set by doctor.step: steps of optimizers don't count
        #: A trainer or doctor.step reports losses: the value that backward is called on may be
        #: divided (by the number of micro-batches, say), and the backward hook ignores it.
        self.explicit_losses = False
        self._epochs_told = False
        # Nanoseconds ever spent in these; see ``model.Steps``.
        self.data_ns = 0
        self.backward_ns = 0
        self.collective_ns = 0
        self._before: _Clocks | None = None  # when the last step ended, or the first one began
        self._written = 0  # steps
        self._outside: _Clocks = (0, 0, 0, 0)  # of these, what belongs to no step
        self.history = StepHistory(box)
        self.loss = _NO_LOSS
        self._samples: Sequence[int] = ()  # of the last batch written
        self._pass: PassWriter | None = None
        # One thread adds while another may be taking: what is in here is never lost between them.
        self.pending_steps: deque[_Step] = deque()
        self.pending_ids: deque[Sequence[int]] = deque()
        self.next_flush = 0
        self._tally_lock = threading.RLock()  # taken once a lot

    # -- steps ------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        """Steps done so far."""
        return self.ints[Cell.STEP]

    def begin_steps(self, began: int | None = None) -> None:
        """Steps are measured from here (or ``began``): what happened before belongs to none."""
        with self._tally_lock:
            self.flush_tally()
            now = _monotonic_ns() if began is None else began
            begins = now, self.data_ns, self.backward_ns, self.collective_ns
            self._outside = _minus(begins, self._totals())
            self._before = begins

    def end_step(self, now: int) -> None:
        """A step is done: count it, with the times gathered since the last one."""
        ints = self.ints
        ints[4] += 1  # Cell.STEP
        batch_size = ints[6]  # Cell.BATCH_SIZE
        self.pending_steps.append(
            (now, self.data_ns, self.backward_ns, self.collective_ns, self.loss, batch_size)
        )
        self.loss = _NO_LOSS
        if now > self.next_flush:
            self.flush_tally()

    def retract_first_step(self) -> None:
        """Remove the first step of an optimizer, because ``doctor.step`` reports it too."""
        with self._tally_lock:
            self.flush_tally()
            if self._written == 1:
                self._written = self.ints[Cell.STEP] = 0
                self._before = self._outside  # when it began
                self.history.retract_first_step()

    def flush_tally(self) -> None:
        """Write what is pending. Any thread may: the heartbeat does when the rank is stuck."""
        with self._tally_lock:
            self.next_flush = _monotonic_ns() + _LOT_NS
            while self.pending_steps:
                self._write_step(self.pending_steps.popleft())
            for index, total in enumerate(self._totals()):
                self.floats[Real.TOTAL_SECONDS + index] = total / 1e9
            ids: list[int] = []
            while self.pending_ids:
                self._samples = self.pending_ids.popleft()
                ids += self._samples
            # Ids of one pass only: a pass ends with a flush.
            if ids and self._pass is not None:
                self._pass.add(ids)

    def _write_step(self, step: _Step) -> None:
        ended, data, backward, collective, loss, batch_size = step
        if self._before is None:
            self._before = self._outside = ended, 0, 0, 0
        was = self._before
        self._before = ended, data, backward, collective
        self._written = number = self._written + 1
        # Steps of one epoch only: another begins with a flush.
        epoch = self.ints[Cell.EPOCH]
        parts = ended - was[0], data - was[1], backward - was[2], collective - was[3]
        self.history.add(number, epoch, parts, loss, batch_size, ended)

    def _totals(self) -> _Clocks:
        """Nanoseconds in steps, all together: all, data, backward, collectives."""
        return _minus(self._before or self._outside, self._outside)

    def set_epoch(self, epoch: int, site: str = "") -> None:
        """A loader's pass is this epoch, unless somebody tells which it is: a run is resumed."""
        if not self._epochs_told:
            self._begin_epoch(epoch, site)

    def tell_epoch(self, epoch: int, site: str = "") -> None:
        """Whoever runs the epochs says which one begins."""
        self._epochs_told = True
        self._begin_epoch(epoch, site)

    def _begin_epoch(self, epoch: int, site: str) -> None:
        self.flush_tally()
        self.ints[Cell.EPOCH] = epoch
        self.event(model.EPOCH, "epoch", site=site, number=epoch)

    # -- losses -----------------------------------------------------------------------------------

    def set_loss(self, value: float, site: str, step: int | None = None) -> None:
        """Record a loss of the current step (or of ``step``)."""
        if step is None:
            step = self.ints[4] + 1  # Cell.STEP
            self.loss = value
        self.floats[64] = value  # Real.LOSS
        self.ints[11] = step  # Cell.LOSS_STEP
        if not _isfinite(value):
            self.count_nonfinite(value, site, step)

    def count_nonfinite(self, value: float, site: str, step: int) -> None:
        ints = self.ints
        ints[Cell.NONFINITE] += 1
        if ints[Cell.NONFINITE] == 1:
            self.flush_tally()
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
        self.flush_tally()
        self._pass = PassWriter(self.box, loader, epoch)

    def own_pass(self) -> None:
        """Samples are told by the user: their pass is the epoch, whatever loaders do."""
        epoch = max(0, self.ints[Cell.EPOCH])
        if self._pass is None or (self._pass.loader, self._pass.epoch) != (-1, epoch):
            self.begin_pass(-1, epoch)

    def end_pass(self) -> None:
        if self._pass is not None:
            self.flush_tally()
            self._pass = None

    def add_samples(self, ids: Sequence[int] | None, count: int) -> None:
        """A batch of ``count`` samples was taken; ``ids`` where they are known."""
        ints = self.ints
        ints[6] = count  # Cell.BATCH_SIZE
        ints[10] += count  # Cell.SAMPLES
        if ids is not None:
            self.pending_ids.append(ids)

    # -- given by the recorder --------------------------------------------------------------------

    @abstractmethod
    def update(self, **fields: Any) -> None:
        """Write fields of the box."""
