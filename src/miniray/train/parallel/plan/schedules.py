"""The schedules by name: torch's class, stages per worker, their workers, the expected bubble.

======================  ==========================  ===============================================
``schedule=``           torch's class               bubble of p workers and m microbatches
======================  ==========================  ===============================================
``"gpipe"``             ``ScheduleGPipe``           (p−1) / (m+p−1)
``"1f1b"``              ``Schedule1F1B``            the same, with p microbatches in memory, not m
``"interleaved"``       ``ScheduleInterleaved1F1B`` (p−1) / (v·m+p−1) with v stages per worker
``"zero_bubble"``       ``ScheduleZBVZeroBubble``   0, if forward, input and weight gradients
                                                    take equally long and sending costs nothing
======================  ==========================  ===============================================

Papers: GPipe arXiv 1811.06965, 1F1B and interleaving arXiv 2104.04473, zero bubble 2401.10241.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Schedule:
    """One of the schedules. ``fixed`` is the number of stages per worker; None: any number."""

    name: str
    torch_class: str
    fixed: int | None
    default: int
    shape: str = "loop"

    def stages_of(self, place: int, places: int, per_worker: int) -> list[int]:
        """Return the stages of a worker, in order."""
        if self.shape == "v":  # down and up again: the first worker has the first and the last
            return [place, 2 * places - 1 - place]
        return [place + turn * places for turn in range(per_worker)]

    def holder(self, stage: int, places: int) -> int:
        """Return the place of the worker that holds ``stage``."""
        if self.shape == "v" and stage >= places:
            return 2 * places - 1 - stage
        return stage % places

    def bubble(self, places: int, microbatches: int, per_worker: int) -> float:
        """Return the expected share of time in which workers wait; see the module."""
        if self.shape == "v" or places == 1:
            return 0.0
        return (places - 1) / (per_worker * microbatches + places - 1)

    def in_flight(self, place: int, places: int, microbatches: int, per_worker: int) -> int:
        """Return for how many microbatches, counted per stage, a worker keeps activations."""
        if self.name == "gpipe":
            return microbatches
        if self.name == "1f1b":
            return min(microbatches, places - place)
        if self.shape == "v":
            return min(2 * microbatches, 2 * places)
        warm_up = (places - place - 1) * 2 + (per_worker - 1) * places
        return min(per_worker * microbatches, warm_up + 1)

    def problem(self, places: int, microbatches: int) -> str | None:
        """Return why a number of microbatches isn't possible, or None if it is."""
        if self.name == "1f1b" and microbatches < places:
            return (
                f'schedule="1f1b" needs at least as many microbatches as stages: {places}, not '
                f'{microbatches}; or use schedule="gpipe"'
            )
        if self.name == "interleaved":
            rounds = max(1, microbatches // places)
            if microbatches % rounds:
                below = microbatches // places * places
                return (
                    f'schedule="interleaved" needs microbatches that are a multiple of the '
                    f"{places} workers: {below} or {below + places}, not {microbatches}"
                )
        return None

    def make(self, stages: list[Any], microbatches: int, loss: Any, usual: bool) -> Any:
        """Return torch's schedule of this worker's stages.

        If the batch doesn't have its ``usual`` size, return a plain schedule: such a batch can have
        fewer microbatches, and most schedules need a certain number.
        """
        from torch.distributed.pipelining import schedules

        several = self.default > 1
        plain = "ScheduleLoopedBFS" if several else "ScheduleGPipe"
        kind = getattr(schedules, self.torch_class if usual or self.shape == "v" else plain)
        return kind(stages if several else stages[0], microbatches, loss_fn=loss)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "ScheduleGPipe", 1, 1),
        Schedule("1f1b", "Schedule1F1B", 1, 1),
        Schedule("interleaved", "ScheduleInterleaved1F1B", None, 2),
        Schedule("zero_bubble", "ScheduleZBVZeroBubble", 2, 2, "v"),
    )
}


def divisor_up_to(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is at most ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
