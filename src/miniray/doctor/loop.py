"""How far ranks came in the loop over their data: who ran out, left, skipped a backward.

DDP averages gradients once a backward, so ranks that take different numbers of batches or backwards
end up waiting for each other. The counts say which rank did less, and where it went.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from miniray.doctor.facts import Facts
from miniray.doctor.findings import Finding, Severity, named, plural
from miniray.doctor.model import LOADER, Event, Loader

_JOIN = (
    "give every rank the same number of batches (DistributedSampler, drop_last=True), or run the "
    "loop inside `with model.join():`"
)


@dataclasses.dataclass(frozen=True)
class Progress:
    """One rank's way through its training data."""

    facts: Facts
    loader: Loader

    @property
    def inside(self) -> bool:
        """Whether it is in the middle of a pass, or was when it last did anything."""
        return self.loader.passes > self.loader.finished and not self.left

    @property
    def left(self) -> bool:
        """Whether it gave up a pass before its end."""
        if self.loader.passes <= self.loader.finished:
            return False
        if self.facts.finished or self.facts.consequence:
            return self.facts.finished  # an exception closes the loader, too
        last = self._last_event
        return last is not None and last.name == "left"

    @property
    def _last_event(self) -> Event | None:
        mine = f"loader {self.loader.index}"
        events = [e for e in self.facts.record.events if e.kind == LOADER and e.op.startswith(mine)]
        return events[-1] if events else None

    @property
    def in_pass(self) -> int:
        """Batches it has taken in its last pass."""
        if self.loader.passes == self.loader.finished:
            return self.loader.last_batches
        return self.facts.record.batches_in_epoch

    @property
    def planned(self) -> int:
        """Batches of a pass, as far as anybody knows."""
        return max(self.loader.batches or 0, self.in_pass)

    @property
    def backwards(self) -> int:
        """Backwards begun."""
        return self.facts.record.backwards

    @property
    def skipped(self) -> Event | None:
        """The first batch it took and did no backward for."""
        return next(
            (e for e in self.facts.record.events if e.kind == LOADER and e.name == "no backward"),
            None,
        )

    @property
    def without_backward(self) -> int:
        """Batches it took and did no backward for."""
        return self.facts.record.batches - self.backwards


def progress(facts: Facts) -> Progress | None:
    """Of the loader it trains with; None where it has none."""
    loaders = facts.record.loaders
    trained = [loader for loader in loaders if loader.trained] or list(loaders)
    return Progress(facts, trained[0]) if trained else None


def explain(suspects: Sequence[Facts], waiting: Sequence[Facts]) -> Finding | None:
    """Why suspects do not come to where the others wait, if the loop over the data is why."""
    leaders = [p for f in waiting for p in (progress(f),) if p is not None]
    if not leaders:
        return None
    ahead = max(leaders, key=lambda p: (p.loader.passes, p.in_pass, p.planned))
    behind = [p for f in suspects for p in (progress(f),) if p is not None]
    for rule in (_no_batches, _ran_out, _skipped, _left):
        guilty = [p for p in behind if p.facts.rank != ahead.facts.rank and rule(p, ahead)]
        if guilty:
            if rule is _no_batches:
                return _found_no_batches(guilty, ahead, leaders)
            return _FINDINGS[rule](guilty, ahead)
    return None


def _no_batches(p: Progress, ahead: Progress) -> bool:
    return p.loader.passes > 0 and p.planned == 0 and ahead.in_pass > 0


def _ran_out(p: Progress, ahead: Progress) -> bool:
    if p.loader.passes != p.loader.finished or p.loader.finished == 0:
        return False
    if p.loader.finished < ahead.loader.passes - 1:
        return False
    return p.in_pass < ahead.planned and not _skipped(p, ahead)


def _skipped(p: Progress, ahead: Progress) -> bool:
    # In the middle of a pass the last batch may still be about to have its backward.
    certain = p.skipped is not None or not p.inside
    fewer = p.without_backward > ahead.without_backward and p.backwards < ahead.backwards
    # FSDP's ranks wait in forward, before the backward that would tell them apart.
    seen = p.skipped is not None and ahead.skipped is None and p.backwards <= ahead.backwards
    return certain and p.loader.trained and p.in_pass >= ahead.in_pass and (fewer or seen)


def _left(p: Progress, ahead: Progress) -> bool:
    return p.left and ahead.inside


def _samples(every: Sequence[Progress]) -> int | None:
    """How many samples there are: the sum of the parts where each rank has its own dataset."""
    lengths = {p.facts.rank: p.loader.length for p in every}
    known = [length for length in lengths.values() if length is not None]
    if len(known) < len(lengths):
        return None
    return known[0] if len(set(known)) == 1 else sum(known)


