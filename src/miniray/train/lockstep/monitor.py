"""The driver's look at its ranks: who hangs, whose failure is the cause, how far they are.

Who notices what:

=====================  =========================================================================
a rank raises          its call fails at once; the others are stuck in a collective and are ended
a rank dies            its call fails; the others' lost connections are consequences and not shown
a rank is stopped      no pulse comes from it, and the system says it is stopped: 2 seconds
a rank hangs           nobody moves for ``hang_timeout`` and it is idle: it is named with its stack
a rank is slow         the same but it uses the CPU: it is waited for, up to the group's ``timeout``
a rank skips a step    all wait, for different things: the doctor finds out which rank it was
=====================  =========================================================================
"""

from __future__ import annotations

import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from miniray.doctor.reader import read_box
from miniray.doctor.verdict import save_diagnosis
from miniray.errors import BoxError
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.lockstep.status import EVALUATION, Place, read_places, tell

_STALE = 2.0  # seconds without a pulse after which the system is asked what the process does
_BUSY = 0.05  # of one core: less than this is waiting


class Watch:
    """Reads the pulses of a group's ranks. ``hung`` says who has stopped moving, and where."""

    def __init__(self, host: GroupHost, hang_timeout: float, run_dir: Path) -> None:
        self._host = host
        self._run_dir = run_dir
        self._limit = hang_timeout
        self._seen: dict[int, tuple[int, float]] = {}  # rank: (beat, when it was first seen)
        self._cpu: dict[int, float] = {}  # rank: CPU seconds when its pulse had just stopped

    def places(self) -> list[Place]:
        """Where each rank is; time without a pulse is added to what it said last."""
        now = time.monotonic()
        found = read_places(self._host.store, self._host.spec)
        for place in found:
            beat, since = self._seen.get(place.rank, (-1, now))
            if beat != place.beat:
                self._seen[place.rank] = (place.beat, now)
                self._cpu.pop(place.rank, None)
            else:
                place.seconds += now - since
        return found

    def last_places(self) -> list[Place]:
        """``places`` with the last epoch and step from the ranks' black boxes, where they are here.

        A pulse may be half a second old when its process dies.
        """
        found = self.places()
        for place in found:
            try:
                box = read_box(self._run_dir / "ranks" / f"{place.rank}.box")
            except BoxError:  # on another machine, or not begun
                continue
            before = box.notes.get("steps_before_epoch")
            if before is not None and place.phase != EVALUATION:
                place.epoch, place.step = box.epoch, box.step - before
            if self._silence(place) > _STALE:
                place.phase = box.phase.name
        return found

    def hung(self, pending: Collection[int], answered: float) -> Verdict | None:
        """Who it is, if the ranks that have not answered are not going to; else None.

        ``answered`` is when the last of the others did (of the monotonic clock): its word is newer
        than a pulse.
        """
        stopped = self.stopped(pending)
        if stopped:
            return stopped
        places = [place for place in self.places() if place.rank in pending]
        quiet = time.monotonic() - answered
        if not places or min(quiet, *(place.seconds for place in places)) < self._limit:
            return None
        suspects = [place for place in places if not place.waits]
        if not suspects:
            return self._verdict([], "all ranks wait for one another")
        if any(self._is_busy(place) for place in suspects):
            return None
        guilty = [place.rank for place in suspects]
        others = ", and the others wait for it" if len(guilty) < self._host.spec.world_size else ""
        return self._verdict(guilty, f"has not moved{others}")

    def stopped(self, pending: Collection[int]) -> Verdict | None:
        """Who has not answered because it is stopped; None where nobody is."""
        places = [place for place in self.places() if place.rank in pending]
        ranks = [place.rank for place in places if self._outside(place) == "stopped"]
        if not ranks:
            return None
        what = "is stopped (SIGSTOP), and the others wait for it"
        return self._verdict(ranks, what, ask_doctor=False)  # there is no more to say

    def _verdict(self, guilty: list[int], what: str, ask_doctor: bool = True) -> Verdict:
        """The story as the pulses tell it; and as the doctor does, where the ranks have boxes."""
        places = self.last_places()
        names = ", ".join(map(str, guilty))
        word = "each of ranks" if len(guilty) > 1 else "rank"
        lines = [f"{word} {names} {what}" if guilty else what]
        lines += [tell(place) for place in places if place.rank in guilty or not guilty]
        lines += [
            f"  {place.describe()}" for place in places if guilty and place.rank not in guilty
        ]
        if ask_doctor and (self._run_dir / "ranks" / "0.box").exists():
            # Now: it looks at living ranks, and they are ended in a moment.
            found = save_diagnosis(self._run_dir, hang_timeout=self._limit)
            lines += ["", f"The doctor, kept in {self._run_dir / 'doctor.txt'}:", "", found]
        return Verdict(guilty, "\n".join(lines))

    def _outside(self, place: Place) -> str | None:
        """The state of a process that gives no pulse, as the system sees it."""
        if self._silence(place) < _STALE or place.host != socket.gethostname():
            return None
        import psutil

        try:
            process = psutil.Process(place.pid)
            if place.rank not in self._cpu:
                self._cpu[place.rank] = sum(process.cpu_times()[:2])
            return str(process.status())
        except psutil.Error:
            return None

    def _silence(self, place: Place) -> float:
        return time.monotonic() - self._seen[place.rank][1]

    def _is_busy(self, place: Place) -> bool:
        if self._silence(place) < _STALE:
            return place.cpu / max(place.seconds, 1e-9) > _BUSY
        import psutil

        before = self._cpu.get(place.rank)
        if before is None:
            return False
        try:
            used = sum(psutil.Process(place.pid).cpu_times()[:2]) - before
        except psutil.Error:
            return False
        return bool(used / max(self._silence(place) - _STALE, 1.0) > _BUSY)


class Verdict(NamedTuple):
    """The ranks that hold up the others, and the story with their stacks."""

    ranks: list[int]
    text: str
