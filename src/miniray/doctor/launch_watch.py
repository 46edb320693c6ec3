"""Watching a run from outside: does anything move, who waits for whom, do the ranks still agree?

What is movement: a step, a batch, an event, another phase; and, in a rank that does not wait for
others, the CPU time it and its children use and the bytes they read and write. A long first step,
the preparation of data or a download are work. A rank inside of a collective is not working,
whatever its CPU does: NCCL waits by spinning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from miniray.doctor import processes, sites, stacks
from miniray.doctor.findings import is_or_are, named
from miniray.doctor.layout import Cell
from miniray.doctor.model import RankRecord
from miniray.doctor.reader import BoxReader
from miniray.doctor.waiting import wait_of
from miniray.errors import BoxError

_T = TypeVar("_T")

_MOVING = (
    Cell.EVENTS, Cell.OPEN, Cell.STEP, Cell.BATCHES, Cell.SAMPLES, Cell.PHASE, Cell.SECTION,
    Cell.BACKWARDS, Cell.BARRIER, Cell.BARRIER_PASSED,
)  # fmt: skip
_BUSY = 0.05  # of one core
_MOVED_BYTES = 4096  # in a look; the heartbeat reads some dozens of bytes
#: A second, of its children, in two looks that follow each other: what only reports to somewhere
#: every now and then is not at work.
_CHILDRENS_BYTES = 32768
#: C code may hold Python's lock, and with it the heartbeat, for this many times the limit.
_SILENT_WORK = 3


class Watched:
    """One rank, seen from outside."""

    def __init__(self, rank: int, pid: int, path: Path) -> None:
        self.rank = rank
        self.pid = pid
        self.path = path
        self._box: BoxReader | None = None
        self.moved = time.monotonic()
        self._worked = 0.0  # when it last used CPU time or did I/O without anything else to show
        self._marks: tuple[int, ...] = ()
        self._looked = 0.0
        self._cpu: float | None = None
        self._bytes: int | None = None
        self._childrens_bytes = 0
        self._children_work = False

    def look(self, limit: float) -> None:
        """Notice movement since the last look."""
        now = time.monotonic()
        ints = self.read(lambda box: box.ints)
        marks = tuple(ints[cell] for cell in _MOVING) if ints is not None else ()
        if marks != self._marks:
            self._marks = marks
            self.moved = now
        # Looking at the process costs more: only at one that does not move by itself. Several looks
        # must fit into the limit, for it takes two to see a difference.
        pause = min(1.0, limit / 8)
        if now - self.moved < pause or now - self._looked < pause:
            return
        passed, self._looked = now - self._looked, now
        process = processes.look(self.pid, processes.hostname(), None)
        below_cpu, below_bytes = process.below
        cpu, transferred = (process.cpu_seconds or 0.0) + below_cpu, process.io_bytes or 0
        used = cpu - self._cpu if self._cpu is not None else 0.0
        read = transferred - self._bytes if self._bytes is not None else 0
        children_read = below_bytes - self._childrens_bytes > _CHILDRENS_BYTES * passed
        worked = children_read and self._children_work
        self._cpu, self._bytes = cpu, transferred
        self._childrens_bytes, self._children_work = below_bytes, children_read
        busy = (used > _BUSY * passed and self._cpu_counts(limit)) or worked
        reads = read > _MOVED_BYTES and (not self.waiting or self._wraps())
        if reads or (busy and not self.waiting):
            self.moved = self._worked = now

    def read(self, part: Callable[[BoxReader], _T]) -> _T | None:
        """Return a part of the rank's record; None if it doesn't exist yet or is damaged."""
        try:
            if self._box is None:
                self._box = BoxReader(self.path)
                if self._box.info().get("pid") != self.pid:  # it belongs to an earlier attempt
                    self.close()
                    return None
            return part(self._box)
        except BoxError:
            self.close()
            return None

    def _wraps(self) -> bool:
        """Return whether it's in DDP's constructor, which loads half of torch before it waits."""
        record = self.read(BoxReader.record)
        event = record.waiting if record is not None else None
        return event is not None and event.name == "DDP.__init__"

    def _cpu_counts(self, limit: float) -> bool:
        ints = self.read(lambda box: box.ints)
        if ints is None:
            return True  # it is starting
        if ints[Cell.GPU_PROCESS_MEMORY] and ints[Cell.STEP]:
            return False  # waiting for a GPU looks like work
        silent = time.monotonic() - ints[Cell.HEARTBEAT] / 1e9
        return silent < max(5.0, _SILENT_WORK * limit)

    @property
    def waiting(self) -> bool:
        """In a collective or barrier that others have to join."""
        return bool(self.read(lambda box: box.waits))

    @property
    def working(self) -> bool:
        """Busy with something that takes long."""
        return time.monotonic() - self._worked < 3.0

    def close(self) -> None:
        if self._box is not None:
            self._box.close()
            self._box = None


class Watch:
    """All ranks of this machine."""

    def __init__(self, ranks: dict[int, int], folder: Path, limit: float) -> None:
        """``ranks`` are their process ids; ``limit`` is how long nothing may move."""
        self.limit = limit
        self.ranks = {r: Watched(r, pid, folder / f"{r}.box") for r, pid in ranks.items()}
        self._reminded = time.monotonic()

    def look(self, running: list[int]) -> None:
        for rank in running:
            self.ranks[rank].look(self.limit)

    def quiet_seconds(self, running: list[int]) -> float:
        """For how long none of the running ranks has moved."""
        last = max((self.ranks[rank].moved for rank in running), default=time.monotonic())
        return time.monotonic() - last

    def waiting(self, running: list[int]) -> list[int]:
        return [rank for rank in running if self.ranks[rank].waiting]

    def reminder(self, running: list[int]) -> str:
        """For whoever watches, once every ``limit`` seconds: others wait for a rank that is busy.

        Who it is and where, who waits in what, and the busy rank's stack: it may be work that takes
        long, or a loop without an end, and a person can tell by these.
        """
        now = time.monotonic()
        if now - self._reminded < self.limit:
            return ""
        waiting = [
            rank for rank in self.waiting(running) if now - self.ranks[rank].moved >= self.limit
        ]
        working = [rank for rank in running if rank not in waiting and self.ranks[rank].working]
        if not waiting or not working:
            return ""
        self._reminded = now
        busy = self.ranks[working[0]].read(BoxReader.record)
        doing, stack = _doing(busy) if busy is not None else ("", ())
        longest = max(now - self.ranks[rank].moved for rank in waiting)
        first = self.ranks[waiting[0]].read(BoxReader.record)
        wait = wait_of(first) if first is not None else None
        where = f" in {wait.short()}" if wait is not None else ""
        lines = [
            f"{named(working)} {is_or_are(working)} still working{doing}, alive; {named(waiting)} "
            f"{is_or_are(waiting)} waiting for {longest:.0f} s{where}"
        ]
        if stack:
            lines.append(f"stack of rank {working[0]} (innermost first):")
            lines += [f"  {line}" for line in stack]
        return "\n".join(lines)

    def close(self) -> None:
        for watched in self.ranks.values():
            watched.close()


def _doing(record: RankRecord) -> tuple[str, tuple[str, ...]]:
    """(what a rank does and at which line of the user's, its stack a line a frame)"""
    from miniray.doctor.facts import phase_words
    from miniray.doctor.render import frame_lines

    frames = stacks.main_stack(stacks.ask({record.rank: record}).get(record.rank, ()))
    begun = (record.section or record.phase).site
    site = next((frame for frame in frames if sites.is_users(frame.file)), begun)
    where = f" ({site} in {site.function})" if site.file else ""
    return f" {phase_words(record)}{where}", tuple(frame_lines(frames))


def diverged(run_dir: Path) -> bool:
    """Whether ranks have called collectives that cannot match."""
    from miniray.doctor.collectives import CALL, first_divergence
    from miniray.doctor.facts import gather
    from miniray.doctor.reader import read_run

    found = first_divergence(gather(read_run(run_dir)))
    return found is not None and found.kind == CALL
