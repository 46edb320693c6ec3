"""The driver's view of its ranks: their positions, and which of them hang.

=====================  =========================================================================
a rank raises          its call fails at once; the others, stuck in a collective, are stopped
a rank crashes         its call fails; lost connections of the others are consequences, not shown
a rank is stopped      it sends no heartbeat, and the system reports it as stopped: 2 seconds
a rank hangs           no rank moves for ``hang_timeout`` and it is idle: it is named
a rank is slow         the same, but it uses the CPU: the driver waits, up to ``timeout``
a rank skips a step    all wait, for different things: the doctor finds the rank
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
from miniray.train.lockstep.health.status import (
    EVALUATION,
    RankPosition,
    format_position,
    read_positions,
)
from miniray.train.lockstep.process_group import GroupHost

_STALE = 2.0  # seconds without a heartbeat after which the state of the process is read
_BUSY = 0.05  # of one core: less than this is waiting


class HeartbeatMonitor:
    """Reads the heartbeats of the ranks, and finds ranks that don't move."""

    def __init__(self, host: GroupHost, hang_timeout: float, run_dir: Path) -> None:
        self._host = host
        self._run_dir = run_dir
        self._limit = hang_timeout
        self._seen: dict[int, tuple[int, float]] = {}  # rank: (beat, when it was first seen)
        self._cpu: dict[int, float] = {}  # rank: CPU seconds when its heartbeats had stopped

    def read(self) -> list[RankPosition]:
        """Return the position of each rank; ``seconds`` includes the time since its heartbeat."""
        now = time.monotonic()
        found = read_positions(self._host.store, self._host.spec)
        for position in found:
            beat, since = self._seen.get(position.rank, (-1, now))
            if beat != position.beat:
                self._seen[position.rank] = (position.beat, now)
                self._cpu.pop(position.rank, None)
            else:
                position.seconds += now - since
        return found

    def read_last_positions(self) -> list[RankPosition]:
        """Return the positions with epoch and step from flight recorders on this machine.

        A heartbeat may be half a second old when its process dies.
        """
        found = self.read()
        for position in found:
            try:
                box = read_box(self._run_dir / "ranks" / f"{position.rank}.box")
            except BoxError:  # on another machine, or not begun
                continue
            before = box.notes.get("steps_before_epoch")
            if before is not None and position.phase != EVALUATION:
                position.epoch, position.step = box.epoch, box.step - before
            if self._silence(position) > _STALE:
                position.phase = box.phase.name
        return found

    def find_hung(self, pending: Collection[int], answered: float) -> Verdict | None:
        """Return which of the ranks that haven't answered hang; None if they may still answer.

        ``answered`` is the time of the last answer, by the monotonic clock. It may be newer than
        the heartbeats.
        """
        stopped = self.find_stopped(pending)
        if stopped:
            return stopped
        positions = [position for position in self.read() if position.rank in pending]
        quiet = time.monotonic() - answered
        if not positions or min(quiet, *(position.seconds for position in positions)) < self._limit:
            return None
        suspects = [position for position in positions if not position.waits]
        if not suspects:
            return self._create_verdict([], "all ranks wait for one another")
        if any(self._is_busy(position) for position in suspects):
            return None
        hanging = [position.rank for position in suspects]
        others = ", and the others wait for it" if len(hanging) < self._host.spec.world_size else ""
        return self._create_verdict(hanging, f"has not moved{others}")

    def find_stopped(self, pending: Collection[int]) -> Verdict | None:
        """Return which of the ranks that haven't answered are stopped; None if none is."""
        positions = [position for position in self.read() if position.rank in pending]
        ranks = [position.rank for position in positions if self._outside(position) == "stopped"]
        if not ranks:
            return None
        what = "is stopped (SIGSTOP), and the others wait for it"
        return self._create_verdict(ranks, what, ask_doctor=False)  # there is no more to say

    def _create_verdict(self, hanging: list[int], what: str, ask_doctor: bool = True) -> Verdict:
        """Return a verdict with the positions, and with the doctor's diagnosis if there is one."""
        positions = self.read_last_positions()
        names = ", ".join(map(str, hanging))
        word = "each of ranks" if len(hanging) > 1 else "rank"
        lines = [f"{word} {names} {what}" if hanging else what]
        lines += [
            format_position(position)
            for position in positions
            if position.rank in hanging or not hanging
        ]
        lines += [
            f"  {position.describe()}"
            for position in positions
            if hanging and position.rank not in hanging
        ]
        if ask_doctor and (self._run_dir / "ranks" / "0.box").exists():
            # Not later: it inspects living ranks, which are stopped in a moment.
            found = save_diagnosis(self._run_dir, hang_timeout=self._limit)
            lines += ["", f"The doctor, kept in {self._run_dir / 'doctor.txt'}:", "", found]
        return Verdict(hanging, "\n".join(lines))

    def _outside(self, position: RankPosition) -> str | None:
        """Return the state of a process that sends no heartbeat, as the system reports it."""
        if self._silence(position) < _STALE or position.host != socket.gethostname():
            return None
        import psutil

        try:
            process = psutil.Process(position.pid)
            if position.rank not in self._cpu:
                self._cpu[position.rank] = sum(process.cpu_times()[:2])
            return str(process.status())
        except psutil.Error:
            return None

    def _silence(self, position: RankPosition) -> float:
        return time.monotonic() - self._seen[position.rank][1]

    def _is_busy(self, position: RankPosition) -> bool:
        if self._silence(position) < _STALE:
            return position.cpu / max(position.seconds, 1e-9) > _BUSY
        import psutil

        before = self._cpu.get(position.rank)
        if before is None:
            return False
        try:
            used = sum(psutil.Process(position.pid).cpu_times()[:2]) - before
        except psutil.Error:
            return False
        return bool(used / max(self._silence(position) - _STALE, 1.0) > _BUSY)


class Verdict(NamedTuple):
    """The ranks that the others wait for, and a description with their stacks."""

    ranks: list[int]
    text: str
