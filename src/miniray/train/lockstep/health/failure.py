"""Find the root cause of a failure.

If a rank is lost or doesn't respond, the calls of the other ranks also fail, slightly earlier or
later. Their errors are consequences and aren't shown.

A rank may also fail without an error, if its weights differ from those of its replicas.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from miniray.counting import format_epoch
from miniray.doctor.findings import named
from miniray.errors import ActorDiedError, BarrierTimeoutError, MinirayError, WorkerTimeoutError
from miniray.train.lockstep.health.monitor import Verdict
from miniray.train.lockstep.health.status import RankPosition, format_position, is_consequence
from miniray.train.workers.errors import add_error_context

#: Hints by words in the message of a rank that crashed.
_HINTS = {
    "collective mismatch": "The ranks didn't make the same collective calls in the same order. "
    "Check for forward or backward passes that only some ranks run, and for parameters that only "
    "some ranks use in the loss",
    "process group has not been initialized": "The ranks join the process group after __init__. "
    "The trainer wraps self.model and shards self.train_loader. Create the model without DDP, and "
    "a DataLoader over all samples without a DistributedSampler",
}


def create_group_error(
    failures: Mapping[int, Exception],
    pending: list[int],
    verdict: Verdict | None,
    epoch: int | None,
    positions: list[RankPosition],
) -> Exception:
    """Return an error that names the missing ranks, if all errors are consequences."""
    messages = "\n".join(
        f"  rank {rank}: {str(getattr(error, 'cause', None) or error).splitlines()[0]}"
        for rank, error in sorted(failures.items())
    )
    if verdict is None and pending and positions:
        lines = [f"{named(pending)} didn't respond, and the others timed out waiting"]
        lines += [format_position(position) for position in positions if position.rank in pending]
        verdict = Verdict(pending, "\n".join([*lines, messages]))
    barrier = next((e for e in failures.values() if isinstance(e, BarrierTimeoutError)), None)
    if barrier is not None:
        text = str(getattr(barrier, "cause", None) or barrier)
    elif verdict is not None:
        text = verdict.text
    else:
        text = (
            "the ranks lost their connections, although all of them are alive. They didn't make "
            f"the same collective calls in the same order\n{messages}"
        )
    if verdict is None or len(verdict.ranks) != 1:
        return WorkerTimeoutError(text, epoch=epoch)
    rank = verdict.ranks[0]
    error = WorkerTimeoutError(text, rank=rank, worker=rank, epoch=epoch)
    if positions:
        position = positions[rank]
        step = None if position.step < 0 else position.step
        error.add_fields(step=step, host=position.host or None, pid=position.pid or None)
    return error


def describe_loss(
    lost: Exception, died_at: int | None, resumed_at: int | None, seconds: float
) -> str:
    """Return one line on which rank was lost and where training continues."""
    rank, code = getattr(lost, "rank", None), getattr(lost, "exit_code", None)
    signal = getattr(lost, "signal", None)
    if signal is not None:
        what = f"was killed ({signal})"
    elif code is not None:
        what = f"exited with code {code}"
    else:
        what = "was lost" if isinstance(lost, ActorDiedError) else "stopped responding"
    who = "ranks" if rank is None else f"rank {rank}"
    when = "" if died_at is None else f" at step {died_at}"
    where = "start over" if resumed_at is None else f"continue at step {resumed_at}"
    return f"{who} {what}{when}; all ranks restarted in {seconds:.2f} s and {where}"


def create_restart_event(
    lost: Exception,
    epoch: int | None,
    died_at: int | None,
    resumed_at: int | None,
    seconds: float,
) -> dict[str, Any]:
    """Return the event of a restart of all ranks.

    Args:
        lost: The error of the loss.
        epoch: The epoch, if the ranks trained.
        died_at: Completed steps of the run before the loss, if they are known.
        resumed_at: Completed steps of the state from which the ranks continue.
        seconds: How long training was interrupted.
    """
    event: dict[str, Any] = {"event": "ranks_restarted", "epoch": epoch, "reason": str(lost)}
    event |= {"rank": getattr(lost, "rank", None), "died_at_step": died_at}
    event |= {"resumed_at_step": resumed_at, "seconds": seconds}
    if died_at is not None and resumed_at is not None:
        event["lost_steps"] = max(0, died_at - resumed_at)
    event["message"] = describe_loss(lost, died_at, resumed_at, seconds)
    return event


class Divergence(NamedTuple):
    """A rank whose weights differ from those of other ranks that should hold the same."""

    rank: int
    parameters: list[str]

    def describe(self, step: int) -> str:
        more = len(self.parameters) - 1
        others = f" and {more} more" if more else ""
        return (
            f"rank {self.rank} has different weights than the other ranks after step {step}: "
            f"parameter {self.parameters[0]!r}{others}. No checkpoint was written. Check for code "
            "that changes parameters or gradients on some ranks only"
        )


def find_divergence(
    checksums: Sequence[Mapping[str, int]], replicas: Iterable[Sequence[int]]
) -> Divergence | None:
    """Return a rank that differs from most of its replicas, or from the first of two.

    Args:
        checksums: By rank and parameter.
        replicas: Groups of ranks that should hold the same weights.
    """
    for ranks in replicas:
        found = collections.Counter(tuple(checksums[rank].items()) for rank in ranks)
        expected = dict(found.most_common(1)[0][0])  # the first one of equals
        for rank in ranks:
            names = [n for n, value in checksums[rank].items() if value != expected[n]]
            if names:
                return Divergence(rank, names)
    return None


def find_root_cause(failures: Mapping[int, Exception]) -> tuple[int, Exception] | None:
    """Return rank and error of the first failure that isn't a consequence of a different one."""
    for rank, error in failures.items():
        if not is_consequence(error):
            return rank, error
    return None


def add_rank_context(
    error: Exception,
    rank: int,
    epoch: int | None,
    position: RankPosition | None,
    epochs: int | None = None,
) -> Exception:
    """Return ``error`` with rank, epoch and step in its message and fields. Types are kept.

    ``epochs`` is the number of epochs at the end of the run, if it is known.
    """
    when = "" if epoch is None else f" in {format_epoch(epoch, epochs)}"
    step = (
        position.step
        if position is not None and position.epoch == epoch and position.step >= 0
        else None
    )
    if step is not None:
        when += f", step {step}"
    hint = "".join(f"\n{text}" for words, text in _HINTS.items() if words in str(error))
    located_error = add_error_context(
        error, f"rank {rank}{when}", hint if isinstance(error, ActorDiedError) else ""
    )
    if isinstance(located_error, MinirayError):
        located_error.add_fields(rank=rank, worker=rank, epoch=epoch, step=step)
        if position is not None:
            located_error.add_fields(host=position.host or None, pid=position.pid or None)
    return located_error
