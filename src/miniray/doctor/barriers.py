"""``barrier(name, timeout)``: a barrier that says who is missing and where they are.

No server and no message: a rank that comes writes so into its own box and watches the boxes of the
others. So it works before and without torch.distributed, and it cannot be blind towards any rank,
rank 0 included. When a rank gives up it writes that too, and everybody else gives up at once, so
that every rank raises within moments of the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from miniray.doctor import model, recorder, sites, stacks
from miniray.doctor.layout import Cell, Real
from miniray.doctor.model import RankRecord
from miniray.doctor.reader import BoxReader
from miniray.doctor.recorder import Recorder
from miniray.doctor.verdict import save_diagnosis
from miniray.errors import BarrierTimeoutError, BoxError, MinirayError

_T = TypeVar("_T")

_SHORTEST_WAIT, _LONGEST_WAIT = 0.0001, 0.02
_LOOK_SECONDS = 0.25  # how often the others' processes are looked at
_STACK_FRAMES = 8
_DIAGNOSIS_SECONDS = 6.0


def barrier(name: str, timeout: float = 60.0) -> None:
    """Wait until every rank of the run has called ``barrier`` with this name.

    Raises ``BarrierTimeoutError``, on every rank that is here, when ``timeout`` seconds have passed
    since this rank came; at once when a missing rank has ended, is at a barrier of another name, or
    another rank gave up. The error names the missing ranks and shows where each of them is. A rank
    that comes after the others gave up raises it, too. ``MinirayError`` where this process records
    no run: call ``miniray.doctor.attach()`` first.
    """
    current = recorder.current()
    if current is None:
        raise MinirayError(
            f"barrier {name!r}: this process records no run; call miniray.doctor.attach() first"
        )
    if timeout <= 0:
        raise ValueError(f"a barrier's time limit must be more than 0 seconds: {timeout}")
    site = sites.call_site(sys._getframe(1))
    _Attempt(current, name, timeout, site).run()


class _Attempt:
    """One rank at one barrier."""

    def __init__(self, current: Recorder, name: str, timeout: float, site: str) -> None:
        self.current = current
        self.name = name
        self.timeout = timeout
        self.place = current.box.intern(f"{name}\0{site}")
        self.site = site
        current.barriers += 1
        self.number = current.barriers
        self.began = time.monotonic()
        self.next_look = 0.0

    def run(self) -> None:
        current, box = self.current, self.current.box
        what = box.what(model.BARRIER, self.name, site=self.site, blocking=True)
        event = box.event(what, self.number - 1, True, True)
        box.ints[Cell.BARRIER_SINCE] = time.monotonic_ns()
        box.floats[Real.BARRIER_LIMIT] = self.timeout
        box.ints[Cell.BARRIER] = self.number << 16 | self.place
        try:
            self._wait()
            box.ints[Cell.BARRIER_PASSED] = self.number
        except BaseException:
            box.ints[Cell.BARRIER_FAILED] = self.number
            raise
        finally:
            now = time.monotonic_ns()
            current.collective_ns += now - int(self.began * 1e9)
            box.end_event(event, now)

    def _wait(self) -> None:
        others = [rank for rank in range(self.current.world_size) if rank != self.current.rank]
        missing = set(others)
        peers = _Peers(self.current.box.path.parent)
        pause = _SHORTEST_WAIT
        try:
            while True:
                self._update(missing, peers)
                trouble = self._trouble(others, missing, peers)
                if not missing and not trouble:
                    return
                if trouble or time.monotonic() - self.began > self.timeout:
                    self._give_up(missing, peers, trouble)
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_WAIT)
        finally:
            peers.close()

    def _update(self, missing: set[int], peers: _Peers) -> None:
        for rank in list(missing):
            if peers.barrier(rank)[0] >= self.number:
                missing.discard(rank)

    def _trouble(self, others: list[int], missing: set[int], peers: _Peers) -> str:
        """Return why waiting is useless; "" if it isn't."""
        for rank in others:
            number, name = peers.barrier(rank)
            # "?": a copy of a record that doesn't have its texts yet
            if number == self.number and name not in (self.name, "?"):
                return f"rank {rank} is at barrier {name!r} instead"
            if peers.failed(rank) == self.number:
                return f"rank {rank} gave up"
        if missing and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + _LOOK_SECONDS
            for rank in sorted(missing):
                if peers.has_ended(rank):
                    # It may have reached the barrier and ended since the last look.
                    if peers.barrier(rank)[0] >= self.number:
                        continue
                    if not peers.reopen_if_older(rank, self.current.info.get("attempt", 0)):
                        return f"rank {rank} has ended"
        return ""

    # -- giving up --------------------------------------------------------------------------------

    def _give_up(self, missing: set[int], peers: _Peers, trouble: str) -> None:
        waited = time.monotonic() - self.began
        elsewhere = set()
        for rank in range(self.current.world_size):
            number, name = peers.barrier(rank) if rank != self.current.rank else (0, "")
            if number == self.number and name != self.name:
                elsewhere.add(rank)
        absent = tuple(sorted(missing | elsewhere))
        kept = self._diagnose(absent, peers, waited)
        # So that the others need not wait for their own limits.
        self.current.box.ints[Cell.BARRIER_FAILED] = self.number
        read = {rank: peers.read(rank, BoxReader.record) for rank in absent}
        records = {rank: record for rank, record in read.items() if record is not None}
        found = stacks.ask(records)
        size = self.current.world_size
        if absent:
            are = "is" if len(absent) == 1 else "are"
            head = f"{len(absent)} of {size} ranks {are} missing after {waited:.1f} s"
        else:
            head = f"all {size} ranks came, this one too late"
        if trouble:
            head += f" ({trouble})"
        lines = [f"barrier {self.name!r} did not complete: {head}"]
        lines.append(f"  this is rank {self.current.rank}, at {model.site_from(self.site)}")
        for rank in absent:
            if rank in records:
                lines += _describe(rank, records[rank], found.get(rank, ()), rank in elsewhere)
            else:
                why = peers.problems.get(rank, "never started (it has no box in the run directory)")
                lines.append(f"  rank {rank}: {why}")
        if kept:
            lines.append(f"  the whole diagnosis: {self.current.run_dir / 'doctor.txt'}")
        raise BarrierTimeoutError("\n".join(lines), self.name, absent, rank=self.current.rank)

    def _diagnose(self, absent: tuple[int, ...], peers: _Peers, waited: float) -> bool:
        """Have the run diagnosed while all are still here; whether there is a diagnosis now.

        The first of those that are here does it, and the others stay until it is done. A launcher
        that watches does it by itself.
        """
        if self.current.info.get("launcher") == "miniray run":
            return False
        first = min(rank for rank in range(self.current.world_size) if rank not in absent)
        if first == self.current.rank:
            save_diagnosis(self.current.run_dir, max(0.1, waited / 2))
            return True
        self.current.box.ints[Cell.BARRIER_FAILED] = self.number  # it hears of it by this
        deadline = time.monotonic() + _DIAGNOSIS_SECONDS
        while time.monotonic() < deadline:
            ints = peers.read(first, lambda box: box.ints)
            if ints is None or ints[Cell.BARRIER_FAILED] == self.number or ints[Cell.EXITED]:
                break
            time.sleep(_LONGEST_WAIT)
        return (self.current.run_dir / "doctor.txt").exists()


