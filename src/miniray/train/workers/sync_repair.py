"""Sync the workers, and repair a sync in which workers are lost.

The server changes nothing before all workers have taken the combined weights, so after a failure
the survivors may be ahead of it. Which weights count depends on when workers were lost:

- While weights were collected: no survivor was changed. The replacement becomes a copy of the first
  surviving worker, and the sync is repeated with all workers.
- While the combined weights were distributed: the survivors have them. The replacement and the
  server take them from a survivor, and nothing is combined twice. The memory of the strategy
  (momentum) is then that of the previous sync.
- No survivor: the replacements have the server's weights, and the sync is repeated with those.

After every sync, all workers have the weights of the server. The server counts a repaired sync as a
failed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import miniray
from miniray.errors import (
    ActorDiedError,
    GetTimeoutError,
    MinirayError,
    NonFiniteWeightsError,
    SyncError,
    TaskError,
    WeightsMismatchError,
)
from miniray.train.workers.group import LostAgainError, WorkerGroup, is_loss, located


def sync(
    group: WorkerGroup, server: Any, timeout: float | None, epoch: int | None
) -> tuple[dict[str, Any], bool]:
    """Sync all workers; returns the sync's figures and whether a failed one was made good.

    Raises what the server raised where every worker is well (an error of their code, or the
    server's end), and what ``WorkerGroup`` raises where no more failures may be spared.
    """
    while True:
        ref = server.sync_from_workers.remote(group.handles)
        try:
            return miniray.get(ref, timeout=timeout), False
        except (ActorDiedError, GetTimeoutError, SyncError) as error:
            before = list(group.handles)
            lost = _replaced(group, before, epoch)
            if not lost and not isinstance(error, GetTimeoutError):
                raise _told(error, group, epoch) from None
            # Else somebody was slow who answers now: the sync has as long once more.
        except TaskError as error:  # what the server found, or the strategy raised
            raise _told(error, group, epoch) from None
        failure = _failure(ref, timeout)
        if failure is not None and not set(failure.workers) <= set(lost):
            lost = _replaced(group, before, epoch)  # some may be lost since they were asked
            if not set(failure.workers) <= set(lost):
                raise _told(failure, group, epoch) from None  # another one's code raised as well
        survivors = [i for i in range(len(before)) if i not in lost]
        # After the call above: whatever the server sent a survivor has reached it.
        weights = _weights_of(group, survivors, timeout)
        if weights is not None:
            for worker_id in lost:
                _give(group, worker_id, weights, epoch)
        if failure is None:  # it was late, but it went through
            return miniray.get(ref), False
        if weights is not None and failure.phase == "distribute":
            version = miniray.get(server.set_weights.remote(weights))
            return {"synced": True, "version": version, "num_workers": len(before)}, True


def _told(error: Exception, group: WorkerGroup, epoch: int | None) -> Exception:
    """The server's error saying when. What is wrong with weights needs no traceback of ours."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (NonFiniteWeightsError, WeightsMismatchError)):
        error = cause
    told = located(error, "sync" if epoch is None else f"sync in {group.unit} {epoch}")
    if isinstance(told, MinirayError):
        told.add_fields(**{group.unit: epoch})
    return told


def _replaced(group: WorkerGroup, before: Sequence[Any], epoch: int | None) -> list[int]:
    """Finds out who is lost, and replaces it or raises what the user should see."""
    group.call("get_weights", lambda _: (), {}, epoch)
    return [i for i, handle in enumerate(before) if group.handles[i] is not handle]


def _weights_of(group: WorkerGroup, survivors: Sequence[int], timeout: float | None) -> Any:
    """A ref to the weights of the first survivor that still is one; None without any."""
    for worker_id in survivors:
        weights = group.handles[worker_id].get_weights.remote()
        try:
            miniray.get(weights, timeout=timeout)  # here, so that its loss is not another one's
        except Exception as error:
            if not is_loss(error):
                raise
        else:
            return weights
    return None


def _give(group: WorkerGroup, worker_id: int, weights: Any, epoch: int | None) -> None:
    """Give a replacement these weights, or the one that replaces it if it is lost too."""
    while True:
        try:
            group.set_up_call(worker_id, "set_weights", weights)
            return
        except LostAgainError as lost:
            group.recover(lost.error, worker_id, lost.method, epoch)


def _failure(ref: Any, timeout: float | None) -> SyncError | None:
    """Why the sync failed, now that nobody it waited for hangs any more; None if it did not."""
    try:
        miniray.get(ref, timeout=timeout)
    except SyncError as error:
        return error
    except GetTimeoutError:
        assert timeout is not None
        raise GetTimeoutError(
            f"the parameter server has not ended a sync in {2 * timeout:g} s, though all workers "
            "answer: it hangs, or worker_timeout is too short for weights of this size"
        ) from None
    return None
