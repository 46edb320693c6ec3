"""Is this one run at all: every rank there once, all of one world, torch.distributed up? (P6)"""

from __future__ import annotations

from collections.abc import Iterator

from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding, Severity, named, plural
from miniray.doctor.model import COLLECTIVE, POINT_TO_POINT, RankRecord

_LAUNCH = "start them together: miniray run --nproc N script.py, or torchrun --nproc-per-node N"
#: Steps a rank may train alone before it is said that nobody keeps it company.
_ALONE_STEPS = 1
#: Steps after which ranks that share one dataset must have exchanged something.
_APART_STEPS = 20
#: Calls that exchange no tensors of a training step.
_NO_EXCHANGE = ("barrier", "monitored_barrier", "new_group")


def check(case: Case) -> Iterator[Finding]:
    yield from _separate_worlds(case)
    yield from _duplicates(case)
    yield from _missing(case)
    yield from _sizes_differ(case)
    yield from _apart(case)


def _separate_worlds(case: Case) -> Iterator[Finding]:
    """Several processes, each of which believes to be the only one."""
    every = [*case.run, *case.run.duplicates]
    alone = [record for record in every if _believes_alone(record)]
    if len(every) < 2 or len(alone) < len(every):
        return
    yield Finding(
        code="separate-worlds",
        severity=Severity.WRONG,
        title=f"{len(every)} processes, each with world_size 1: not launched together",
        ranks=tuple(sorted(record.rank for record in every)),
        evidence=tuple(
            f"pid {record.pid}: {_facts(record)}, step {record.step}" for record in every[:4]
        ),
        cause="Every process trains a model of its own on all the data. Nothing is averaged.",
        fix=f"{_LAUNCH}; and call init_process_group with the RANK and WORLD_SIZE it sets",
        explains=frozenset({"duplicate-rank", "same-data", "not-initialised"}),
    )


def _believes_alone(record: RankRecord) -> bool:
    if record.group_size > 0:
        return record.group_size == 1
    return record.world_size == 1


def _trains_outside(record: RankRecord) -> bool:
    """Whether it trains with torch and no process group. miniray's own trainers need none."""
    return (
        record.group_size <= 0
        and record.distributed_available is True
        and record.launcher != "miniray"
        and record.step > _ALONE_STEPS
    )


def _facts(record: RankRecord) -> str:
    if record.group_size > 0:
        return f"rank {record.group_rank} of {record.group_size}, {record.backend}"
    return f"RANK {record.rank} of {record.world_size}, torch.distributed not initialized"


def _duplicates(case: Case) -> Iterator[Finding]:
    by_rank: dict[int, list[RankRecord]] = {}
    for record in case.run.duplicates:
        by_rank.setdefault(record.rank, []).append(record)
    for rank, more in sorted(by_rank.items()):
        first = case.run.ranks.get(rank)
        claimants = [*([first] if first is not None else []), *more]
        words = {2: "two", 3: "three", 4: "four"}
        count = words.get(len(claimants), str(len(claimants)))
        missing = case.never_started
        lost = f"; {named(missing)} never started" if missing else ""
        yield Finding(
            code="duplicate-rank",
            severity=Severity.STUCK if missing else Severity.WRONG,
            title=f"{count} processes claim rank {rank}{lost}",
            ranks=(rank, *missing),
            evidence=tuple(f"pid {r.pid} on {r.host}: {r.command[:60]}" for r in claimants[:4]),
            cause="Processes were started with the same RANK, or a process of an earlier run still "
            "lives. The group can never be complete.",
            fix=_LAUNCH,
            explains=frozenset({"missing-rank"}),
        )


def _missing(case: Case) -> Iterator[Finding]:
    """Ranks without a box when the others have long been there; a hang at the start says it too."""
    missing = case.never_started
    if not missing or not case.ranks:
        return
    oldest = min(record.attached for record in case.run)
    if case.live and case.run.read_at - oldest < case.limit:
        return
    yield Finding(
        code="missing-rank",
        severity=Severity.STUCK,
        title=f"{named(missing)} never started",
        ranks=missing,
        evidence=(f"world size {case.run.world_size}, boxes of {named(case.run.ranks)} only",),
        cause="A process was not launched, died before it could record anything, or has another "
        "RANK than it should.",
        fix=_LAUNCH,
    )


def _sizes_differ(case: Case) -> Iterator[Finding]:
    sizes = {f.rank: f.record.group_size for f in case if f.record.group_size > 0}
    if len(set(sizes.values())) > 1:
        said = ", ".join(f"rank {rank}: {size}" for rank, size in sorted(sizes.items())[:8])
        yield Finding(
            code="world-sizes-differ",
            severity=Severity.WRONG,
            title=f"ranks disagree about the world size ({said})",
            ranks=tuple(sizes),
            cause="They did not join one process group.",
            fix=_LAUNCH,
        )
    outside = [f for f in case if _trains_outside(f.record)]
    if outside and len(case.world) > 1:
        ranks = [f.rank for f in outside]
        yield Finding(
            code="not-initialised",
            severity=Severity.WRONG,
            title=f"{named(ranks)} {'trains' if len(ranks) == 1 else 'train'} without a process "
            "group (torch.distributed isn't initialized)",
            ranks=tuple(ranks),
            evidence=(
                f"{plural(outside[0].record.step, 'step')} done, no init_process_group seen",
            ),
            cause="Nothing is averaged between these ranks.",
            fix="call torch.distributed.init_process_group() at the top and wrap the model in DDP",
        )


