"""``barrier(name, timeout)``: a barrier that says who is missing and where they are.

No server and no message: a rank that comes writes so into its own box and watches the boxes of the
others. So it works before and without torch.distributed, and it cannot be blind towards any rank,
rank 0 included. When a rank gives up it writes that too, and everybody else gives up at once, so
that every rank raises within moments of the first.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from miniray.doctor import model, processes, recorder, sites, stacks
from miniray.doctor.layout import Cell, Real
from miniray.doctor.model import RankRecord
from miniray.doctor.reader import BoxReader
from miniray.doctor.recorder import Recorder
from miniray.doctor.verdict import save_diagnosis
from miniray.errors import BarrierTimeoutError, BoxError, MinirayError

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
        peers: dict[int, BoxReader] = {}
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
            for peer in peers.values():
                peer.close()

    def _update(self, missing: set[int], peers: dict[int, BoxReader]) -> None:
        for rank in list(missing):
            if rank not in peers:
                try:
                    peers[rank] = BoxReader(self._path(rank))
                except BoxError:  # it has not started yet
                    continue
            if peers[rank].ints[Cell.BARRIER] >> 16 >= self.number:
                missing.discard(rank)

    def _trouble(self, others: list[int], missing: set[int], peers: dict[int, BoxReader]) -> str:
        """Why waiting is in vain; "" while it is not."""
        for rank in others:
            peer = peers.get(rank)
            if peer is None:
                continue
            cell = peer.ints[Cell.BARRIER]
            if cell >> 16 == self.number:
                there = peer.text(cell & 0xFFFF).partition("\0")[0]
                if there not in (self.name, "?"):  # "?": a copy of a box whose texts follow
                    return f"rank {rank} is at barrier {there!r} instead"
            if peer.ints[Cell.BARRIER_FAILED] == self.number:
                return f"rank {rank} gave up"
        if missing and time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + _LOOK_SECONDS
            for rank in sorted(missing & peers.keys()):
                if self._has_ended(peers[rank]):
                    # It may have come and gone between our two looks.
                    if peers[rank].ints[Cell.BARRIER] >> 16 >= self.number:
                        continue
                    if not self._was_replaced(rank, peers):
                        return f"rank {rank} has ended"
        return ""

    def _has_ended(self, peer: BoxReader) -> bool:
        if peer.ints[Cell.EXITED]:
            return True
        info = peer.info()
        process = processes.look(info.get("pid", 0), info.get("host", ""), info.get("started"))
        return process.alive is False

    def _was_replaced(self, rank: int, peers: dict[int, BoxReader]) -> bool:
        """A box from an attempt before this one is not the rank's own: look at the new one."""
        if peers[rank].info().get("attempt", 0) >= self.current.info.get("attempt", 0):
            return False
        peers.pop(rank).close()
        return True

    def _path(self, rank: int) -> Path:
        return self.current.box.path.parent / f"{rank}.box"

    # -- giving up --------------------------------------------------------------------------------

    def _give_up(self, missing: set[int], peers: dict[int, BoxReader], trouble: str) -> None:
        waited = time.monotonic() - self.began
        elsewhere = {
            rank
            for rank, peer in peers.items()
            if peer.ints[Cell.BARRIER] >> 16 == self.number
            and peer.text(peer.ints[Cell.BARRIER] & 0xFFFF).partition("\0")[0] != self.name
        }
        absent = tuple(sorted(missing | elsewhere))
        kept = self._diagnose(absent, peers, waited)
        # So that the others need not wait for their own limits.
        self.current.box.ints[Cell.BARRIER_FAILED] = self.number
        records = {rank: peers[rank].record() for rank in absent if rank in peers}
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
            lines += _describe(rank, records.get(rank), found.get(rank, ()), rank in elsewhere)
        if kept:
            lines.append(f"  the whole diagnosis: {self.current.run_dir / 'doctor.txt'}")
        raise BarrierTimeoutError("\n".join(lines), self.name, absent)

    def _diagnose(
        self, absent: tuple[int, ...], peers: dict[int, BoxReader], waited: float
    ) -> bool:
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
            peer = peers.get(first)
            if (
                peer is None
                or peer.ints[Cell.BARRIER_FAILED] == self.number
                or peer.ints[Cell.EXITED]
            ):
                break
            time.sleep(_LONGEST_WAIT)
        return (self.current.run_dir / "doctor.txt").exists()


def _describe(
    rank: int,
    record: RankRecord | None,
    stack: tuple[model.ThreadStack, ...],
    at_another: bool,
) -> list[str]:
    """Some lines on a missing rank: state, what it did last, its stack."""
    if record is None:
        return [f"  rank {rank}: never started (it has no box in the run directory)"]
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
        return f"{how.get(record.exit.kind, 'ended')}, after step {record.step}"
    if record.process.stopped:
        return f"stopped by a signal, at step {record.step}"
    where = record.waiting.describe() if record.waiting else record.phase.name
    since = record.waiting.at if record.waiting else record.phase.since
    section = f"{record.section.name}, " if record.section else ""
    text = f"alive, {section}in {where} for {now - since:.1f} s, step {record.step}"
    quiet = record.heartbeat_age(now)
    if quiet > 3 * record.heartbeat_interval + 1:
        text += f", no heartbeat for {quiet:.0f} s (C code holds Python's lock?)"
    return text
