"""Counting CPUs and GPUs: who holds how much, and which GPUs.

A request either fits what is free now, or what there is in total, or can never be met; the engine
decides what to do in each case. GPUs are handed out by index: whole ones where a whole number was
asked for, a share of a single one for a fraction, as in Ray. Not thread-safe: the engine locks.
"""

from __future__ import annotations

import dataclasses

from miniray.errors import ActorUnschedulableError

#: Shares are decimal fractions (0.1 + 0.2), so sums are compared with room for rounding.
_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Grant:
    """What was given out: CPUs, and a share of each of some GPUs (by index)."""

    cpus: float = 0.0
    gpus: tuple[int, ...] = ()
    share: float = 0.0


class Resources:
    """The resources of one machine."""

    def __init__(self, cpus: float, gpus: int) -> None:
        self.cpus = float(cpus)
        self.gpus = gpus
        self.free_cpus = float(cpus)
        self._free_gpus = [1.0] * gpus

    @property
    def free_gpus(self) -> float:
        return _tidy(sum(self._free_gpus))

    def check(self, what: str, cpus: float, gpus: float) -> None:
        """Raise ``ActorUnschedulableError`` where waiting could not help."""
        if cpus > self.cpus + _EPSILON or gpus > self.gpus + _EPSILON:
            raise ActorUnschedulableError(
                f"{what} asks for {_say(cpus, gpus)}, "
                f"but this machine has {_say(self.cpus, self.gpus)} in total"
            )

    def take(self, cpus: float, gpus: float) -> Grant | None:
        """What was asked for, or None where not enough is free now."""
        if cpus > self.free_cpus + _EPSILON:
            return None
        share = gpus if gpus < 1 else 1.0
        wanted = 0 if gpus == 0 else max(1, round(gpus))
        # Fullest first: fractions share a GPU before they open a new one.
        order = sorted(range(self.gpus), key=lambda i: (self._free_gpus[i], i))
        chosen = tuple(i for i in order if self._free_gpus[i] >= share - _EPSILON)[:wanted]
        if len(chosen) < wanted:
            return None
        self.free_cpus = _tidy(self.free_cpus - cpus)
        for i in chosen:
            self._free_gpus[i] = _tidy(self._free_gpus[i] - share)
        return Grant(cpus, tuple(sorted(chosen)), share)

    def give_back(self, grant: Grant) -> None:
        self.free_cpus = _tidy(self.free_cpus + grant.cpus)
        for i in grant.gpus:
            self._free_gpus[i] = _tidy(self._free_gpus[i] + grant.share)


def _tidy(amount: float) -> float:
    """Without the dust of decimal fractions, so that all back is exactly all."""
    return round(amount, 6)


def _say(cpus: float, gpus: float) -> str:
    return f"{cpus:g} CPU{'' if cpus == 1 else 's'} and {gpus:g} GPU{'' if gpus == 1 else 's'}"
