"""What a rank's record shows: does it wait, has it ended only because it did, does it move?"""

from __future__ import annotations

import dataclasses
import re

from miniray.doctor.layout import PREPARING
from miniray.doctor.model import (
    BARRIER,
    COLLECTIVE,
    GROUP,
    POINT_TO_POINT,
    Event,
    RankRecord,
    Site,
)

#: Groups that are not process groups: named barriers, and the coming together at the start.
NAMED_BARRIERS = "named barriers"
START = "start"
#: What DDP does inside of C++, as the recorder calls it.
GRADIENTS, BUFFERS, WRAP = "DDP.backward", "DDP.forward", "DDP.__init__"
_WORDS = {GRADIENTS: "backward", BUFFERS: "DDP forward", WRAP: "DDP's constructor"}

#: What a rank says when *another* one has gone or did not come. A cause is never found in these.
_CONSEQUENCE_TYPES = {
    "BarrierTimeoutError",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "PeerLostError",
}
#: Errors of gloo have no type, but name the place in its code. Without it, the
#: connection is the user's: to a database, for example.
_CONSEQUENCE_TEXT = re.compile(
    r"gloo/\S+:\d+\].*(peer|connect|broken pipe|timed? ?out|read error|write error|i/o)"
    r"|nccl (communicator|error)",
    re.IGNORECASE | re.DOTALL,
)

#: What a rank says when its own network is at fault.
_OWN_FAULT = re.compile(
    r"EADDRINUSE|address already in use|cannot assign requested|not known|permission denied",
    re.IGNORECASE,
)

#: Bytes read or written between the two readings that are work; the heartbeat's are some dozens.
_MOVED_BYTES = 65536


@dataclasses.dataclass(frozen=True)
class Wait:
    """Something a rank cannot leave before other ranks come.

    ``group`` and ``sequence`` say which one it is, so that two ranks can be compared; -1 where the
    thing is not counted.
    """

    group: str
    sequence: int
    name: str
    site: Site
    since: float
    event: Event | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.group, self.sequence, self.name

    @property
    def word(self) -> str:
        """``all_reduce``, ``barrier 'save'``, ``backward``"""
        if self.group == NAMED_BARRIERS:
            return f"barrier {self.name!r}"
        return _WORDS.get(self.name, self.name)

    def describe(self) -> str:
        """``all_reduce SUM (4,) float32 at train.py:80``, ``barrier 'save' at train.py:9``"""
        if self.event is not None and self.name not in _WORDS and self.group != NAMED_BARRIERS:
            return self.event.describe()
        return f"{self.word} at {self.site}" if self.site.file else self.word

    def short(self) -> str:
        """The same in few words: ``all_reduce train.py:80``"""
        return f"{self.word} {self.site}" if self.site.file else self.word


def in_words(call: Event) -> str:
    """``Event.describe`` with DDP's calls as a user knows them."""
    return call.describe().replace(call.name, _WORDS.get(call.name, call.name), 1)


def wait_of(record: RankRecord) -> Wait | None:
    """What the rank waits for, or waited for when it was ended on another's account."""
    if record.exit is not None:
        return _last_wait(record) if is_consequence(record) else None
    event = record.waiting
    if event is not None:
        return wait_for(event, record)
    barrier = record.barrier
    if barrier is not None and not barrier.passed and not barrier.failed:
        return Wait(NAMED_BARRIERS, barrier.number, barrier.name, barrier.site, barrier.since)
    return None


def wait_for(event: Event, record: RankRecord) -> Wait:
    if event.kind == BARRIER:
        number = record.barrier.number if record.barrier is not None else event.sequence
        return Wait(NAMED_BARRIERS, number, event.name, event.site, event.at, event)
    if event.kind == GROUP:
        return Wait(START, 0, event.name, event.site, event.at, event)
    return Wait(event.group, event.sequence, event.name, event.site, event.at, event)


def _last_wait(record: RankRecord) -> Wait | None:
    """Where a rank was that ended on another's account: its last word was that it waited there."""
    ended, last = record.exit, _last_call(record)
    assert ended is not None
    if last is None:
        return None
    if last.ended is None or (ended.at is not None and abs(ended.at - last.ended) < 2.0):
        return wait_for(last, record)
    return None


def is_consequence(record: RankRecord) -> bool:
    """Whether the rank ended only because another one had: it says so, or it was told to."""
    ended = record.exit
    if ended is None or not ended.failed:
        return False
    if ended.by_launcher:
        return True
    if ended.kind != "exception":
        return False
    if not blames_others(ended.type, ended.message):
        return False
    return _is_connections(ended.type) or _ended_in_collective(record)


def blames_others(kind: str, message: str) -> bool:
    """Whether an exception says no more than that another rank has gone or did not come."""
    if _OWN_FAULT.search(message):
        return False
    return _is_connections(kind) or bool(_CONSEQUENCE_TEXT.search(message))


def _is_connections(kind: str) -> bool:
    return kind.rpartition(".")[2] in _CONSEQUENCE_TYPES


def _ended_in_collective(record: RankRecord) -> bool:
    """Whether the exception came out of a call that needs the other ranks."""
    if record.waiting is not None:
        return True
    ended, last = record.exit, _last_call(record)
    if last is None or ended is None or ended.at is None:
        return False
    return last.ended is None or abs(ended.at - last.ended) < 5.0


def _last_call(record: RankRecord) -> Event | None:
    """The last one that needed other ranks."""
    kinds = (COLLECTIVE, POINT_TO_POINT, BARRIER, GROUP)
    return next((event for event in reversed(record.events) if event.kind in kinds), None)


# -- two readings, a moment apart -----------------------------------------------------------------


def cpu_share(record: RankRecord, earlier: RankRecord | None, gap: float) -> float | None:
    """Of one core, used by it and its children in the ``gap`` seconds; None where nobody knows."""
    if earlier is None or gap <= 0.05:
        return None
    now, then = record.process, earlier.process
    if now.cpu_seconds is None or then.cpu_seconds is None:
        return None
    used = now.cpu_seconds + now.below[0] - then.cpu_seconds - then.below[0]
    return max(0.0, used) / gap


def is_busy(record: RankRecord, earlier: RankRecord | None) -> bool:
    """On a crowded machine a rank that computes may get little CPU: it is runnable all the same."""
    return earlier is not None and record.process.state == earlier.process.state == "R"


def prepares(record: RankRecord, now: float, limit: float) -> bool:
    """Return whether a filter or a cache build made progress in the last ``limit`` seconds."""
    return record.alive and record.phase.name == PREPARING and now - record.phase.since < limit


def has_moved(record: RankRecord, earlier: RankRecord | None) -> bool:
    """Whether its record changed, or it read or wrote what is work."""
    if earlier is None:
        return False
    if any(
        getattr(record, name) != getattr(earlier, name)
        for name in ("event_count", "step", "batches", "backwards")
    ):
        return True
    phase, last = record.phase, earlier.phase
    # Times are told by a clock that is set anew with every heartbeat: they tremble a little.
    if (phase.name, phase.site) != (last.name, last.site) or phase.since - last.since > 0.1:
        return True
    waiting = record.waiting
    if waiting is not None and waiting.name != WRAP:
        return False  # what it reads and writes is some other thread's; DDP's start loads modules
    now, then = record.process, earlier.process
    if now.io_bytes is None or then.io_bytes is None:
        return False
    return now.io_bytes + now.below[1] - then.io_bytes - then.below[1] > _MOVED_BYTES
