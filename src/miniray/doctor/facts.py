"""What each rank is doing, worked out from its record: the ground the doctor reasons on.

``gather`` makes a ``Case`` from one or two readings of a run. Two readings, a moment apart, tell
what one cannot: who uses the CPU, who reads or writes, whose record moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property

from miniray.counting import format_epoch
from miniray.doctor.findings import seconds
from miniray.doctor.model import COLLECTIVE, DESTROY, Exit, RankRecord, RunRecord, Site, ThreadStack
from miniray.doctor.sites import is_users
from miniray.doctor.stacks import main_stack
from miniray.doctor.waiting import (
    Wait,
    cpu_share,
    has_moved,
    is_busy,
    is_consequence,
    prepares,
    wait_of,
)

#: Seconds without a sign of life, on top of its own interval, after which a heartbeat is missed.
_HEARTBEAT_SLACK = 2.5

#: Where the main thread is after the script's last line: it waits for threads and processes.
_AT_EXIT = ("_shutdown", "_exit_function", "_python_exit")

#: Share of a core that a rank uses which is not asleep.
_BUSY = 0.2


@dataclasses.dataclass(frozen=True)
class Facts:
    """One rank: its record and what follows from it at the time of reading."""

    record: RankRecord
    now: float
    wait: Wait | None
    cpu: float | None  #: share of one core between the two readings, its children's too
    busy: bool  #: its main thread wanted the CPU in both, whether it got it or not
    moved: bool  #: its record changed, or it read or wrote, between the two readings
    threads: tuple[ThreadStack, ...]  #: as it showed them when it was asked
    consequence: bool  #: it ended because of another rank

    @property
    def rank(self) -> int:
        return self.record.rank

    @property
    def ended(self) -> bool:
        return not self.record.alive

    @property
    def finished(self) -> bool:
        """It is through with its script; its process may still be there."""
        ended = self.record.exit
        if ended is not None:
            return not ended.failed
        last = self.stack[-1] if self.stack else None
        at_end = last is not None and last.function in _AT_EXIT and not is_users(last.file)
        return self.record.phase.name == "exit" or at_end

    @property
    def failed(self) -> bool:
        """It ended, not well, and on its own account."""
        ended = self.record.exit
        return ended is not None and ended.failed and not self.consequence

    @property
    def end(self) -> Exit:
        """How it ended; of one that has."""
        assert self.record.exit is not None
        return self.record.exit

    @property
    def waits_in(self) -> Wait:
        """Of one that waits."""
        assert self.wait is not None
        return self.wait

    @property
    def wait_name(self) -> str:
        """ "" for one that does not wait."""
        return self.wait.name if self.wait is not None else ""

    @property
    def has_process_group(self) -> bool:
        """Whether it has a process group and isn't destroying it."""
        record = self.record
        destroying = any(event.name == DESTROY for event in record.open_events)
        return record.initialised and not destroying

    @cached_property
    def last_move(self) -> float:
        """When its main thread last did anything that is recorded."""
        record = self.record
        times = [record.attached, record.phase.since]
        if record.section is not None:
            times.append(record.section.since)
        if record.steps:
            times.append(record.steps[-1].ended)
        times += [e.at if e.ended is None else e.ended for e in record.events[-8:]]
        return max(times)

    @property
    def until(self) -> float:
        """Now, or when it ended: a dead run reads the same on the next day."""
        ended = self.record.exit
        return ended.at if ended is not None and ended.at else self.now

    @property
    def idle(self) -> float:
        """Seconds without a move."""
        return max(0.0, self.until - self.last_move)

    @property
    def silent(self) -> bool:
        """It lives, and even its heartbeat thread cannot run: stopped, or C code holds the GIL."""
        record = self.record
        return (
            record.alive
            and record.heartbeat_age(self.now) > 2 * record.heartbeat_interval + _HEARTBEAT_SLACK
        )

    @property
    def state(self) -> str:
        """One word for the table."""
        record = self.record
        ended = record.exit
        if ended is not None:
            if not ended.failed:
                return "finished"
            if self.consequence:
                return "ended"
            return {"exception": "failed", "exit": "failed", "gone": "gone"}.get(ended.kind, "died")
        if record.process.alive is False:
            return "gone"
        if record.process.stopped:
            return "stopped"
        if self.silent:
            return "silent"
        if self.wait is not None:
            return "waiting"
        begins = record.phase.name == "start" and not (record.step or record.in_epochs)
        return "starting" if begins else "running"

    @property
    def computes(self) -> bool:
        """It, or one of its children, is at work."""
        return self.busy or (self.cpu is not None and self.cpu > _BUSY)

    @cached_property
    def stack(self) -> tuple[Site, ...]:
        """Of its main thread, innermost first."""
        return main_stack(self.threads)

    @cached_property
    def user_frame(self) -> Site | None:
        """The innermost line of its stack that is the user's own."""
        return next((f for f in self.stack if is_users(f.file)), None)

    @property
    def place(self) -> Site:
        """The best known line: where it waits, where its stack is, where its phase began."""
        if self.wait is not None and self.wait.site.file:
            return self.wait.site
        ended = self.record.exit
        if ended is not None and ended.site.file:
            return ended.site
        return self.user_frame or self.record.phase.site

    def doing(self) -> str:
        """A clause for a sentence that begins with the rank: ``waits in … (12 s)``."""
        record = self.record
        ended = record.exit
        if self.wait is not None:
            waited = max(0.0, self.until - self.wait.since)
            word = "waited" if ended is not None else "waits"
            return f"{word} in {self.wait.describe()} for {seconds(waited)}"
        if ended is not None:
            if self.consequence and record.phase.name != "exit":
                return f"was {phase_words(record)} {self._where()}"
            return "has ended" if ended.failed else "has finished"
        if record.process.stopped:
            return f"is stopped {self._where()}"
        if self.finished:
            return f"is through with its script for {seconds(self.idle)}"
        return f"is {phase_words(record)} {self._where()}"

    def _where(self) -> str:
        frame = self.user_frame or self.record.phase.site
        if not frame.file:
            return f"for {seconds(self.idle)}"
        return f"at {frame} in {frame.function} for {seconds(self.idle)}"


