"""What the inline engine has, and which part of it living actors hold."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable

from miniray.core import machine
from miniray.core.engine import InitConfig
from miniray.core.inline.call import Frame
from miniray.core.machine import Grant, Resources
from miniray.errors import ActorUnschedulableError


class Ledger:
    """CPUs and GPUs of this machine. Requests that do not fit now are refused, not queued."""

    def __init__(self, config: InitConfig) -> None:
        found = machine.gpu_ids()
        gpus = len(found) if config.num_gpus is None else int(config.num_gpus)
        self._gpu_names = found[:gpus] if gpus <= len(found) else [str(i) for i in range(gpus)]
        self._resources = Resources(config.num_cpus or machine.cpu_count(), gpus)
        self._lock = threading.Lock()
        #: Grants of what has ended. Filled by finalizers, which must not take a lock.
        self.given_back: collections.deque[Grant] = collections.deque()

    def for_actor(self, what: str, cpus: float, gpus: float) -> Grant:
        with self._lock:
            return self._take(what, cpus, gpus, lent=0.0)

    def for_task(self, what: str, cpus: float, gpus: float, caller: Frame | None) -> Grant:
        """GPUs for a task. Its CPUs must be free but are not taken.

        A caller waiting for a call lends its CPUs, as in Ray, or tasks would need as many CPUs as
        they are nested deep. Since only the innermost call runs, tasks never hold any here; an
        actor's method lends what its actor holds.
        """
        lent = caller.cpus if caller is not None and caller.actor is not None else 0.0
        with self._lock:
            grant = self._take(what, cpus, gpus, lent)
            self._resources.give_back(Grant(cpus=grant.cpus))
        return Grant(0.0, grant.gpus, grant.share)

    def _take(self, what: str, cpus: float, gpus: float, lent: float) -> Grant:
        self._settle()
        self._resources.check(what, cpus, gpus)
        grant = self._resources.take(max(0.0, cpus - lent), gpus)
        if grant is None:
            raise ActorUnschedulableError(
                f"{what} asks for {cpus:g} CPUs and {gpus:g} GPUs, but only "
                f"{self._resources.free_cpus:g} and {self._resources.free_gpus:g} are not held by "
                "actors. The inline engine runs a call at once and cannot wait for them to end; "
                "the other engines can"
            )
        return grant

    def _settle(self) -> None:
        while self.given_back:
            self._resources.give_back(self.given_back.popleft())

    def total(self) -> dict[str, float]:
        return self._told(self._resources.cpus, self._resources.gpus)

    def available(self, running: Frame | None) -> dict[str, float]:
        """What is free while ``running``, if it is a task, uses its CPUs."""
        used = running.cpus if running is not None and running.actor is None else 0.0
        with self._lock:
            self._settle()
            free = max(0.0, self._resources.free_cpus - used)
            return self._told(free, self._resources.free_gpus)

    def _told(self, cpus: float, gpus: float) -> dict[str, float]:
        told = {"CPU": float(cpus), "memory": float(machine.memory_total())}
        # As in Ray, where what a machine does not have is not mentioned.
        return {**told, "GPU": float(gpus)} if self._resources.gpus else told

    def cuda_visible_devices(self, grant: Grant) -> str | None:
        return ",".join(self._gpu_names[i] for i in grant.gpus) if grant.gpus else None

    def gpu_ids(self, running: Frame | None) -> list[int]:
        """GPUs of the running call (all of them for the driver), by number where they have one."""
        mine: Iterable[int] = range(self._resources.gpus) if running is None else running.gpus
        names = [(i, self._gpu_names[i]) for i in mine]
        return [int(name) if name.isdigit() else i for i, name in names]
