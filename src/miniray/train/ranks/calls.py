"""Calling ranks at once, and finding the one cause when something goes wrong.

When a rank is gone or does not answer, the others fail too, a moment later or earlier: what they
say is a consequence, in whatever call it is. So after the first failure the cause is waited for,
for a few seconds, and raised alone. The caller ends the ranks: those that are left are stuck in a
collective.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import miniray
from miniray.doctor.findings import named
from miniray.errors import (
    ActorDiedError,
    BarrierTimeoutError,
    TaskError,
    WorkerTimeoutError,
)
from miniray.train.ranks.pulse import Place, is_consequence, tell
from miniray.train.ranks.watch import Verdict, Watch
from miniray.train.workers import WorkerGroup, located

_LOOK_EVERY = 0.5  # seconds between two looks at the ranks' pulses
_GRACE = 5.0  # seconds for the cause to be heard of after its first consequence
#: What to say of a rank that died with these words.
_MEANT = {
    "collective mismatch": "The ranks did not make the same collective calls in the same order: "
    "one of them left out a forward or a backward pass, or a parameter in its loss, that the "
    "others did not leave out",
    "process group has not been initialized": "The ranks meet after __init__. The trainer wraps "
    "self.model itself and deals out the samples of self.train_loader: make the bare model, and a "
    "DataLoader of all samples without a DistributedSampler",
}


@dataclasses.dataclass(eq=False)
class RankGroup(WorkerGroup):
    """Workers that go in step: all of their calls go through ``in_step``, and none is replaced."""

    in_step: Callable[..., dict[int, Any]] = dataclasses.field(kw_only=True)

    def call_some(
        self,
        worker_ids: Iterable[int],
        submit: Callable[[int], Any],
        method: str,
        epoch: int | None = None,
    ) -> dict[int, Any]:
        return self.in_step(worker_ids, submit, method, epoch)


def call_ranks(
    pending: dict[Any, int],
    method: str,
    epoch: int | None,
    *,
    limit: float | None,
    watch: Watch | None,
    moves: bool,
    bar: StepBar,
    held_by: Callable[[int], str | None],
    patience: float,
    run_dir: Path,
) -> dict[int, Any]:
    """Results by rank. Raises one error, the cause's, with ``rank``, ``epoch`` and ``step``.

    Of a rank that is lost it also says what is lost with it, ``held_by(rank)``.

    ``pending``: the rank of each call of ``method``; those that have not answered are left in it.
    ``limit``: seconds for all of it. By ``watch`` a rank that is stopped is found; where ranks say
    that they move (``moves``) one that hangs, too. Else nobody knows how long a call may rightly
    take: it is said who has not answered after ``patience`` seconds, after twice as many, and so
    on.
    """
    results: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    verdict: Verdict | None = None
    began = answered = time.monotonic()
    grace: float | None = None
    try:
        while pending and verdict is None:
            for ref in miniray.wait(list(pending), timeout=_LOOK_EVERY)[0]:
                rank = pending.pop(ref)
                try:
                    results[rank] = miniray.get(ref)
                except Exception as error:
                    failures[rank] = error
                answered = time.monotonic()
            now = time.monotonic()
            if failures:
                grace = grace or now + _GRACE
                if root_cause(failures) is not None or now > grace:
                    break
            elif not pending:
                break
            elif limit is not None and now > began + limit:
                late = sorted(pending.values())
                verdict = Verdict(late, f"{named(late)} gave no result in {limit:g} s")
            elif watch is not None and moves:
                bar.update(watch)
                verdict = watch.hung(pending.values(), answered)
            elif watch is not None and (verdict := watch.stopped(pending.values())):
                break
            elif now > began + patience:
                _tell_of_waiting(method, run_dir, sorted(pending.values()), now - began)
                patience *= 2
    finally:
        bar.close()
    if not failures and verdict is None:
        return results
    places = watch.last_places() if watch is not None else []
    cause = root_cause(failures)
    if cause is None and not pending and not moves:  # it may be no collective that it speaks of
        cause = next(iter(failures.items()))
    if cause is not None:
        guilty, told = cause
        place = places[guilty] if places and method == "_rank_epoch" else None
        told = in_context(told, guilty, epoch, place)
    else:
        told = _without_cause(failures, sorted(pending.values()), verdict, epoch, places)
    raise _with_loss(told, held_by)


def _tell_of_waiting(method: str, run_dir: Path, ranks: list[int], seconds: float) -> None:
    """Say on stderr who is waited for, and how to find out what for."""
    text = (
        f"{named(ranks)}: {method.removeprefix('_rank_')}() takes {seconds:.0f} s so far and is "
        f"waited for; `miniray doctor {run_dir}` shows where it is, worker_timeout= would set a "
        "limit"
    )
    print(text, file=sys.stderr, flush=True)


def _without_cause(
    failures: dict[int, Exception],
    pending: list[int],
    verdict: Verdict | None,
    epoch: int | None,
    places: list[Place],
) -> Exception:
    """The error where ranks only say that others are gone: who did not answer, or all they said."""
    said = "\n".join(
        f"  rank {rank}: {str(getattr(error, 'cause', None) or error).splitlines()[0]}"
        for rank, error in sorted(failures.items())
    )
    if verdict is None and pending and places:
        lines = [f"{named(pending)} did not answer, and the others waited in vain"]
        lines += [tell(place) for place in places if place.rank in pending]
        verdict = Verdict(pending, "\n".join([*lines, said]))
    barrier = next((e for e in failures.values() if isinstance(e, BarrierTimeoutError)), None)
    if barrier is not None:
        text = str(getattr(barrier, "cause", None) or barrier)
    elif verdict is not None:
        text = verdict.text
    else:
        text = (
            "the ranks lost one another, and all of them are alive: they did not make the same "
            f"collective calls in the same order\n{said}"
        )
    told = WorkerTimeoutError(text)
    if verdict is None or len(verdict.ranks) != 1:
        return _marked(told, None, epoch, None)
    guilty = verdict.ranks[0]
    return _marked(told, guilty, epoch, places[guilty].step if places else None)


def _with_loss(error: Exception, held_by: Callable[[int], str | None]) -> Exception:
    rank, lost = getattr(error, "rank", None), (ActorDiedError, WorkerTimeoutError)
    held = None if rank is None else held_by(rank)
    if held is None or not isinstance(error, lost) or isinstance(error, TaskError):
        return error
    return located(error, held)


def root_cause(failures: Mapping[int, Exception]) -> tuple[int, Exception] | None:
    """Whose failure is not a consequence of another's; the first that came, of several."""
    for rank, error in failures.items():
        if not is_consequence(error):
            return rank, error
    return None


