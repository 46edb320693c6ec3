"""Can the ranks come together at all? What each of them told ``init_process_group``.

Numbers and addresses that are written into a script, and not taken from the environment, make ranks
wait for others that do not exist, or where nobody comes. torch says half an hour later that it
timed out.
"""

from __future__ import annotations

from miniray.doctor.facts import Case
from miniray.doctor.findings import Finding, Severity, named, plural


def explain(case: Case, severity: Severity) -> Finding | None:
    """Why they never met, if what they asked for says so; None once any of them had joined."""
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
