"""Is a rank about to run out of memory, or does one hold much more than the others?"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, seconds, size
from miniray.doctor.memory_history import Growth, growth

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
    limit = memory_limit()
    total = sum(f.record.rss for f in local)
    if not local or limit is None or total < _NEAR * limit:
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
    limit = memory_limit()
    free = None if limit is None else limit - sum(f.record.rss for f in case.live)
    left = None if free is None else max(0.0, free / sum(g.rate for _, g in growing))
    age = case.run.read_at - facts.record.attached
    a_step = f"{size(worst.grown / worst.steps)} a step" if worst.steps else "steadily"
    until = f"; at the limit in {seconds(left)}" if left is not None else ""
    yield Finding(
        code="memory-grows",
        severity=Severity.SLOW if left is not None and left < 2 * age else Severity.NOTE,
        title=f"memory of {named(f.rank for f, _ in growing)} grows since step "
        f"{worst.since_step} ({a_step}){until}",
        ranks=tuple(f.rank for f, _ in growing),
        evidence=(f"rank {facts.rank}: {size(worst.grown)} more, {size(facts.record.rss)} now",),
        cause="Something keeps what every step makes: a list of losses with their graphs, a cache, "
        "copies of the dataset in loader workers.",
        fix="keep loss.item() and not loss; look at lists that grow in the loop",
    )


def memory_limit() -> int | None:
    """What all processes here may hold: the container's limit, else the machine's memory."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    try:
        first = Path("/proc/meminfo").read_text().split("\n", 1)[0]
        limits.append(int(first.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass  # not Linux: nothing to compare with
    return min(limits, default=None)


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