def phase_words(record: RankRecord) -> str:
    """What it is at, after "is": ``in prepare_data``, ``waiting for its DataLoader``"""
    if record.section is not None:
        return f"in {record.section.name}"
    if record.in_epochs and record.phase.name in ("start", ""):
        return "between two calls of its trainer"
    return _PHASES.get(record.phase.name, record.phase.name)


_PHASES = {
    "start": "before its first step",
    "init": "in init_process_group",
    "data": "waiting for its DataLoader",
    "compute": "in its own code",
    "forward": "in forward",
    "backward": "in backward",
    "optimizer": "in the optimizer's step",
    "epoch end": "after its pass over the data",
    "exit": "on its way out",
    "": "before its first step",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run and what is known of its ranks; after ``limit`` seconds without movement it hangs."""

    run: RunRecord
    ranks: Mapping[int, Facts]
    limit: float

    @property
    def world(self) -> tuple[int, ...]:
        return tuple(range(self.run.world_size)) or tuple(sorted(self.ranks))

    def __iter__(self) -> Iterator[Facts]:
        return iter([self.ranks[rank] for rank in sorted(self.ranks)])

    @property
    def live(self) -> tuple[Facts, ...]:
        return tuple(facts for facts in self if not facts.ended)

    @property
    def never_started(self) -> tuple[int, ...]:
        """Ranks without a box; one that is there and cannot be read is another matter."""
        return tuple(
            rank for rank in self.run.missing if f"ranks/{rank}.box" not in self.run.damaged
        )

    @property
    def interrupted(self) -> bool:
        """Ctrl-C or a scheduler ended the run. That ranks waited at that moment isn't a fault."""
        return self.run.run.get("state") in ("interrupted", "preempted")

    @property
    def place(self) -> str:
        """How far the ranks are: ``step 7``, ``steps 7–9``, or ``epoch 3`` where none has steps."""
        records = [facts.record for facts in self]
        steps = [r.global_step for r in records] or [0]
        epochs = [r.epoch for r in records] or [-1]
        word, done = ("step", steps) if any(steps) or max(epochs) < 0 else ("epoch", epochs)
        low, high = min(done), max(done)
        if word == "epoch" and low == high:
            return format_epoch(low, self.run.epochs)
        first = 1 if word == "epoch" else 0  # files count epochs from 0, and completed steps
        return f"{word} {low}" if low == high else f"{word}s {low + first}–{high + first}"

    @cached_property
    def members(self) -> Mapping[str, frozenset[int]]:
        """Ranks of each process group that was used; all ranks if its members aren't known."""
        noted: dict[str, set[int]] = {}
        for facts in self:
            for name, start, stop, step in facts.record.notes.get("groups", ()):
                part = range(start, stop, max(step, 1))
                noted.setdefault(name, set()).update(r for r in self.world if r in part)
        used = [
            event.group
            for facts in self
            for event in facts.record.events
            if event.kind == COLLECTIVE and event.group
        ]
        return {name: frozenset(noted.get(name) or self.world) for name in dict.fromkeys(used)}

    @cached_property
    def joined(self) -> bool:
        """Whether the run uses ``Join``: ranks that are done answer for themselves, unrecorded."""
        return any(facts.record.notes.get("join") for facts in self)


def gather(
    run: RunRecord,
    before: RunRecord | None = None,
    stacks: Mapping[int, tuple[ThreadStack, ...]] | None = None,
    limit: float | None = None,
) -> Case:
    """Facts from a reading, and from one a moment before it where there is one."""
    if limit is None:
        config = run.run.get("config")
        said = config.get("hang_timeout") if isinstance(config, Mapping) else None
        limit = float(said) if isinstance(said, (int, float)) and said > 0 else 60.0
    found = {}
    gap = run.read_at - before.read_at if before is not None else 0.0
    for rank, record in run.ranks.items():
        earlier = before.ranks.get(rank) if before is not None else None
        found[rank] = Facts(
            record=record,
            now=run.read_at,
            wait=wait_of(record),
            cpu=cpu_share(record, earlier, gap),
            busy=is_busy(record, earlier),
            moved=has_moved(record, earlier) or prepares(record, run.read_at, limit),
            threads=(stacks or {}).get(rank, ()),
            consequence=is_consequence(record),
        )
    return Case(run, found, limit)
