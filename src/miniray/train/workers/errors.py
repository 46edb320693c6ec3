"""Add the worker, the epoch and the user's method to errors of workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from miniray.counting import format_epoch
from miniray.errors import MinirayError, TaskError
from miniray.train.workers.budget import is_loss

#: Methods of ``WorkerActor`` and the user's methods that they call, which errors name.
USER_METHODS = {
    "_check_validation": "validation_step",
    "assign_data": "load_data_shard",
    "check_validation": "validation_step",
    "evaluate_together": "evaluate",
    "run_rank_epoch": "train_epoch",
    "train_on_shard": "train_epoch",
    "train_steps_on_shard": "train_steps",
}

_READ_ONLY = "Arrays of another process are read-only: set_weights() must copy them, np.array(new)"


class ReplacementLostError(Exception):
    """A replacement crashed or hung during its setup; ``recover`` creates a new one."""

    def __init__(self, error: Exception, method: str) -> None:
        super().__init__(str(error))
        self.error, self.method = error, method


@contextlib.contextmanager
def report_replacement_loss(method: str, worker_id: int | None = None) -> Iterator[None]:
    """Raise ``ReplacementLostError`` if the replacement that is called inside is lost."""
    try:
        yield
    except Exception as error:
        if is_loss(error):
            raise ReplacementLostError(error, method) from None
        if worker_id is None:
            raise
        raise add_worker_context(error, worker_id, method, None) from error.__cause__


def add_worker_context(
    error: Exception,
    worker_id: int,
    method: str,
    epoch: int | None,
    unit: str = "epoch",
    epochs: int | None = None,
) -> Exception:
    """Return ``error`` with worker, method and epoch in message and fields; types are kept."""
    when = "" if epoch is None else f" in {format_epoch(epoch, epochs, unit)}"
    call = "" if isinstance(error, TaskError) else f", {USER_METHODS.get(method, method)}()"
    told = add_error_context(error, f"worker {worker_id}{call}{when}")
    if isinstance(told, MinirayError):
        told.add_fields(worker=worker_id, **{unit: epoch})
    return told


def add_error_context(error: Exception, where: str, meant: str = "") -> Exception:
    """Return ``error`` with ``where`` before its message if it is miniray's. Types are kept.

    ``meant`` is added after the message, unless the error is an exception of user code.
    """
    if isinstance(error, TaskError):
        owner, dot, method = error.function.rpartition(".")
        function = f"{where}: {owner}{dot}{USER_METHODS.get(method, method)}"
        trace = error.remote_traceback
        if isinstance(error, ValueError) and "read-only" in str(error.cause):
            trace = f"{trace.rstrip()}\n{_READ_ONLY}"
        copy = TaskError(function, error.actor, error.pid or 0, trace, error.cause).as_cause_type()
        copy.add_fields(**{name: vars(error).get(name) for name in error.FIELDS})
        return copy
    if not isinstance(error, MinirayError):
        return error
    told = type(error)(f"{where}: {error}{meant}")
    vars(told).update(vars(error))
    return told
