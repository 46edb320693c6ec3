"""Checks that look for one kind of trouble each, in a run that is stuck, over, or doing well.

A check is a function from a ``Case`` to findings. It must be silent about a healthy run:
what is only unusual is a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from miniray.doctor.checks import bars, data, losses, memory, models, speed, world
from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding

Check = Callable[[Case], Iterator[Finding]]

ALL: tuple[Check, ...] = (
    world.check,
    models.check,
    losses.check,
    data.check,
    speed.check,
    memory.check,
    bars.check,
)
