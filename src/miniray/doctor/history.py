"""The history of a rank's steps: a fixed number of entries, spread evenly over the whole run.

An entry covers ``stride`` steps in a row. When all slots are in use, every second entry is merged
into the one before it and the stride doubles. A restarted attempt begins with the entries of the
attempts before it, so that a curve shows all of them.

Entries never move. A merged entry is written in the slot of its first half, and covers the second
half until that slot is used again: ``without_merged`` lets a reader skip it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from miniray.doctor import layout
from miniray.doctor.box import Box
from miniray.doctor.layout import Cell, Real
from miniray.doctor.model import Steps

# Looked up once: these are needed in every step.
_pack, _STEPS_AT, _STEP_SIZE = layout.STEP.pack_into, layout.STEPS_AT, layout.STEP.size
_NO_LOSS, _CELLS_AT = layout.NO_LOSS, layout.CELLS_AT

#: Nanoseconds of an entry: all, waiting for data, backward, collectives.
Parts = tuple[int, int, int, int]


@dataclasses.dataclass(slots=True)
class _Entry:
    slot: int
    step: int
    count: int
    epoch: int
    ended: int
    parts: Parts
    loss: float
    batch_size: int
    attempt: int

    def extend(
        self,
        step: int,
        count: int,
        epoch: int,
        ended: int,
        parts: Parts,
        loss: float,
        batch_size: int,
    ) -> None:
        """Merge the steps that follow, up to ``step``."""
        self.step, self.epoch, self.ended, self.batch_size = step, epoch, ended, batch_size
        self.count += count
        a, b, c, d = self.parts
        self.parts = a + parts[0], b + parts[1], c + parts[2], d + parts[3]
        if loss != _NO_LOSS:
            self.loss = loss


class StepHistory:
    """Write the history of one rank into its record."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._free = list(range(layout.HISTORY_SLOTS - 1, -1, -1))
        self._entries: list[_Entry] = []
        self._strides = {0: 1}  # by attempt
        self._attempt = 0
        self._writes = 0

    def begin_attempt(self, earlier: Sequence[Steps]) -> None:
        """Begin with the history of earlier attempts, thinned to half of the slots."""
        if not earlier:
            return
        clock = self._box.floats[Real.CLOCK]
        self._attempt = earlier[-1].attempt + 1
        self._strides = {s.attempt: 1 for s in earlier}
        entries = []
        for s in earlier:
            self._strides[s.attempt] = max(self._strides[s.attempt], s.count)
            parts = tuple(round(x * 1e9) for x in (s.seconds, s.data, s.backward, s.collective))
            loss = _NO_LOSS if s.loss is None else s.loss
            entries.append(
                _Entry(-1, s.step, s.count, s.epoch, round((s.ended - clock) * 1e9),
                       (parts[0], parts[1], parts[2], parts[3]), loss, s.batch_size, s.attempt)
            )  # fmt: skip
        self._entries = entries
        while len(self._entries) > layout.HISTORY_SLOTS // 2:
            self._thin()
        self._free = list(range(layout.HISTORY_SLOTS - 1, -1, -1))
        for entry in self._entries:
            entry.slot = self._free.pop()
            self._write(entry)
        self._strides[self._attempt] = 1
        self._box.ints[Cell.ATTEMPT] = self._attempt

    def add(
        self, step: int, epoch: int, parts: Parts, loss: float, batch_size: int, ended: int
    ) -> None:
        """Add a step. Steps are numbered from 1 in each attempt, without gaps."""
        strides, attempt, entries = self._strides, self._attempt, self._entries
        while not self._free and not (step - 1) % strides[attempt]:
            self._thin()
            entries = self._entries
        entry = entries[-1] if entries else None
        if entry is not None and (step - 1) % strides[attempt] and entry.attempt == attempt:
            entry.extend(step, 1, epoch, ended, parts, loss, batch_size)
        else:
            slot = self._free.pop()
            entry = _Entry(slot, step, 1, epoch, ended, parts, loss, batch_size, attempt)
            entries.append(entry)
        self._write(entry)
        self._box.ints[27] = step  # Cell.STEPS

    def retract_first_step(self) -> None:
        """Remove the only step of this attempt. The next one takes its slot."""
        self._free.append(self._entries.pop().slot)
        self._box.ints[Cell.STEPS] = 0

    def _write(self, e: _Entry) -> None:
        self._writes = number = self._writes + 1
        at = _STEPS_AT + e.slot * _STEP_SIZE
        _pack(
            self._box.mapped, at,
            0, e.step, e.count, e.epoch, e.ended, *e.parts, e.loss, e.batch_size, e.attempt,
            number,
        )  # fmt: skip
        self._box.ints[at - _CELLS_AT >> 3] = number  # last, see layout

    def _thin(self) -> None:
        """Free slots: merge every second entry of the attempts that have the smallest stride."""
        counts = dict.fromkeys(self._strides, 0)
        for entry in self._entries:
            counts[entry.attempt] += 1
        strides = [self._strides[attempt] for attempt, count in counts.items() if count > 1]
        if not strides:  # one entry for each of very many attempts
            self._free.append(self._entries.pop(0).slot)
            return
        stride = min(strides)
        kept: list[_Entry] = []
        for entry in self._entries:
            last = kept[-1] if kept else None
            if (
                last is not None
                and last.attempt == entry.attempt
                and self._strides[entry.attempt] == stride
                and (last.step - last.count) // (2 * stride) == (entry.step - 1) // (2 * stride)
            ):
                last.extend(
                    entry.step, entry.count, entry.epoch, entry.ended, entry.parts, entry.loss,
                    entry.batch_size,
                )  # fmt: skip
                if last.slot >= 0:
                    self._write(last)
                    self._free.append(entry.slot)
            else:
                kept.append(entry)
        self._entries = kept
        for attempt, old in self._strides.items():
            if old == stride:
                self._strides[attempt] = 2 * stride


def without_merged(entries: Iterable[Steps]) -> tuple[Steps, ...]:
    """Return the entries in order, without those that a merged one covers."""
    kept: list[Steps] = []
    newest_first = sorted(entries, key=lambda s: (s.attempt, s.step, s.count), reverse=True)
    for entry in newest_first:
        later = kept[-1] if kept else None
        if (
            later is None
            or later.attempt != entry.attempt
            or entry.step <= later.step - later.count
        ):
            kept.append(entry)
    return tuple(reversed(kept))
