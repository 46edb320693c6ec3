"""When ranks restart: a table of failures and outcomes, without processes."""

import math
from pathlib import Path

import pytest

import miniray
from miniray.errors import ActorDiedError, BarrierTimeoutError, TaskError, WorkerTimeoutError
from miniray.train.lockstep.group import LockstepGroup
from miniray.train.lockstep.snapshots.arena import SnapshotWriter
from miniray.train.lockstep.snapshots.memory import SnapshotNeed, StepSnapshots
from miniray.train.lockstep.snapshots.state import Keep, RankSnapshots
from miniray.train.workers.budget import FailureBudget


class Recorder(LockstepGroup):
    """Records restarts instead of restarting; each one raises the next of ``restart_errors``."""

    def __init__(self, max_failures, restart_errors=()):
        super().__init__(
            count=2,
            create=None,
            required=(),
            prepare=None,
            snapshots=RankSnapshots(None, None),
            step_snapshots=StepSnapshots(None, None),
            budget=FailureBudget(max_failures),
            name="test",
            backend="gloo",
            timeout=1,
            hang_timeout=math.inf,
            call_timeout=None,
            run_dir=Path("run"),
            shows_progress=False,
            describe_part=lambda rank: None,
            on_event=self.record_event,
            on_restored=None,
            on_replaced=self.record_event,
            on_poll=None,
        )
        self.restarts, self.failed_ranks = [], []
        self.restart_errors = restart_errors

    def _restart(self, lost, epoch, epoch_start):
        self.restarts.append(str(lost))
        if self.restart_errors:
            raise self.restart_errors.pop(0)

    def record_event(self, event):
        assert (event["event"], event["epoch"]) == ("worker_failed", 3)
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
    group = Recorder(max_failures, left if is_restart_failing else [])

    def attempt():
        if left and (not is_restart_failing or not group.restarts):
            raise left.pop(0)
        return "result"

    try:
        outcome = group.run(attempt, epoch=3, keep=Keep.NOTHING)
    except Exception as error:
        outcome = error
    lost = [error for error in errors if error in (DIED, HUNG)]
    assert outcome == (raised or "result")
    assert group.failed_ranks == [error.rank for error in lost]
    assert group.budget.failures == len(lost)
    assert group.restarts == [str(error) for error in lost[:restarts]]


def test_loss_while_state_is_kept_repeats_the_attempt():
    """The snapshot of a restart must never be older than the last result."""
    group, calls, errors = Recorder(1), [], [DIED]

    def fetch(method):
        calls.append(method)
        if errors:
            raise errors.pop()
        return ["random numbers"]

    group.call_ranks = fetch
    group.snapshots.set(0, "weights", "shared", [])
    assert group.run(lambda: calls.append("attempt"), epoch=3, keep=Keep.OWN) is None
    assert calls == ["attempt", "get_state", "attempt"]
    assert group.snapshots.is_empty  # no failure is left: nothing is kept
    assert (group.budget.failures, len(group.restarts)) == (1, 1)


@pytest.fixture
def with_memory():
    """Ranks that have memory for snapshots, in which they have written steps 3 and 6."""
    with miniray.init(backend="inline"):
        group = Recorder(1)
        group.step_snapshots = StepSnapshots(3, [].append)
        assert group.step_snapshots.reserve([SnapshotNeed(10_000)])
        (buffer,) = group.step_snapshots.buffers
        writer = SnapshotWriter(buffer, group.step_snapshots.num_slots, 0, 1)
        for step in (3, 6):
            writer.save(step, {"lr": 0.1}, {})
        yield group, writer
        group.step_snapshots.close()


def test_state_after_a_call_is_kept_in_shared_memory(with_memory):
    group, writer = with_memory

    def keep(method, arguments):
        (count,) = arguments(0)
        assert (method, writer.save(6, {"lr": 0.2}, {}, count)) == ("keep_snapshot", True)
        return [6]

    group.call_ranks = keep
    assert group.run(lambda: "result", keep=Keep.ALL) == "result"
    assert (group.snapshots.step, group.snapshots.is_empty) == (6, False)
    group.take_newest_snapshot()
    assert group.snapshots.create_call().method == "restore_snapshot"
    assert group.snapshots.get_parts(lambda snapshot: (snapshot.shared,)) == ({"lr": 0.2},)


def test_state_that_outgrew_the_memory_is_collected(with_memory):
    group, _ = with_memory
    group.snapshots = RankSnapshots(list, list)
    part = {"step": 6, "weights": [1.0], "shared": "shared", "own": "random numbers"}
    answers = {"keep_snapshot": [None], "get_snapshot": [part]}
    group.call_ranks = lambda method, *_: answers[method]
    assert group.run(lambda: "result", keep=Keep.OWN) == "result"
    group.take_newest_snapshot()  # steps 3 and 6 were written before
    assert group.snapshots.get_parts(None) == ([[1.0]], ["shared"], ["random numbers"])
