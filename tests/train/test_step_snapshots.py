"""The memory for snapshots inside epochs, and how often ranks write one: without ranks."""

from __future__ import annotations

import warnings

import pytest

import miniray
from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.train.lockstep.health.failure import describe_loss
from miniray.train.lockstep.snapshots.arena import SnapshotWriter
from miniray.train.lockstep.snapshots.memory import SnapshotNeed, StepSnapshots
from miniray.train.run.step_log import LogWindow


@pytest.fixture(autouse=True)
def engine():
    with miniray.init(backend="inline"):
        yield


def create(requested):
    events = []
    return StepSnapshots(requested, events.append), events


def make_window(step, steps, seconds):
    return LogWindow(step, 0, {}, {}, 0, steps, seconds)


def test_too_little_memory_is_one_warning_with_the_bytes():
    snapshots, events = create("auto")
    with pytest.warns(UserWarning, match=str(2 * 2 * (1 << 50))):
        assert not snapshots.reserve([SnapshotNeed(1 << 50)] * 2)
    assert (snapshots.is_pending, snapshots.every, snapshots.buffers) == (False, None, [])
    assert [event["event"] for event in events] == ["snapshots_disabled"]
    assert events[0]["bytes"] == 2 * 2 * (1 << 50)


@pytest.mark.parametrize(("requested", "is_warning"), [("auto", False), (5, True)])
def test_loader_without_position_is_a_warning_only_if_snapshots_were_requested(
    requested, is_warning
):
    snapshots, events = create(requested)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not snapshots.reserve([SnapshotNeed(10_000), SnapshotNeed(0, "no position")])
    assert bool(caught) == is_warning
    assert (events[0]["event"], events[0]["reason"]) == ("snapshots_disabled", "no position")


def test_auto_limits_copies_to_half_a_percent():
    snapshots, events = create("auto")
    assert snapshots.reserve([SnapshotNeed(10_000)])
    snapshots.start(0.0015, 0.3)
    assert snapshots.every == 1
    assert snapshots.tune([make_window(1, 1, 5.0)]) is None  # the first step is slower
    assert snapshots.tune([make_window(10, 9, 9 * 0.025)]) is None
    assert snapshots.tune([make_window(20, 10, 10 * 0.025)]) == 12
    assert snapshots.every == 12
    assert snapshots.tune([make_window(30, 10, 100.0)]) is None  # chosen once
    assert [event["event"] for event in events] == ["snapshots_started", "snapshots_tuned"]
    assert events[1]["every"] == 12
    assert events[1]["copy_seconds"] == 0.0015


def test_fixed_interval_is_not_tuned():
    snapshots, _ = create(7)
    assert snapshots.reserve([SnapshotNeed(10_000)])
    snapshots.start(1.0, 1.0)
    assert snapshots.tune([make_window(100, 50, 1.0)]) is None
    assert snapshots.every == 7


@pytest.mark.parametrize(
    ("error", "died_at", "resumed_at", "line"),
    [
        (
            ActorDiedError("gone", rank=1, signal="SIGKILL"), 57, 48,
            "rank 1 was killed (SIGKILL) at step 57; "
            "all ranks restarted in 0.31 s and continue at step 48",
        ),
        (
            ActorDiedError("gone", rank=0, exit_code=3), None, 48,
            "rank 0 exited with code 3; all ranks restarted in 0.31 s and continue at step 48",
        ),
        (
            WorkerTimeoutError("hangs", rank=2), 5, None,
            "rank 2 stopped responding at step 5; all ranks restarted in 0.31 s and start over",
        ),
        (
            WorkerTimeoutError("all hang"), 5, 4,
            "ranks stopped responding at step 5; "
            "all ranks restarted in 0.31 s and continue at step 4",
        ),
    ],
)  # fmt: skip
def test_one_line_tells_what_was_lost(error, died_at, resumed_at, line):
    assert describe_loss(error, died_at, resumed_at, 0.312) == line


@pytest.mark.parametrize(("after", "found"), [(None, 6), (3, 6), (6, None), (8, None)])
def test_newest_snapshot_counts_if_it_is_newer_and_is_taken_once(after, found):
    snapshots, _ = create(3)
    assert snapshots.reserve([SnapshotNeed(10_000)])
    writer = SnapshotWriter(snapshots.buffers[0], snapshots.num_slots, 0, 1)
    for step in (3, 6):
        writer.save(step, {"step": step}, {})
    taken = snapshots.take_newest(after)
    assert (None if taken is None else taken.step) == found
    assert snapshots.take_newest(None) is None
