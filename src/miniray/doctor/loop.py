"""How far ranks came in the loop over their data: who ran out, left, skipped a backward.

DDP averages gradients once a backward, so ranks that take different numbers of batches or backwards
end up waiting for each other. The counts say which rank did less, and where it went.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from miniray.counting import format_epoch
from miniray.doctor.facts import Facts
from miniray.doctor.findings import Finding, Severity, named, plural, they
from miniray.doctor.model import LOADER, Event, Loader

_JOIN = (
    "give every rank the same number of batches (DistributedSampler, drop_last=True), or run the "
    "loop inside `with model.join():`"
)
_GATHER = "give every rank the same number of batches, or gather once, after the loop"


@dataclasses.dataclass(frozen=True)
class Progress:
    """One rank's way through the data of one loader."""

    facts: Facts
    loader: Loader

    @cached_property
    def _end(self) -> Event | None:
        """How its last pass ended, where the ring tells; None for one that goes on.

        A pass may be begun before the one before it is given up: Lightning does that, and takes no
        more than all batches. And not every pass is a loop: ``next(iter(loader))`` is given up.
        """
        mine = [e for e in self.facts.record.events if _is_of(e, self.loader)]
        ends = [e for e in mine if e.name in ("end", "left")]
        begun = sum(e.name == "begin" for e in mine)
        return ends[-1] if ends and begun <= len(ends) else None

    @property
    def through(self) -> bool:
        """Whether its last pass went to the end."""
        if any(_is_of(event, self.loader) for event in self.facts.record.events):
            return self._end is not None and self._end.name == "end"
        return self.loader.passes == self.loader.finished

    @property
    def inside(self) -> bool:
        """Whether it is in the middle of a pass, or was when it last did anything."""
        return self.loader.passes > 0 and not self.through and not self.left

    @property
    def left(self) -> bool:
        """Whether it gave up its last pass before the end."""
        if self.through or self.facts.finished or self.facts.consequence:
            # An exception closes the loader, too.
            return self.facts.finished and not self.through and self.loader.passes > 0
        return self._end is not None

    @property
    def in_pass(self) -> int:
        """Batches it has taken in its last pass; of one that is for evaluation, when it is over."""
        if self.through:
            return self.loader.last_batches
        return self.facts.record.batches_in_epoch if self.trains else 0

    @property
    def trains(self) -> bool:
        """Whether this is the loader it trains with; that is known with its second batch."""
        return self.loader.trained or not any(ld.trained for ld in self.facts.record.loaders)

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


def _is_of(event: Event, loader: Loader) -> bool:
    return event.kind == LOADER and event.op.partition(":")[0] == f"loader {loader.index}"


def progress(facts: Facts, ahead: Progress | None = None) -> Progress | None:
    """Of the loader in whose pass it is, else of the one it trains with; or of that of ``ahead``.

    Ranks may have loaders of their own besides, so that numbers say nothing of those they train
    with; what they evaluate with is taken for the same where its line is.
    """
    loaders = sorted(facts.record.loaders, key=lambda ld: not ld.trained)
    if ahead is not None and not ahead.trains:
        like = ahead.loader
        loaders = [ld for ld in loaders if (ld.index, ld.site) == (like.index, like.site)]
    elif ahead is None:
        last = next((e for e in reversed(facts.record.events) if e.kind == LOADER), None)
        if last is not None and last.name not in ("end", "left"):
            loaders.sort(key=lambda ld: not _is_of(last, ld))
    return Progress(facts, loaders[0]) if loaders else None


def explain(suspects: Sequence[Facts], waiting: Sequence[Facts]) -> Finding | None:
    """Why suspects do not come to where the others wait, if the loop over the data is why."""
    leaders = [p for f in waiting for p in (progress(f),) if p is not None]
    if not leaders:
        return None
    ahead = max(leaders, key=lambda p: (p.loader.passes, p.in_pass, p.planned))
    behind = [p for f in suspects for p in (progress(f, ahead),) if p is not None]
    for rule, tell in _RULES:
        guilty = [p for p in behind if p.facts.rank != ahead.facts.rank and rule(p, ahead)]
        if guilty:
            told = tell(guilty, ahead, leaders)
            first = guilty[0].facts
            return Finding(
                code=told.code,
                severity=Severity.STUCK,
                title=told.title,
                ranks=tuple(sorted(p.facts.rank for p in guilty)),
                evidence=tuple(_counts(p) for p in [*guilty[:4], ahead]),
                cause=told.cause,
                fix=told.fix,
                step=first.record.global_step if told.step is None else told.step,
                site=first.place,
                explains=told.explains,
            )
    return None


class _Told(NamedTuple):
    code: str
    title: str
    cause: str
    fix: str
    step: int | None = None
    explains: frozenset[str] = frozenset()