def _apart(case: Case) -> Iterator[Finding]:
    """Ranks that share a dataset out among them, and never exchange anything about it.

    What averages gradients out of sight is a compiled DDP, and that torch compiled is seen. Ranks
    that hold parts of one model, and exchange in ways that are not seen, do not share the data out.
    """
    alone = [f for f in case if _shares_data(f.record) and not _exchanges(f.record)]
    if len(alone) < 2 or len(alone) < len(case.ranks):
        return
    first = alone[0].record
    wrapped = "no model wrapped in DDP"
    fix = "model = DistributedDataParallel(model), before the optimizer is made"
    if first.models:
        wrapped = f"a model wrapped in DDP at {first.models[0].site} that averaged nothing"
        fix = "call the wrapper itself in the training step, not model.module; not in no_sync()"
    yield Finding(
        code="trained-apart",
        severity=Severity.WRONG,
        title=f"{named(f.rank for f in alone)} train apart: no gradients are averaged",
        ranks=tuple(f.rank for f in alone),
        evidence=(
            f"rank {first.rank}: {plural(first.step, 'step')}, {wrapped}, no collective since the "
            "first step",
        ),
        cause="Each rank trains a model of its own, on its share of the data.",
        fix=fix,
    )


def _shares_data(record: RankRecord) -> bool:
    shared = [ld for ld in record.loaders if ld.trained and (ld.replicas or 1) > 1]
    return record.group_size > 1 and record.step >= _APART_STEPS and bool(shared)


def _exchanges(record: RankRecord) -> bool:
    if record.notes.get("compiled") or (record.models and _forgets(record)):
        return True
    called = (e for e in record.events if e.kind in (COLLECTIVE, POINT_TO_POINT) and e.step > 0)
    return any(event.name not in _NO_EXCHANGE for event in called)


def _forgets(record: RankRecord) -> bool:
    """Whether its events do not reach back far enough to say what it has not done."""
    return (
        record.event_count > len(record.events)
        and record.events[0].step > record.step - _APART_STEPS
    )


def explain_meeting(case: Case, severity: Severity) -> Finding | None:
    """Why they never met, if what each told ``init_process_group`` says so.

    None once any of them had joined.

    Numbers and addresses that are written into a script, and not taken from the environment, make
    ranks wait for others that do not exist, or where nobody comes. torch says half an hour later
    that it timed out.
    """
    if any(f.record.group_size > 0 for f in case) or case.never_started:
        return None
    told = {f.rank: f.record.notes.get("asked") for f in case}
    every = {rank: said for rank, said in told.items() if isinstance(said, dict)}
    if len(every) < len(told):
        return None  # one has not come to it: that is another story
    ranks = {rank: said["rank"] for rank, said in every.items() if said["rank"] is not None}
    sizes = {rank: said["world_size"] for rank, said in every.items() if said["world_size"]}
    places = {rank: said["place"] for rank, said in every.items() if said["place"]}
    started = max(len(case.world), len(case.ranks))
    same = [rank for rank, number in ranks.items() if list(ranks.values()).count(number) > 1]
    if len(set(places.values())) > 1:
        code, guilty = "places-differ", tuple(places)
        said = ", ".join(f"rank {rank} at {place}" for rank, place in list(places.items())[:4])
        title = f"the ranks meet at different places: {said}"
        cause = "Rank 0 listens at its MASTER_ADDR and MASTER_PORT; the others must come there."
        fix = "leave MASTER_ADDR, MASTER_PORT and init_method as the launcher sets them"
    elif same:
        code, guilty = "duplicate-rank", tuple(same)
        title = f"{named(same)} call init_process_group with rank={ranks[same[0]]}"
        cause = "Every process needs a rank of its own, from 0 to the world size less one."
        fix = "rank=int(os.environ['RANK']), or leave rank= out"
    elif sizes and max(sizes.values()) > started:
        size = max(sizes.values())
        code, guilty = "world-size", tuple(rank for rank in sizes if sizes[rank] == size)
        title = f"init_process_group waits for {size} ranks, and {plural(started, 'rank')} started"
        cause = "world_size is more than the number of processes: the missing ones never come."
        fix = "world_size=int(os.environ['WORLD_SIZE']), or leave world_size= out"
    else:
        return None
    first = case.ranks[guilty[0]]
    evidence = [
        f"rank {rank}: init_process_group(rank={said['rank']}, world_size={said['world_size']}) "
        f"at {said['place'] or 'a store of its own'}"
        for rank, said in list(every.items())[:4]
    ]
    return Finding(
        code=code,
        severity=severity,
        title=title,
        ranks=guilty,
        evidence=tuple(evidence),
        cause=cause,
        fix=fix,
        step=0,
        site=first.place,
    )
