"""Named barriers among real processes, without torch."""

import json
import os
import re
import signal
import time

import pytest

from miniray import doctor
from miniray.doctor import model, recorder
from miniray.doctor.reader import read_run
from miniray.errors import BarrierTimeoutError, MinirayError
from tests.doctor.helpers import Ranks, wait_until

LONG = 40.0  # a limit that no healthy run comes near to


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.end()


def told(folder, rank):
    """What a rank wrote down about the error it got."""
    return json.loads((folder / f"{rank}.json").read_text())


def is_waiting(folder, rank):
    record = read_run(folder).ranks.get(rank)
    return record is not None and record.waiting is not None


def attempt(folder, rank, world_size, names, timeout=LONG):
    """Be a rank that goes through barriers; an error is written down and not raised."""
    recorder.start(folder, rank, world_size, heartbeat_interval=0.1)
    try:
        for name in names:
            doctor.barrier(name, timeout=timeout)
        said = None
    except BarrierTimeoutError as error:
        said = {
            "name": error.name,
            "missing": list(error.missing),
            "rank": error.rank,
            "text": str(error),
        }
    (folder / f"{rank}.partial").write_text(json.dumps(said))
    (folder / f"{rank}.partial").rename(folder / f"{rank}.json")


def test_nobody_passes_before_the_last_one_came_a_hundred_times(ranks, tmp_path):
    def rank(number):
        recorder.start(tmp_path, number, 3)
        for turn in range(100):
            (tmp_path / f"{number}-{turn}").touch()
            doctor.barrier(f"turn {turn % 7}", timeout=LONG)
            assert all((tmp_path / f"{r}-{turn}").exists() for r in range(3))
            doctor.barrier("checked", timeout=LONG)

    for number in range(3):
        ranks.start(rank, number)
    assert ranks.wait() == [0, 0, 0]
    record = read_run(tmp_path).ranks[1]
    assert (record.barrier.number, record.barrier.name, record.barrier.passed) == (
        200,
        "checked",
        True,
    )
    assert [e.sequence for e in record.events if e.kind == model.BARRIER] == list(range(200))


def test_one_rank_alone_passes_at_once(ranks, tmp_path):
    ranks.start(attempt, tmp_path, 0, 1, ["alone"])
    assert ranks.wait() == [0]
    assert told(tmp_path, 0) is None


def test_a_missing_rank_is_named_on_every_rank_with_its_place(ranks, tmp_path):
    def busy_elsewhere():
        recorder.start(tmp_path, 1, 3)
        doctor.step(loss=1.0)
        with doctor.phase("prepare_data"):
            reading_a_file()

    def reading_a_file():
        time.sleep(60)

    ranks.start(busy_elsewhere)
    # Rank 0 has the shorter limit; rank 2 hears of it at once and does not wait for its own.
    ranks.start(attempt, tmp_path, 2, 3, ["before-iteration"], LONG)
    wait_until(lambda: is_waiting(tmp_path, 2) and 1 in read_run(tmp_path).ranks)
    ranks.start(attempt, tmp_path, 0, 3, ["before-iteration"], 0.5)
    wait_until(lambda: (tmp_path / "0.json").exists() and (tmp_path / "2.json").exists())
    for rank in (0, 2):
        error = told(tmp_path, rank)
        found = (error["name"], error["missing"], error["rank"])
        assert found == ("before-iteration", [1], rank)
        assert "1 of 3 ranks" in error["text"]
        assert "reading_a_file" in error["text"]  # from its stack
        assert "prepare_data" in error["text"]
        assert "test_barrier.py" in error["text"]
        assert f"{tmp_path}/doctor.txt" in error["text"]
    assert "rank 0" in told(tmp_path, 2)["text"]
    assert "rank 1" in (tmp_path / "doctor.txt").read_text()
    record = read_run(tmp_path).ranks[0]
    assert record.barrier.failed
    assert not record.barrier.passed


def test_another_name_is_said_at_once_on_both_sides(ranks, tmp_path):
    ranks.start(attempt, tmp_path, 0, 2, ["start", "validate"])
    ranks.start(attempt, tmp_path, 1, 2, ["start", "checkpoint"])
    assert ranks.wait() == [0, 0]
    first, second = told(tmp_path, 0), told(tmp_path, 1)
    assert (first["name"], first["missing"]) == ("validate", [1])
    assert (second["name"], second["missing"]) == ("checkpoint", [0])
    assert "barrier 'checkpoint'" in first["text"] + second["text"]


def test_a_rank_that_ended_is_said_at_once_with_why(ranks, tmp_path):
    def fails():
        recorder.start(tmp_path, 1, 2)
        raise ValueError("bad row 7")

    ranks.start(fails)
    assert ranks.wait() == [3]
    ranks.start(attempt, tmp_path, 0, 2, ["end"])
    assert ranks.wait() == [0]
    error = told(tmp_path, 0)
    assert error["missing"] == [1]
    assert re.search(r"rank 1\b.*\bended\b.*ValueError: bad row 7", error["text"], re.DOTALL)


def test_a_killed_rank_is_noticed_while_waiting(ranks, tmp_path):
    def waits():
        recorder.start(tmp_path, 1, 2)
        time.sleep(60)

    victim = ranks.start(waits)
    ranks.start(attempt, tmp_path, 0, 2, ["end"])
    wait_until(lambda: is_waiting(tmp_path, 0) and 1 in read_run(tmp_path).ranks)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: (tmp_path / "0.json").exists())
    assert "is gone" in told(tmp_path, 0)["text"]


def test_a_stopped_rank_and_one_that_never_started_are_told_apart(ranks, tmp_path):
    def stops():
        recorder.start(tmp_path, 1, 3)
        os.kill(os.getpid(), signal.SIGSTOP)

    ranks.start(stops)
    wait_until(
        lambda: 1 in read_run(tmp_path).ranks and read_run(tmp_path).ranks[1].process.stopped
    )
    ranks.start(attempt, tmp_path, 0, 3, ["start"], 0.5)
    wait_until(lambda: (tmp_path / "0.json").exists())
    error = told(tmp_path, 0)
    assert error["missing"] == [1, 2]
    assert re.search(r"rank 1\b.*\bstopped\b", error["text"])
    assert re.search(r"rank 2\b.*\bstarted\b", error["text"])


def test_who_comes_after_the_others_gave_up_raises_too(ranks, tmp_path):
    ranks.start(attempt, tmp_path, 0, 2, ["start"], 0.2)
    assert ranks.wait() == [0]
    # Its process is gone by now, but that it came and gave up is in its box.
    ranks.start(attempt, tmp_path, 1, 2, ["start"])
    assert ranks.wait() == [0]
    error = told(tmp_path, 1)
    assert (error["name"], error["missing"]) == ("start", [])
    assert "rank 0" in error["text"]


def test_misuse_is_refused(tmp_path):
    with pytest.raises(MinirayError):
        doctor.barrier("start")
    recorder.start(tmp_path, 0, 1)
    try:
        with pytest.raises(ValueError):
            doctor.barrier("start", timeout=0)
    finally:
        recorder.stop()
