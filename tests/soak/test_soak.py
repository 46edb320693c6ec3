"""The soak, for as long as a test may take: it finds nothing, and would find something."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import accounts, watch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "soak.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.soak", "--minutes", "0.33", "--seed", "1"),
            *("--folder", str(tmp_path / "soak"), "--out", str(out)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["ok"]
    assert report["problems"] == []
    assert report["lives"] >= 2
    assert all(report["faults"][kind] for kind in ("kill", "stop", "pause", "slow", "SIGKILL"))
    assert report["rounds"] > 0
    assert report["worker_failures"] > 0


def a_round(number, *delivered, lost=()):
    calls = [f"{number}-{i}" for i in range(len(delivered))]
    return {
        "calls": calls,
        "lost": [calls[i] for i in lost],
        "loss": 1.0,
        "rounds": float(number + 1),
        "workers": len(delivered),
        "delivered": list(delivered),
    }


GOOD = [a_round(0, (0, [0, 1]), (0, [2])), a_round(1, (0, [3, 4])), a_round(2, (1, [4]))]


def test_accounts_that_add_up():
    figures, wrong = accounts.check(GOOD, 5)
    assert wrong == []
    assert (figures["rounds"], figures["passes"], figures["rows"]) == (3, 1, 6)


def test_a_round_that_nobody_survived_may_be_lost():
    second = {**a_round(1, (0, [3, 4]), lost=[0]), "rounds": 1.0}
    figures, wrong = accounts.check([GOOD[0], second, {**GOOD[2], "rounds": 2.0}], 5)
    assert (wrong, figures["rounds_nobody_survived"]) == ([], 1)


@pytest.mark.parametrize(
    ("rounds", "words"),
    [
        ([GOOD[0], a_round(1, (0, [2, 3, 4])), GOOD[2]], "pass 0: 1 rows more than once, as row 2"),
        ([GOOD[0], a_round(1, (0, [3])), GOOD[2]], "pass 0: 1 rows never"),
        ([*GOOD[:2], a_round(2, (2, [4]))], "passes [0, 2] are not all"),
        ([GOOD[0], {**GOOD[1], "rounds": 1.0}], "round 1: 0 rounds more are in the weights, not 1"),
        ([GOOD[0], {**GOOD[1], "rounds": 3.0}], "round 1: 2 rounds more are in the weights, not 1"),
    ],
)
def test_accounts_that_do_not(rounds, words):
    wrong = accounts.check(rounds, 5)[1]
    assert any(words in text for text in wrong), wrong


def test_growth_is_seen_and_a_spike_is_not():
    flat = [(float(t), 100.0 + 50.0 * (t % 20 == 0), 10) for t in range(120)]
    assert watch.growth(flat) == (0.0, 100.0)
    growing = [(float(t), 100.0 + t / 10, 10) for t in range(120)]
    assert watch.growth(growing)[0] == pytest.approx(6.0)
    assert watch.growth(growing[:20]) is None
