"""Reward functions that work, raise, return nonsense, and hang."""

import sys
import threading

import pytest

from miniray.rl import RewardError, RewardTimeoutError
from miniray.rl.rollouts.reward import Scorer, brief

ROWS = [{"prompt": f"p{i}", "image": b"x" * 1000} for i in range(4)]


def score(function, *, on_error="raise", timeout=30.0):
    scorer = Scorer(function, timeout=timeout, on_error=on_error, where="worker 1")
    return scorer.score(ROWS, "abcd", [f"step 7, sequence {i}" for i in range(4)])


@pytest.mark.parametrize("timeout", [30.0, None])
def test_numbers_and_dicts_of_numbers(timeout):
    assert score(lambda row, text: ord(text) - 97, timeout=timeout) == [
        {"reward": float(i)} for i in range(4)
    ]
    made = score(lambda row, text: {"reward": 1, "km": 5}, timeout=timeout)
    assert made == [{"reward": 1.0, "km": 5.0}] * 4


def fails_at_c(row, text):
    if text == "c":
        raise LookupError("no such place")
    return 1


@pytest.mark.parametrize("timeout", [30.0, None])
def test_an_exception_is_named_with_the_row_and_the_line(timeout, check_message):
    with pytest.raises(RewardError) as caught:
        score(fails_at_c, timeout=timeout)
    assert f"{__file__}:{fails_at_c.__code__.co_firstlineno + 2}" in str(caught.value)
    check_message(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)


@pytest.mark.parametrize("timeout", [30.0, None])
def test_one_that_wants_to_exit_has_failed(timeout):
    with pytest.raises(RewardError, match="SystemExit: 3"):
        score(lambda row, text: sys.exit(3), timeout=timeout)


@pytest.mark.parametrize("timeout", [30.0, None])
def test_what_fails_can_be_skipped(timeout):
    made = score(fails_at_c, on_error="skip", timeout=timeout)
    assert made == [{"reward": 1.0}, {"reward": 1.0}, None, {"reward": 1.0}]


@pytest.mark.parametrize(
    "result",
    [
        None,
        "good",
        float("nan"),
        {"score": 1},
        {"reward": 1, "why": "near"},
        {"reward": float("inf")},
        {"reward": 1, "loss": 2},
    ],
)
def test_results_that_are_no_reward(result, raises):
    with raises(RewardError):
        score(lambda row, text: result)
    assert score(lambda row, text: result, on_error="skip") == [None] * 4


LIMIT = 2.0  # long enough for what does not hang, on a busy machine too


def test_a_function_that_sleeps_is_named():
    released = threading.Event()

    def hangs_at_b(row, text):
        return released.wait(60) if text == "b" else 1

    wanted = r"sequence 1\b.*\b2 s\b.*threading\.py"
    try:
        with pytest.raises(RewardTimeoutError, match=wanted):
            score(hangs_at_b, timeout=LIMIT)
    finally:
        released.set()


def test_a_function_that_loops_is_ended_and_skipped():
    released, ended = threading.Event(), threading.Event()

    def hangs_at_b(row, text):
        try:
            while text == "b" and not released.is_set():
                pass
        finally:
            if text == "b":
                ended.set()
        return 1

    try:
        made = score(hangs_at_b, on_error="skip", timeout=LIMIT)
        assert made == [{"reward": 1.0}, None, {"reward": 1.0}, {"reward": 1.0}]
        assert ended.wait(30)  # by an exception: the event is not set yet
    finally:
        released.set()


def test_the_limit_is_for_each_row_and_not_for_all(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("miniray.rl.rollouts.reward.time.monotonic", lambda: now[0])

    def takes_nine(row, text):
        now[0] += 9
        return 1

    assert score(takes_nine, timeout=10) == [{"reward": 1.0}] * 4


def test_a_row_in_a_line():
    assert brief({"a": "x" * 500, "b": b"12"}).startswith("a='xxx")
    assert len(brief({"a": "x" * 500})) < 100