def in_context(error: Exception, rank: int, epoch: int | None, place: Place | None) -> Exception:
    """``error`` saying which rank it came from, and when; of the same types as before."""
    when = "" if epoch is None else f" in epoch {epoch}"
    step = place.step if place is not None and place.epoch == epoch and place.step >= 0 else None
    if step is not None:
        when += f", step {step}"
    meant = "".join(f"\n{text}" for words, text in _MEANT.items() if words in str(error))
    told = located(error, f"rank {rank}{when}", meant if isinstance(error, ActorDiedError) else "")
    return error if told is error else _marked(told, rank, epoch, step)


def _marked(error: Exception, rank: int | None, epoch: int | None, step: int | None) -> Exception:
    for name, value in (("rank", rank), ("worker_id", rank), ("epoch", epoch), ("step", step)):
        setattr(error, name, value)
    return error


class StepBar:
    """The steps of an epoch on a terminal, below the bar of epochs; nothing elsewhere.

    It is made by the driver, which takes no part in any barrier, when all ranks are through the one
    before the first step.
    """

    def __init__(self, epoch: int, steps: int | None, enabled: bool) -> None:
        self._epoch, self._steps = epoch, steps
        self._enabled = enabled and sys.stderr is not None and sys.stderr.isatty()
        self._bar: Any = None

    def update(self, watch: Watch) -> None:
        """Show how far rank 0 is, once all are training."""
        if not self._enabled:
            return
        places = watch.places()
        if self._bar is None:
            if any(place.epoch != self._epoch or place.step < 0 for place in places):
                return
            from miniray.train.progress import _bar_class, _size

            self._bar = _bar_class()(
                total=self._steps,
                desc=f"epoch {self._epoch}",
                unit=" steps",
                leave=False,
                position=1,
                file=sys.stderr,
                **_size(sys.stderr),
            )
        done = places[0].step + 1
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.close()