def _found_no_batches(
    guilty: Sequence[Progress], ahead: Progress, others: Sequence[Progress]
) -> Finding:
    loader = guilty[0].loader
    ranks = [p.facts.rank for p in guilty]
    have = "has" if len(ranks) == 1 else "have"
    why = ""
    world = guilty[0].facts.record.world_size
    samples = _samples([*guilty, ahead, *others])
    if samples is not None and samples < world:
        why = f" ({plural(samples, 'sample')} < {world} ranks)"
    elif loader.length is not None:
        why = f" ({plural(loader.length, 'sample')}, batch size {loader.batch_size}"
        why += ", drop_last)" if loader.drop_last else ")"
    return _finding(
        "no-batches",
        guilty,
        f"{named(ranks)} {have} 0 batches{why}; rank {ahead.facts.rank} has {ahead.planned}",
        ahead,
        "A rank without a batch never calls backward, and the others wait for it there.",
        "use more data or fewer ranks; drop_last=False keeps short batches; or run the loop inside "
        "`with model.join():`",
    )


def _found_ran_out(guilty: Sequence[Progress], ahead: Progress) -> Finding:
    first = guilty[0]
    ranks = [p.facts.rank for p in guilty]
    return _finding(
        "ran-out-of-data",
        guilty,
        f"{named(ranks)} ran out of data at step {first.facts.record.step}; "
        f"rank {ahead.facts.rank} has {plural(ahead.planned, 'batch')}, "
        f"{named(ranks)} {first.in_pass}",
        ahead,
        "Ranks have different numbers of batches. Those with more wait, in their next step, for "
        "those that are done.",
        _JOIN,
    )


def _found_skipped(guilty: Sequence[Progress], ahead: Progress) -> Finding:
    first = guilty[0]
    record = first.facts.record
    ranks = [p.facts.rank for p in guilty]
    bad, skip = record.first_nonfinite, first.skipped
    step = bad.step if bad is not None else skip.step + 1 if skip is not None else None
    if bad is not None:
        why = f" (loss {_value(bad.value)})"
    else:  # "loader 0: batch 2, loss nan"
        loss = skip.op.partition("loss ")[2] if skip is not None else ""
        why = f" (loss {_value(float(loss))})" if loss else ""
    if step is not None:
        title = f"{named(ranks)} skipped backward at step {step}{why}"
    else:
        missing = first.without_backward - ahead.without_backward
        title = (
            f"{named(ranks)} skipped {plural(missing, 'backward')}: "
            f"{first.backwards} for {plural(record.batches, 'batch')}"
        )
    return _finding(
        "skipped-backward",
        guilty,
        f"{title}; rank {ahead.facts.rank} did not",
        ahead,
        "Every step of DDP or FSDP is a collective: a batch that one rank skips shifts all its "
        "later ones, and the others wait for the last.",
        "decide together: all_reduce a flag and let all ranks skip, or multiply the loss by 0 and "
        "call backward anyway",
        explains=frozenset({"non-finite-loss"}),
        step=step,
    )


def _found_left(guilty: Sequence[Progress], ahead: Progress) -> Finding:
    first = guilty[0]
    ranks = [p.facts.rank for p in guilty]
    of = f" of {first.loader.batches}" if first.loader.batches else ""
    return _finding(
        "left-the-loop",
        guilty,
        f"{named(ranks)} left the loop at step {first.facts.record.step} "
        f"(batch {first.in_pass}{of}); rank {ahead.facts.rank} goes on",
        ahead,
        "One rank stopped early (break, return, sys.exit, early stopping on its own numbers); the "
        "others wait for it.",
        "decide on one rank and broadcast the decision, or all_reduce the flag, so that all leave "
        "at the same step",
    )


_FINDINGS = {
    _ran_out: _found_ran_out,
    _skipped: _found_skipped,
    _left: _found_left,
}


def _finding(
    code: str,
    guilty: Sequence[Progress],
    title: str,
    ahead: Progress,
    cause: str,
    fix: str,
    explains: frozenset[str] = frozenset(),
    step: int | None = None,
) -> Finding:
    first = guilty[0]
    evidence = [_counts(p) for p in [*guilty[:4], ahead]]
    site = first.facts.place
    return Finding(
        code=code,
        severity=Severity.STUCK,
        title=title,
        ranks=tuple(sorted(p.facts.rank for p in guilty)),
        evidence=tuple(evidence),
        cause=cause,
        fix=fix,
        step=first.facts.record.step if step is None else step,
        site=site,
        explains=explains,
    )


def _counts(p: Progress) -> str:
    record = p.facts.record
    site = f" from the loader at {p.loader.site}" if p.loader.site.file else ""
    return (
        f"rank {record.rank}: {plural(p.in_pass, 'batch')}{site} in epoch {p.loader.passes - 1}, "
        f"{plural(p.backwards, 'backward')}; {p.facts.doing()}"
    )


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}" if math.isfinite(value) else "Inf" if value > 0 else "-Inf"
