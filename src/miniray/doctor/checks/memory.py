"""Is a rank about to run out of memory, or does one hold much more than the others?"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, seconds, size
from miniray.limits import memory_total

#: Share of the limit from which on it is said.
_NEAR = 0.92
#: More than the others by this factor and this many bytes is worth a note.
_FACTOR, _LEAST = 3.0, 2_000_000_000


def check(case: Case) -> Iterator[Finding]:
    yield from _near_limit(case)
    yield from _growing(case)
    yield from _much_more(case)


def _near_limit(case: Case) -> Iterator[Finding]:
    live = case.live
    local = [f for f in live if f.record.process.alive]
    limit = memory_total()
    total = sum(f.record.rss for f in local)
    if not local or total < _NEAR * limit:
        return
    largest = max(local, key=lambda f: f.record.rss)
    yield Finding(
        code="memory-near-limit",
        severity=Severity.SLOW,
        title=f"{named(f.rank for f in local)} together hold {size(total)} of {size(limit)}: "
        "near the memory limit",
        ranks=(largest.rank,),
        evidence=(f"rank {largest.rank} holds most: {size(largest.record.rss)}",),
        cause="Beyond the limit the kernel kills a process with SIGKILL, without a word.",
        fix="a smaller batch, fewer loader workers, or a higher limit",
    )


def _growing(case: Case) -> Iterator[Finding]:
    """Memory that grows in a straight line, and when it will be too much."""
    growing: list[tuple[Facts, Growth]] = []
    for facts in case.live:
        points = facts.record.notes.get("memory")
        found = growth(points) if isinstance(points, list) and points else None
        if found is not None:
            growing.append((facts, found))
    if not growing:
        return
    facts, worst = max(growing, key=lambda item: item[1].rate)
    free = memory_total() - sum(f.record.rss for f in case.live)
    left = max(0.0, free / sum(g.rate for _, g in growing))
    age = case.run.read_at - facts.record.attached
    a_step = f"{size(worst.grown / worst.steps)} a step" if worst.steps else "steadily"
    yield Finding(
        code="memory-grows",
        severity=Severity.SLOW if left < 2 * age else Severity.NOTE,
        title=f"memory of {named(f.rank for f, _ in growing)} grows since step "
        f"{worst.since_step} ({a_step}); at the limit in {seconds(left)}",
        ranks=tuple(f.rank for f, _ in growing),
        evidence=(f"rank {facts.rank}: {size(worst.grown)} more, {size(facts.record.rss)} now",),
        cause="Something keeps what every step makes: a list of losses with their graphs, a cache, "
        "copies of the dataset in loader workers.",
        fix="keep loss.item() and not loss; look at lists that grow in the loop",
    )


@dataclasses.dataclass(frozen=True)
class Growth:
    """``rate`` is bytes a second, over the second half of the run's life."""

    rate: float
    since_step: int
    steps: int
    grown: int


def growth(points: Sequence[Sequence[float]], least_seconds: float = 120.0) -> Growth | None:
    """Steady growth in the second half of a rank's life, or None.

    The first half is left out: memory rightly grows while caches and buffers fill. Steady means
    that a straight line fits, and that at least a fifth was added to what there was.
    """
    late = [point for point in points if point[0] >= points[-1][0] / 2]
    if len(late) < 8 or late[-1][0] - late[0][0] < least_seconds / 2:
        return None
    times = [point[0] for point in late]
    sizes = [point[2] for point in late]
    mean_t, mean_s = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((t - mean_t) ** 2 for t in times)
    slope = sum((t - mean_t) * (s - mean_s) for t, s in zip(times, sizes, strict=True)) / spread
    total = sum((s - mean_s) ** 2 for s in sizes)
    rest = sum((s - mean_s - slope * (t - mean_t)) ** 2 for t, s in zip(times, sizes, strict=True))
    grown = slope * (times[-1] - times[0])
    if slope <= 0 or total == 0 or rest / total > 0.1 or grown < 0.2 * sizes[0]:
        return None
    return Growth(slope, int(late[0][1]), int(late[-1][1] - late[0][1]), round(grown))


def _much_more(case: Case) -> Iterator[Finding]:
    memory = {f.rank: f.record.rss for f in case.live if f.record.rss}
    if len(memory) < 2:
        return
    rank = max(memory, key=lambda r: memory[r])
    others = statistics.median(value for r, value in memory.items() if r != rank)
    if memory[rank] > _FACTOR * others and memory[rank] - others > _LEAST:
        yield Finding(
            code="memory-uneven",
            severity=Severity.NOTE,
            title=f"rank {rank} holds {size(memory[rank])}, the others {size(others)}",
            ranks=(rank,),
            cause="One rank keeps data or results for all.",
            fix="shard what it holds, or gather less",
        )
