"""The GPUs and identity of this machine, and how its cores and GPUs are assigned.

Needs neither torch nor psutil. See ``miniray.limits`` for cores and memory.
"""

from __future__ import annotations

import dataclasses
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any

from miniray import limits
from miniray.errors import ActorUnschedulableError

_NVIDIA = Path("/proc/driver/nvidia/gpus")
#: Shares are decimal fractions (0.1 + 0.2), so sums are compared with room for rounding.
_EPSILON = 1e-6


def gpu_ids() -> list[str]:
    """The GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` names them.

    Without that variable: one for each card the NVIDIA driver lists, counted from 0. No CUDA
    context is made, which would cost seconds and memory and could not survive a fork.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            return [str(i) for i in range(len(list(_NVIDIA.iterdir())))]
        except OSError:  # no driver
            return []
    ids = []
    for part in (part.strip() for part in visible.split(",")):
        if not part or part == "-1" or part == "NoDevFiles":
            break  # CUDA, too, ignores what comes after an invalid entry
        ids.append(part)
    return ids


def node(resources: dict[str, float]) -> dict[str, Any]:
    """This machine as ``miniray.nodes`` lists it."""
    return {
        "NodeID": node_id(),
        "Alive": True,
        "NodeManagerHostname": socket.gethostname(),
        "Resources": resources,
    }


@lru_cache(maxsize=1)
def node_id() -> str:
    """A name for this machine as 56 hex digits, the same in all processes until it reboots.

    A hash, since the machine's own id is not meant to be shown around.
    """
    import hashlib  # here: it takes milliseconds to load

    boot = _read(Path("/proc/sys/kernel/random/boot_id"))
    machine = _read(Path("/etc/machine-id"))
    return hashlib.sha224(f"{machine}|{boot}|{socket.gethostname()}".encode()).hexdigest()


def _read(path: Path) -> str:
    """Return the file's text; empty if it can't be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


@dataclasses.dataclass(frozen=True)
class Grant:
    """What was given out: CPUs, and a share of each of some GPUs (by index)."""

    cpus: float = 0.0
    gpus: tuple[int, ...] = ()
    share: float = 0.0


class Resources:
    """CPUs and GPUs, counted. Not thread-safe: the engine locks.

    A request either fits what is free now, or what there is in total, or can never be met; the
    engine decides what to do in each case. GPUs are handed out by index: whole ones where a whole
    number was asked for, a share of a single one for a fraction, as in Ray.
    """

    def __init__(self, cpus: float, gpus: int) -> None:
        self.cpus = float(cpus)
        self.gpus = gpus
        self.free_cpus = float(cpus)
        self._free_gpus = [1.0] * gpus

    @property
    def free_gpus(self) -> float:
        return _tidy(sum(self._free_gpus))

    def total(self) -> dict[str, float]:
        return self._told(self.cpus, self.gpus)

    def available(self, used: float = 0.0) -> dict[str, float]:
        """What is free, with ``used`` CPUs in use that nobody has taken."""
        return self._told(max(0.0, self.free_cpus - used), self.free_gpus)

    def _told(self, cpus: float, gpus: float) -> dict[str, float]:
        told = {"CPU": float(cpus), "memory": float(limits.memory_total())}
        # As in Ray, where what a machine does not have is not mentioned.
        return {**told, "GPU": float(gpus)} if self.gpus else told

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
