"""The history of steps: even over the whole run and across attempts."""

import itertools
import os
import random

import pytest

from miniray import report
from miniray.doctor import layout, recorder
from miniray.doctor.box import Box
from miniray.doctor.history import StepHistory
from miniray.doctor.reader import read_box
from tests.doctor.helpers import Ranks

S = 10**9  # nanoseconds


@pytest.fixture
def box(tmp_path):
    box = Box.create(tmp_path / "0.box")
    box.write_info({"rank": 0, "world_size": 1})
    yield box
    box.close()


def add_steps(history, steps, first=1):
    for step in range(first, first + steps):
        history.add(step, step // 100, (4 * S, S, S, S), float(step), 8, step * S)


def check_even(entries, steps):
    """Entries cover every step once, in order, and all but the last are of one width."""
    covered = [step for e in entries for step in range(e.step - e.count + 1, e.step + 1)]
    assert covered == list(range(1, steps + 1))
    widths = {e.count for e in entries[:-1]}
    assert len(widths) <= 1
    for e in entries:
        assert (e.seconds, e.data, e.compute, e.loss) == (4 * e.count, e.count, e.count, e.step)


@pytest.mark.parametrize("steps", [1, 7, 1024, 1025, 1026, 2049, 5000, 50_001])
def test_a_history_covers_every_step_evenly(box, steps):
    add_steps(StepHistory(box), steps)
    entries = read_box(box.path).history
    check_even(entries, steps)
    if steps > layout.HISTORY_SLOTS:
        assert layout.HISTORY_SLOTS // 2 <= len(entries) <= layout.HISTORY_SLOTS


def test_a_history_is_whole_after_every_step(box):
    history = StepHistory(box)
    for step in range(1, 2100):
        add_steps(history, 1, step)
        if step % 50 == 0 or step in range(1020, 1030) or step in range(2045, 2052):
            check_even(read_box(box.path).history, step)


def test_attempts_share_the_slots(tmp_path):
    """Each attempt keeps all that its predecessors left, thinned, with its number."""
    lengths = [3000, 5, 1, 700, 20_000]
    before = ()
    for number in range(len(lengths)):
        box = Box.create(tmp_path / f"{number}.box")
        box.write_info({"rank": 0, "world_size": 1})
        history = StepHistory(box)
        history.begin_attempt(before)
        add_steps(history, lengths[number])
        record = read_box(box.path)
        before = record.history
        box.close()
        assert len(before) <= layout.HISTORY_SLOTS
        assert record.total.attempt == number
        by_attempt = {k: list(v) for k, v in itertools.groupby(before, lambda e: e.attempt)}
        assert list(by_attempt) == list(range(number + 1))
        for attempt, entries in by_attempt.items():
            check_even(entries, lengths[attempt])
        assert record.steps == tuple(by_attempt[number])


def test_very_many_attempts_lose_the_oldest(tmp_path):
    before = ()
    for number in range(3):
        box = Box.create(tmp_path / f"{number}.box")
        box.write_info({"rank": 0, "world_size": 1})
        history = StepHistory(box)
        history.begin_attempt(before)
        for attempt in range(1000):
            history._attempt = number * 1000 + attempt
            history._strides.setdefault(history._attempt, 1)
            add_steps(history, 1)
        before = read_box(box.path).history
        box.close()
    assert before[-1].attempt == 2999
    assert len(before) == layout.HISTORY_SLOTS


def train(run_dir, attempt, steps):
    current = recorder.start(run_dir, 0, 1, attempt=attempt)
    current.begin_steps()
    for _ in range(steps):
        current.set_loss(1.0, "")
        current.end_step(current.next_flush)


@pytest.mark.parametrize("archived", [False, True])
def test_a_restarted_rank_keeps_the_curve_of_its_attempts(tmp_path, archived):
    """The report draws a curve for each of them."""
    ranks = Ranks()
    for attempt, steps in enumerate((600, 40, 20)):
        ranks.start(train, tmp_path, attempt, steps)
        assert ranks.wait() == [0]
        path = tmp_path / "ranks" / "0.box"
        if archived and attempt < 2:  # the launcher did it before the rank was restarted
            recorder.archive(path, attempt)
            os.utime(tmp_path / "ranks" / f"attempt-{attempt}" / "0.box", (attempt, attempt))
    record = read_box(path)
    lengths = {k: len(list(v)) for k, v in itertools.groupby(record.history, lambda e: e.attempt)}
    assert lengths == {0: 300, 1: 40, 2: 20}
    assert (len(record.steps), record.total.count) == (20, 20)
    page = report.render(report.read(tmp_path))
    for attempt in (1, 2, 3):
        assert f"rank 0, attempt {attempt}" in page


def test_a_damaged_record_of_an_earlier_attempt_does_not_stop_the_next(tmp_path):
    chance = random.Random(0)
    ranks = Ranks()
    ranks.start(train, tmp_path, 0, 30)
    assert ranks.wait() == [0]
    path = tmp_path / "ranks" / "0.box"
    whole = path.read_bytes()
    for _ in range(20):
        data = bytearray(whole)
        for _ in range(10):
            data[layout.STEPS_AT + chance.randrange(31 * layout.STEP.size)] = chance.randrange(256)
        path.write_bytes(data)
        ranks.start(train, tmp_path, 1, 3)
        assert ranks.wait() == [0]