class _Peers:
    """The records of the other ranks. Each is opened when it exists."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, BoxReader] = {}
        self.problems: dict[int, str] = {}  #: why an existing record can't be read, by rank

    def read(self, rank: int, part: Callable[[BoxReader], _T]) -> _T | None:
        """Return a part of a record; None if the record doesn't exist or is damaged."""
        path = self._folder / f"{rank}.box"
        try:
            if rank not in self._open:
                self._open[rank] = BoxReader(path)
            found = part(self._open[rank])
        except BoxError as error:
            self._drop(rank)
            if path.exists():
                self.problems[rank] = str(error)
            return None
        self.problems.pop(rank, None)
        return found

    def barrier(self, rank: int) -> tuple[int, str]:
        """Return the number and name of the last barrier that the rank has reached."""
        return self.read(rank, _last_barrier) or (0, "")

    def failed(self, rank: int) -> int:
        """Return the number of the last barrier that the rank gave up."""
        return self.read(rank, lambda box: box.ints[Cell.BARRIER_FAILED]) or 0

    def has_ended(self, rank: int) -> bool:
        return bool(self.read(rank, _has_ended))

    def reopen_if_older(self, rank: int, attempt: int) -> bool:
        """Return whether the record belongs to an earlier attempt. If so, open the new one."""
        info = self.read(rank, BoxReader.info)
        if info is None or info.get("attempt", 0) >= attempt:
            return False
        self._drop(rank)
        return True

    def _drop(self, rank: int) -> None:
        if rank in self._open:
            self._open.pop(rank).close()

    def close(self) -> None:
        for rank in list(self._open):
            self._drop(rank)


def _last_barrier(box: BoxReader) -> tuple[int, str]:
    cell = box.ints[Cell.BARRIER]
    return (cell >> 16, box.text(cell & 0xFFFF).partition("\0")[0]) if cell > 0 else (0, "")


def _has_ended(box: BoxReader) -> bool:
    return bool(box.ints[Cell.EXITED]) or box.process().alive is False


def _describe(
    rank: int,
    record: RankRecord,
    stack: tuple[model.ThreadStack, ...],
    at_another: bool,
) -> list[str]:
    """Describe a missing rank: its state, its last event and its stack."""
    now = time.time()
    lines = [f"  rank {rank} (pid {record.pid} on {record.host}): {_state(record, now)}"]
    if at_another and record.barrier is not None:
        lines.append(f"    is at barrier {record.barrier.name!r} at {record.barrier.site}")
    if record.exit is not None and record.exit.type:
        lines.append(f"    {record.exit.type}: {record.exit.message} at {record.exit.site}")
    if record.last_event is not None:
        last = next((e for e in reversed(record.events) if e.kind != model.EXIT), record.last_event)
        lines.append(f"    last: {last.kind} {last.describe()}, {now - last.at:.1f} s ago")
    frames = stacks.main_stack(stack)
    if frames:
        lines.append("    stack, innermost first:")
        shown = frames[:_STACK_FRAMES]
        lines += [f"      {site.file}:{site.line} in {site.function}" for site in shown]
        if len(frames) > _STACK_FRAMES:
            lines.append(f"      … {len(frames) - _STACK_FRAMES} more")
    return lines


def _state(record: RankRecord, now: float) -> str:
    if record.exit is not None:
        how = {"finished": "finished", "gone": "is gone", "exception": "raised"}
        return f"{how.get(record.exit.kind, 'ended')}, after step {record.global_step}"
    if record.process.stopped:
        return f"stopped by a signal, at step {record.global_step}"
    where = record.waiting.describe() if record.waiting else record.phase.name
    since = record.waiting.at if record.waiting else record.phase.since
    section = f"{record.section.name}, " if record.section else ""
    text = f"alive, {section}in {where} for {now - since:.1f} s, step {record.global_step}"
    quiet = record.heartbeat_age(now)
    if quiet > 3 * record.heartbeat_interval + 1:
        text += f", no heartbeat for {quiet:.0f} s (C code holds Python's lock?)"
    return text
