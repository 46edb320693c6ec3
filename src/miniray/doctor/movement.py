"""What one reading of a rank cannot tell, and two, a moment apart, can: does it do anything?"""

from __future__ import annotations

from miniray.doctor.model import RankRecord
from miniray.doctor.waiting import WRAP

#: Bytes read or written between the two readings that are work; the heartbeat's are some dozens.
_MOVED_BYTES = 65536


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
