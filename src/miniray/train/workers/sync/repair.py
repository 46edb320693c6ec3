"""Sync the workers, and repair a sync in which workers are lost.

The server changes nothing before all workers have taken the combined weights, so after a failure
the survivors may be ahead of it. Which weights count depends on when workers were lost:

- While weights were collected: no survivor was changed. The replacement becomes a copy of the first
  surviving worker, and the sync is repeated with all workers.
- While the combined weights were distributed: the survivors have them. The replacement and the
  server take them from a survivor, and nothing is combined twice. The memory of the strategy
  (momentum) is then that of the previous sync.
- If there is no survivor: the replacements have the server's weights, and the sync is repeated.

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
from miniray.train.workers.budget import is_loss
from miniray.train.workers.errors import ReplacementLostError, add_error_context
from miniray.train.workers.group import WorkerGroup


def sync(
    group: WorkerGroup, server: Any, timeout: float | None, epoch: int | None
) -> tuple[dict[str, Any], bool]:
    """Sync all workers. Return the statistics, and whether a failed sync was repaired.

    If no worker is lost, the error of the server is raised: an exception in a worker's code, or the
    crash of the server. If ``max_failures`` is exceeded, the error of the lost worker is raised.
    """
    while True:
        ref = server.sync_from_workers.remote(group.handles)
        try:
            return miniray.get(ref, timeout=timeout), False
        except (ActorDiedError, GetTimeoutError, SyncError) as error:
            before = list(group.handles)
            lost = _replace_lost(group, before, epoch)
            if not lost and not isinstance(error, GetTimeoutError):
                raise _add_context(error, group, epoch) from None
            # Otherwise a slow worker answers now, and the sync gets the same time again.
        except TaskError as error:  # an error of the server or the strategy
            raise _add_context(error, group, epoch) from None
        failure = _get_failure(ref, timeout)
        if failure is not None and not set(failure.workers) <= set(lost):
            lost = _replace_lost(group, before, epoch)  # some may be lost since they were asked
            if not set(failure.workers) <= set(lost):
                raise _add_context(
                    failure, group, epoch
                ) from None  # the code of a different worker raised too
        survivors = [i for i in range(len(before)) if i not in lost]
        # The survivors answered the call above, so they have received all that the server sent.
        weights = _get_surviving_weights(group, survivors, timeout)
        if weights is not None:
            for worker_id in lost:
                _set_weights(group, worker_id, weights, epoch)
        if failure is None:  # it was late, but successful
            return miniray.get(ref), False
        if weights is not None and failure.phase == "distribute":
            version = miniray.get(server.set_weights.remote(weights))
            return {"synced": True, "version": version, "num_workers": len(before)}, True


def _add_context(error: Exception, group: WorkerGroup, epoch: int | None) -> Exception:
    """Return the error with the epoch, and without our traceback if the weights are invalid."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (NonFiniteWeightsError, WeightsMismatchError)):
        error = cause
    told = add_error_context(
        error, "sync" if epoch is None else f"sync in {group.format_epoch(epoch)}"
    )
    if isinstance(told, MinirayError):
        told.add_fields(**{group.unit: epoch})
    return told


def _replace_lost(group: WorkerGroup, before: Sequence[Any], epoch: int | None) -> list[int]:
    """Call all workers, replace the lost ones, and return their ids."""
    group.call("get_weights", lambda _: (), {}, epoch)
    return [i for i, handle in enumerate(before) if group.handles[i] is not handle]


def _get_surviving_weights(
    group: WorkerGroup, survivors: Sequence[int], timeout: float | None
) -> Any:
    """Return a ref to the weights of the first survivor that isn't lost. None if all are."""
    for worker_id in survivors:
        weights = group.handles[worker_id].get_weights.remote()
        try:
            miniray.get(weights, timeout=timeout)  # here, where a loss is known to be its own
        except Exception as error:
            if not is_loss(error):
                raise
        else:
            return weights
    return None


def _set_weights(group: WorkerGroup, worker_id: int, weights: Any, epoch: int | None) -> None:
    """Set weights on a replacement, or on the next one if it is lost too."""
    while True:
        try:
            group.set_up_call(worker_id, "set_weights", weights)
            return
        except ReplacementLostError as lost:
            group.recover(lost.error, worker_id, lost.method, epoch)


def _get_failure(ref: Any, timeout: float | None) -> SyncError | None:
    """Return the error of a sync whose hanging workers were replaced. None if it succeeded."""
    try:
        miniray.get(ref, timeout=timeout)
    except SyncError as error:
        return error
    except GetTimeoutError:
        assert timeout is not None
        raise GetTimeoutError(
            f"the parameter server didn't complete a sync in {2 * timeout:g} s, although all "
            "workers respond. It hangs, or worker_timeout is too short for weights of this size"
        ) from None
    return None
