"""Stragglers, ranks that fell behind, and GPUs that are shared or idle. (P5, P9)

In DDP all ranks take the same time for a step, because the fast ones wait in backward. What tells
them apart is their *own* time: waiting for data plus their own code, with the shortest backward of
all ranks added as the cost of a backward without waiting.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, positions, seconds
from miniray.doctor.model import Steps

#: Steps behind the median, and behind half of it, from which on it is said.
_BEHIND = 20

#: Below this a GPU counts as idle, in per cent.
_IDLE_GPU = 5

#: A straggler takes at least this many times the median of the others ...
_FACTOR = 1.5
#: ... and this much longer: a tenth of a step and 2 ms, so that jitter of tiny steps is not one ...
_SHARE, _LEAST_SECONDS = 0.10, 0.002
#: ... over at least this many of the newest entries of the history.
_STEPS = 10
#: The times of ``Steps``.
_TIMES = ("seconds", "data", "backward", "collective")


def check(case: Case) -> Iterator[Finding]:
    yield from _behind(case)
    yield from _straggler(case)
    yield from _shared_gpu(case)
    yield from _idle_gpu(case)


def _behind(case: Case) -> Iterator[Finding]:
    """Ranks that live and are far behind, or have not begun, while nobody waits for them."""
    if len(case.ranks) < 2:
        return
    usual = statistics.median(f.record.step for f in case)
    behind = [
        f
        for f in case.live
        if not f.finished and f.record.step < usual / 2 and usual - f.record.step >= _BEHIND
    ]
    if not behind:
        return
    idle = [f for f in behind if f.record.step == 0]
    shown = idle or behind
    what = "never entered the loop" if idle else "fell behind"
    first, reached = shown[0], shown[0].record.global_step
    yield Finding(
        code="behind",
        severity=Severity.SLOW,
        title=f"{named(f.rank for f in shown)} {what}: step {reached}, the others at "
        f"{usual + reached - first.record.step:.0f}",
        ranks=tuple(f.rank for f in shown),
        evidence=tuple(positions(shown)),
        cause="The ranks do not wait for each other, and this one does not keep up.",
        fix="look at where it is, above, and at its log",
        step=reached,
        site=first.place,
    )


def _straggler(case: Case) -> Iterator[Finding]:
    found = find_straggler(case)
    if found is None:
        return
    word = {"data": "data loading", "compute": "compute"}[found.where]
    since = f" since step {found.since}" if found.since > 1 else ""
    yield Finding(
        code="straggler",
        severity=Severity.SLOW,
        title=f"rank {found.rank} is {found.factor:.1f}× slower than the median{since} ({word})",
        ranks=(found.rank,),
        evidence=(
            f"rank {found.rank}: {_spent(found.own)} a step, of it {_spent(found.data)} "
            "waiting for data",
            f"median of the others: {_spent(found.others)}, over {found.steps} steps",
        ),
        cause="All ranks wait for the slowest one in every backward."
        + (
            " Its DataLoader is late: slow disk, too few loader workers, larger samples."
            if found.where == "data"
            else " Its own code is slower: another load on its cores or GPU, throttling, extra "
            "work on this rank."
        ),
        fix="more loader workers or faster storage for that rank"
        if found.where == "data"
        else "look at what else runs there, at threads per rank, and at work under `if rank == …`",
        step=found.since,
    )


def _spent(value: float) -> str:
    return f"{value * 1000:.0f} ms" if value < 1 else seconds(value)


@dataclasses.dataclass(frozen=True)
class Straggler:
    """``own`` and ``others`` are seconds a step; ``where`` is "data" or "compute"."""

    rank: int
    factor: float
    since: int
    where: str
    own: float
    others: float
    data: float
    steps: int


def find_straggler(case: Case) -> Straggler | None:
    """The slowest rank, if it is that much slower; None where all are alike or too few steps."""
    if len(case.ranks) < 2:
        return None
    stride = max((s.count for f in case for s in f.record.steps), default=1)
    by_rank = {f.rank: _mean_steps(f.record.steps, stride) for f in case}
    common = sorted(set.intersection(*(set(steps) for steps in by_rank.values())))
    if len(common) < _STEPS:
        return None
    cheapest = [min(steps[n].backward for steps in by_rank.values()) for n in common]
    own = {
        rank: [
            steps[n].data + steps[n].compute + backward
            for n, backward in zip(common, cheapest, strict=True)
        ]
        for rank, steps in by_rank.items()
    }
    slowest = max(own, key=lambda rank: statistics.median(own[rank][-_STEPS:]))
    return _judge(slowest, own, by_rank, common)


def _mean_steps(history: Sequence[Steps], stride: int) -> dict[int, Steps]:
    """Return the mean step of each block of ``stride`` steps, by the first step of the block.

    Blocks that aren't complete are left out, and those whose time isn't known.
    """
    blocks: dict[int, list[Steps]] = {}
    for steps in history:
        blocks.setdefault((steps.step - 1) // stride, []).append(steps)
    found = {}
    for block, members in blocks.items():
        count = sum(s.count for s in members)
        times = [sum(getattr(s, name) for s in members) / count for name in _TIMES]
        if count == stride and times[0] > 0:
            mean = dict(zip(_TIMES, times, strict=True))
            found[block * stride + 1] = dataclasses.replace(members[-1], count=count, **mean)
    return found


def _judge(
    rank: int,
    own: Mapping[int, Sequence[float]],
    by_rank: Mapping[int, Mapping[int, Steps]],
    common: Sequence[int],
) -> Straggler | None:
    others = [
        statistics.median(o[i] for r, o in own.items() if r != rank) for i in range(len(common))
    ]
    mine = own[rank]
    begin = _begin(mine, others)
    steps = len(common) - begin
    if steps < _STEPS:
        return None
    # Medians: one slow step (a checkpoint, a pause) makes no straggler.
    a, b = statistics.median(mine[begin:]), statistics.median(others[begin:])
    step = statistics.median(by_rank[rank][n].seconds for n in common[begin:])
    if a < _FACTOR * b or a - b < max(_LEAST_SECONDS, _SHARE * step):
        return None
    data = statistics.median(by_rank[rank][n].data for n in common[begin:])
    others_data = statistics.median(
        steps_of[n].data for r, steps_of in by_rank.items() if r != rank for n in common[begin:]
    )
    where = "data" if data - others_data > (a - b) / 2 else "compute"
    first = common[begin] if begin or common[0] > 1 else 1
    count = sum(by_rank[rank][n].count for n in common[begin:])
    return Straggler(rank, a / b if b else float("inf"), first, where, a, b, data, count)


def _begin(mine: Sequence[float], others: Sequence[float]) -> int:
    """Index from which on, to the end, slow steps most outnumber the others.

    So a step that is not slow here and there, on a noisy machine, does not move the beginning.
    """
    begin, best, score = len(mine), 0, 0
    for index in range(len(mine) - 1, -1, -1):
        score += 1 if mine[index] > _FACTOR * others[index] else -1
        if score > best:
            best, begin = score, index
    return begin


def _shared_gpu(case: Case) -> Iterator[Finding]:
    by_gpu: dict[tuple[str, str], list[Facts]] = {}
    for facts in case:
        if facts.record.gpu is not None:
            by_gpu.setdefault((facts.record.host, facts.record.gpu.uuid), []).append(facts)
    for (host, _), sharing in sorted(by_gpu.items()):
        gpu = sharing[0].record.gpu
        assert gpu is not None
        there = sharing[0].record.notes.get("gpu_count")
        used = len({uuid for other, uuid in by_gpu if other == host})
        if len(sharing) < 2 or not isinstance(there, int) or there <= used:
            continue
        yield Finding(
            code="gpu-shared",
            severity=Severity.SLOW,
            title=f"{named(f.rank for f in sharing)} share GPU {gpu.index} of {host}; "
            f"{there - used} of its {there} GPUs are not used",
            ranks=tuple(f.rank for f in sharing),
            evidence=(f"GPU {gpu.index}: {gpu.name}, {gpu.utilisation} % used",),
            cause="Ranks chose the same device.",
            fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before anything uses CUDA",
        )


def _idle_gpu(case: Case) -> Iterator[Finding]:
    idle = [
        f
        for f in case.live
        if f.record.gpu is not None
        and f.record.step > 0
        and f.record.gpu.utilisation < _IDLE_GPU
        and f.record.gpu.process_memory == 0
    ]
    if idle:
        yield Finding(
            code="gpu-idle",
            severity=Severity.SLOW,
            title=f"{named(f.rank for f in idle)} {'trains' if len(idle) == 1 else 'train'} and "
            "uses no GPU memory: is the model on the CPU?",
            ranks=tuple(f.rank for f in idle),
            cause="The process sees a GPU and torch has allocated nothing on it.",
            fix="move model and batches to the device",
        )
