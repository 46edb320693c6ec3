"""When a trainer restarts its ranks: a table of failures and outcomes, without processes."""

import pytest

pytest.importorskip("torch")

from miniray.errors import ActorDiedError, BarrierTimeoutError, TaskError, WorkerTimeoutError
from miniray.train import DDPTrainer
from tests.train.ddp_for_tests import Stepper


class Recorder(DDPTrainer):
    """Records restarts instead of restarting; each one raises the next of ``restart_errors``."""

    def __init__(self, max_failures, restart_errors):
        super().__init__(2, worker=Stepper, max_failures=max_failures, progress=False)
        self.restarts, self.failed_ranks = [], []
        self.restart_errors = restart_errors
        self.session.append_event = self._record_event

    def _start_again(self, epoch, reason):
        self.restarts.append(reason)
        if self.restart_errors:
            raise self.restart_errors.pop(0)

    def _record_event(self, event):
        assert event["event"] == "worker_failed"
        self.failed_ranks.append(event["worker"])


class RaisedByUserCode(TaskError, ActorDiedError):
    """An ``ActorDiedError`` of an actor that the worker itself had called."""


DIED, HUNG = ActorDiedError("rank 1 died", rank=1), WorkerTimeoutError("rank 0 hangs", rank=0)
BAD_INIT = ActorDiedError("no model", rank=1, in_init=True)
USER_CODE = RaisedByUserCode("Worker.step", "worker-1", 1, "Traceback")
ANY = ValueError("a bad row"), BarrierTimeoutError("too late")


@pytest.mark.parametrize(
    ("max_failures", "errors", "raised", "restarts"),
    [
        (0, [], None, 0),
        (0, [DIED], DIED, 0),
        (1, [DIED], None, 1),
        (1, [HUNG], None, 1),
        (1, [DIED, HUNG], HUNG, 1),
        (2, [DIED, HUNG], None, 2),
        (5, [BAD_INIT], BAD_INIT, 0),
        (5, [USER_CODE], USER_CODE, 0),
        (5, [ANY[0]], ANY[0], 0),
        (5, [ANY[1]], ANY[1], 0),
        (5, [DIED, BAD_INIT], BAD_INIT, 1),
        (5, [DIED, ANY[0]], ANY[0], 1),
    ],
)
@pytest.mark.parametrize("is_restart_failing", [False, True])
def test_restart_depends_on_error_and_failures_left(
    is_restart_failing, max_failures, errors, raised, restarts
):
    """An error while ranks restart counts like one in the next attempt."""
    left = list(errors)
    trainer = Recorder(max_failures, left if is_restart_failing else [])

    def attempt():
        if left and (not is_restart_failing or not trainer.restarts):
            raise left.pop(0)
        return "result"

    try:
        outcome = trainer._retried(attempt)
    except Exception as error:
        outcome = error
    lost = [error for error in errors if error in (DIED, HUNG)]
    assert outcome == (raised or "result")
    assert trainer.failed_ranks == [error.rank for error in lost]
    assert trainer.failures == len(lost)
    assert trainer.restarts == [str(error) for error in lost[:restarts]]


def test_failure_in_a_nested_attempt_repeats_the_outer_one():
    """A rank lost while a checkpoint gathers weights repeats the checkpoint, not the gathering."""
    trainer, calls, errors = Recorder(1, []), [], [DIED]

    def inner():
        calls.append("inner")
        if errors:
            raise errors.pop()

    def outer():
        calls.append("outer")
        trainer._retried(inner)
        return "result"

    assert trainer._retried(outer) == "result"
    assert calls == ["outer", "inner", "outer", "inner"]
    assert (trainer.failures, len(trainer.restarts)) == (1, 1)