def _no_batches(p: Progress, ahead: Progress) -> bool:
    return p.loader.passes > 0 and p.planned == 0 and ahead.in_pass > 0


def _ran_out(p: Progress, ahead: Progress) -> bool:
    if not p.through or not 0 < p.loader.passes >= ahead.loader.passes - 1:
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


def _ended(p: Progress, ahead: Progress) -> bool:
    fewer = p.loader.trained and p.through and p.loader.passes < ahead.loader.passes
    return fewer and p.facts.finished and ahead.inside


def _samples(every: Sequence[Progress]) -> int | None:
    """How many samples there are: the sum of the parts where each rank has its own dataset."""
    lengths = {p.facts.rank: p.loader.length for p in every}
    known = [length for length in lengths.values() if length is not None]
    if len(known) < len(lengths):
        return None
    return known[0] if len(set(known)) == 1 else sum(known)


def _found_no_batches(
    guilty: Sequence[Progress], ahead: Progress, others: Sequence[Progress]
) -> _Told:
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
    return _Told(
        "no-batches",
        f"{named(ranks)} {have} 0 batches{why}; rank {ahead.facts.rank} has {ahead.planned}",
        "A rank without a batch never calls backward, and the others wait for it there.",
        "use more data or fewer ranks; drop_last=False keeps short batches; or run the loop inside "
        "`with model.join():`",
    )


def _found_ran_out(guilty: Sequence[Progress], ahead: Progress, _: Sequence[Progress]) -> _Told:
    who = named(p.facts.rank for p in guilty)
    return _Told(
        "ran-out-of-data",
        f"{who} ran out of data at step {guilty[0].facts.record.step}; rank {ahead.facts.rank} has "
        f"{plural(ahead.planned, 'batch')}, {who} {guilty[0].in_pass}",
        "Ranks have different numbers of batches. Those with more wait, in their next step, for "
        "those that are done.",
        _JOIN if ahead.trains else _GATHER,
    )


def _found_skipped(guilty: Sequence[Progress], ahead: Progress, _: Sequence[Progress]) -> _Told:
    first = guilty[0]
    record = first.facts.record
    who = named(p.facts.rank for p in guilty)
    bad, skip = record.first_nonfinite, first.skipped
    step = bad.step if bad is not None else skip.step + 1 if skip is not None else None
    if bad is not None:
        why = f" (loss {_value(bad.value)})"
    else:  # "loader 0: batch 2, loss nan"
        loss = skip.op.partition("loss ")[2] if skip is not None else ""
        why = f" (loss {_value(float(loss))})" if loss else ""
    if step is not None:
        title = f"{who} skipped backward at step {step}{why}"
    else:
        missing = first.without_backward - ahead.without_backward
        title = (
            f"{who} skipped {plural(missing, 'backward')}: "
            f"{first.backwards} for {plural(record.batches, 'batch')}"
        )
    return _Told(
        "skipped-backward",
        f"{title}; rank {ahead.facts.rank} did not",
        "Every step of DDP or FSDP is a collective: a batch that one rank skips shifts all its "
        "later ones, and the others wait for the last.",
        "decide together: all_reduce a flag and let all ranks skip, or multiply the loss by 0 and "
        "call backward anyway",
        step,
        frozenset({"non-finite-loss"}),
    )


def _found_left(guilty: Sequence[Progress], ahead: Progress, _: Sequence[Progress]) -> _Told:
    first = guilty[0]
    step = first.facts.record.step
    of = f" of {first.loader.batches}" if first.loader.batches else ""
    at = f"the loop at step {step} (batch {first.in_pass}{of})"
    at = f"after step {step}, at the end of an epoch" if first.through else at
    return _Told(
        "left-the-loop",
        f"{named(p.facts.rank for p in guilty)} left {at}; {they('goes on', [ahead.facts])}",
        "One rank stopped early (break, return, sys.exit, early stopping on its own numbers); the "
        "others wait for it.",
        "decide on one rank and broadcast the decision, or all_reduce the flag, so that all leave "
        "at the same step",
    )


_RULES = (
    (_no_batches, _found_no_batches),
    (_ran_out, _found_ran_out),
    (_skipped, _found_skipped),
    (_left, _found_left),
    (_ended, _found_left),
)


def _counts(p: Progress) -> str:
    record = p.facts.record
    site = f" from the loader at {p.loader.site}" if p.loader.site.file else ""
    count = plural(p.in_pass, "batch")
    if p.inside and not p.trains:
        count = f"not yet all of {plural(p.planned, 'batch')}"
    return (
        f"rank {record.rank}: {count}{site} in {format_epoch(p.loader.passes - 1)}, "
        f"{plural(p.backwards, 'backward')}; {p.facts.doing()}"
    )


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}" if math.isfinite(value) else "Inf" if value > 0 else "-Inf"
