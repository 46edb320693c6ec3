"""Calling ranks at once, and finding the one cause when something goes wrong.

When a rank is gone or does not answer, the others fail too, a moment later or earlier: what they
say is a consequence, in whatever call it is. So after the first failure the cause is waited for,
for a few seconds, and raised alone. The caller ends the ranks: those that are left are stuck in a
collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import miniray
from miniray.doctor.findings import named
from miniray.errors import (
    ActorDiedError,
    BarrierTimeoutError,
    MinirayError,
    TaskError,
    WorkerTimeoutError,
)
from miniray.train.lockstep.monitor import Verdict, Watch
from miniray.train.lockstep.status import Place, is_consequence, tell
from miniray.train.workers.group import WorkerGroup, located

_LOOK_EVERY = 0.5  # seconds between two looks at the ranks' pulses
_LAST_WORDS = 5.0  # seconds for a rank that was ended to be known as such
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


@dataclasses.dataclass(eq=False, kw_only=True)
class RankGroup(WorkerGroup):
    """Workers that go in step. None is replaced: after an error all of them are of no use any more.

    ``held_by(rank)`` is what is lost with a rank. In calls that are ``watched`` ranks say that they
    move, so that one that hangs is found by ``watch``, which there is once they have met; in all
    others one that is stopped. How long those may rightly take nobody knows: it is said who has not
    answered after ``patience`` seconds, after twice as many, and so on.
    """

    run_dir: Path
    held_by: Callable[[int], str | None]
    patience: float
    progress: bool
    watched: Set[str] = frozenset()
    watch: Watch | None = None
    steps: int | None = None  # of an epoch
    broken: bool = False
    unanswered: list[Any] = dataclasses.field(default_factory=list)

    def call_some(
        self,
        worker_ids: Iterable[int],
        submit: Callable[[int], Any],
        method: str,
        epoch: int | None = None,
    ) -> dict[int, Any]:
        """Results by rank. Raises one error, the cause's, with ``rank``, ``epoch`` and ``step``."""
        pending = {submit(rank): rank for rank in worker_ids}
        failures: dict[int, Exception] = {}
        try:
            results, verdict = self._answers(pending, failures, method, epoch)
            if not failures and verdict is None:
                return results
            places = self.watch.last_places() if self.watch is not None else []
            cause = root_cause(failures)
            if cause is None and not pending and method not in self.watched:
                cause = next(iter(failures.items()))  # it may be no collective that it speaks of
            if cause is not None:
                rank, error = cause
                place = places[rank] if places and method == "run_rank_epoch" else None
                told = in_context(error, rank, epoch, place)
            else:
                told = _without_cause(failures, sorted(pending.values()), verdict, epoch, places)
            raise self._with_loss(told)
        except BaseException:
            self.broken = True
            self.unanswered += pending
            raise

    def _answers(
        self,
        pending: dict[Any, int],
        failures: dict[int, Exception],
        method: str,
        epoch: int | None,
    ) -> tuple[dict[int, Any], Verdict | None]:
        """Wait for all, or until some are known not to answer: they are left in ``pending``."""
        results: dict[int, Any] = {}
        verdict: Verdict | None = None
        watch, patience, moves = self.watch, self.patience, method in self.watched
        bar = StepBar(epoch or 0, self.steps, moves and self.progress)
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
                elif self.timeout is not None and now > began + self.timeout:
                    late = sorted(pending.values())
                    verdict = Verdict(late, f"{named(late)} gave no result in {self.timeout:g} s")
                elif watch is not None and moves:
                    bar.update(watch)
                    verdict = watch.hung(pending.values(), answered)
                elif watch is not None and (verdict := watch.stopped(pending.values())):
                    break
                elif now > began + patience:
                    self._tell_of_waiting(method, pending.values(), now - began)
                    patience *= 2
        finally:
            bar.close()
        return results, verdict

    def _tell_of_waiting(self, method: str, ranks: Iterable[int], seconds: float) -> None:
        """Say on stderr who is waited for, and how to find out what for."""
        text = (
            f"{named(ranks)}: {method}() takes {seconds:.0f} s so far and "
            f"is waited for; `miniray doctor {self.run_dir}` shows where it is, worker_timeout= "
            "would set a limit"
        )
        print(text, file=sys.stderr, flush=True)

    def _with_loss(self, error: Exception) -> Exception:
        """Of a rank that is lost also what is lost with it."""
        rank, lost = getattr(error, "rank", None), (ActorDiedError, WorkerTimeoutError)
        held = None if rank is None else self.held_by(rank)
        if held is None or not isinstance(error, lost) or isinstance(error, TaskError):
            return error
        return located(error, held)

    def stop(self) -> None:
        """End all ranks, and hear out what they still had to say.

        Nobody wants to know; but of an answer that nobody asked for the log would tell.
        """
        super().stop()
        self.watch = None
        left, self.unanswered = self.unanswered, []
        for ref in left if miniray.is_initialized() else ():
            with contextlib.suppress(Exception):
                miniray.get(ref, timeout=_LAST_WORDS)


def _without_cause(
    failures: Mapping[int, Exception],
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
    if verdict is None or len(verdict.ranks) != 1:
        return WorkerTimeoutError(text, epoch=epoch)
    rank = verdict.ranks[0]
    error = WorkerTimeoutError(text, rank=rank, worker=rank, epoch=epoch)
    if places:
        place = places[rank]
        step = None if place.step < 0 else place.step
        error.add_fields(step=step, host=place.host or None, pid=place.pid or None)
    return error


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
    if isinstance(told, MinirayError):
        told.add_fields(rank=rank, worker=rank, epoch=epoch, step=step)
        if place is not None:
            told.add_fields(host=place.host or None, pid=place.pid or None)
    return told


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
            from miniray.train.run.progress import _bar_class, _size

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
