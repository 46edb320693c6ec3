"""Are the ranks' models alike, do all parameters get gradients, did parameters drift apart?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from miniray.doctor.facts import Case, Facts
from miniray.doctor.findings import Finding, Severity, named, plural
from miniray.doctor.model import Model
from miniray.doctor.waiting import GRADIENTS

_REDUCTION = "Expected to have finished reduction"


def check(case: Case) -> Iterator[Finding]:
    yield from _differ(case)
    yield from _unused(case)
    yield from _drifted(case)


def _differ(case: Case) -> Iterator[Finding]:
    """The first wrapped model on which ranks do not agree."""
    depth = max((len(f.record.models) for f in case), default=0)
    for index in range(depth):
        having = [f for f in case if len(f.record.models) > index]
        digests = Counter(f.record.models[index].digest for f in having)
        if len(digests) < 2:
            continue
        usual = digests.most_common()[0][0]
        odd = [f for f in having if f.record.models[index].digest != usual]
        like = next(f for f in having if f.record.models[index].digest == usual)
        yield _difference(odd, like, index)
        return


def _difference(odd: Sequence[Facts], like: Facts, index: int) -> Finding:
    mine, theirs = odd[0].record.models[index], like.record.models[index]
    if mine.parameters != theirs.parameters:
        title = (
            f"rank {odd[0].rank} has {plural(mine.parameters, 'parameter')}, "
            f"rank {like.rank} has {theirs.parameters}: models differ"
        )
    else:
        title = f"the model of {named(f.rank for f in odd)} differs from that of rank {like.rank}"
    return Finding(
        code="models-differ",
        severity=Severity.FAILED if odd[0].ended or like.ended else Severity.STUCK,
        title=title,
        ranks=tuple(f.rank for f in odd),
        evidence=(
            f"rank {odd[0].rank}: {_shape(mine)} at {mine.site}",
            f"rank {like.rank}: {_shape(theirs)} at {theirs.site}",
            *_first_difference(odd[0].rank, mine, like.rank, theirs),
        ),
        cause="DDP needs the same parameters in the same order on every rank.",
        fix="build the model from the same configuration on all ranks; do not branch on the rank",
        site=mine.site,
        # DDP's own complaint about it, and whoever waits for the rank that complained.
        explains=frozenset(
            {"exception", "collectives-parted", "does-not-complete", "mismatch", "blocked", "busy"}
        ),
    )


def _shape(model: Model) -> str:
    return f"{plural(model.parameters, 'parameter')}, {model.elements:,} elements"


def _first_difference(rank: int, mine: Model, other: int, theirs: Model) -> Iterator[str]:
    for index in range(max(len(mine.names), len(theirs.names))):
        a = mine.names[index] if index < len(mine.names) else "nothing"
        b = theirs.names[index] if index < len(theirs.names) else "nothing"
        if a != b:
            yield f"first difference, parameter {index}: rank {rank} {a}; rank {other} {b}"
            return


def _unused(case: Case) -> Iterator[Finding]:
    """Parameters without a gradient on some ranks, where DDP was not told to expect that.

    Only where it explains something: a rank that has gone on since, or that ended well, was not
    held up. Nor are those of a model that took no part in the backward at all: a GAN's generator
    while the discriminator learns.
    """
    complaint = [f for f in case if f.record.exit and _REDUCTION in f.record.exit.message]
    for index in range(max((len(f.record.models) for f in case), default=0)):
        having = [f for f in case if len(f.record.models) > index]
        unused = {f.rank: f.record.models[index].unused for f in having}
        guilty = [f for f in having if _is_held_up(f, f.record.models[index])]
        ended = bool(complaint) or any(f.consequence for f in case)
        if not guilty or not (ended or any(f.wait_name == GRADIENTS for f in case)):
            continue
        everywhere = len(guilty) == len(having) and len(set(unused.values())) == 1
        first = guilty[0]
        model = first.record.models[index]
        names = list(unused[first.rank])
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        ranks = [f.rank for f in guilty]
        where = "on all ranks" if everywhere else f"on {named(ranks)}"
        yield Finding(
            code="unused-parameters",
            severity=Severity.FAILED if ended else Severity.STUCK,
            title=f"unused {where}: {shown}",
            ranks=tuple(ranks),
            evidence=(
                f"no gradient in the backward of step {model.unused_step} {where}; "
                f"model wrapped at {model.site}",
                *(
                    f"rank {f.rank} raised: {f.record.exit.message.splitlines()[0][:90]}"
                    for f in complaint[:2]
                    if f.record.exit
                ),
            ),
            cause="DDP waits for a gradient of every parameter. One that takes no part in the loss "
            "gets none, and the others wait for it.",
            fix="let all ranks use all parameters, or DDP(..., find_unused_parameters=True)",
            step=model.unused_step,
            site=model.site,
            explains=frozenset(
                {"exception", "does-not-complete", "collectives-parted", "blocked", "busy"}
            ),
        )
        return


def _is_held_up(facts: Facts, model: Model) -> bool:
    if not model.unused or model.find_unused or len(model.unused) == model.parameters:
        return False
    record = facts.record
    if record.exit is not None and _REDUCTION in record.exit.message:
        return True
    return not facts.finished and record.step <= model.unused_step


def _drifted(case: Case) -> Iterator[Finding]:
    """Checksums of parameters that ranks noted at the same step (``doctor.checksum``)."""
    by_step: dict[int, dict[int, str]] = {}
    for facts in case:
        sums = facts.record.notes.get("checksums")
        if isinstance(sums, dict):
            for step, value in sums.items():
                by_step.setdefault(int(step), {})[facts.rank] = str(value)
    for step in sorted(by_step):
        values = by_step[step]
        usual = Counter(values.values()).most_common()[0][0]
        odd = [rank for rank, value in values.items() if value != usual]
        if not odd:
            continue
        like = min(rank for rank, value in values.items() if value == usual)
        yield Finding(
            code="parameters-drifted",
            severity=Severity.WRONG,
            title=f"parameters of {named(odd)} differ from rank {like}'s since step {step}",
            ranks=tuple(sorted(odd)),
            evidence=tuple(f"rank {rank}: checksum {values[rank]}" for rank in [*odd[:3], like]),
            cause="Gradients were not averaged on the way there: DDP was bypassed (model.module in "
            "the training step, no_sync, an optimizer step on one rank only).",
            fix="call the DDP wrapper itself in the training step; load weights on all ranks",
            step=step,
        )
        return
