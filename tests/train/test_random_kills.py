"""SIGKILL of any process of a run at any moment: no hang, no lost checkpoint, no other bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.random_kills import KINDS

ROOT = Path(__file__).resolve().parents[2]
FAST = (4, 6)  # a driver that is killed is resumed, and a lost worker ends a run


def run(folder, seeds):
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.random_kills", str(folder), *map(str, seeds)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("seeds", "victims"),
    [
        (FAST, {"worker", "everything"}),
        pytest.param((0, 1, 3, 6, 9), set(KINDS), marks=pytest.mark.slow),
    ],
)
def test_killed_runs_are_taken_up_where_they_were(tmp_path, seeds, victims):
    seen = run(tmp_path / "runs", seeds)
    assert {found["victim"] for found in seen} == victims
    assert any(found["status"] != 0 for found in seen)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(100, 150, 10))
def test_killed_runs_are_taken_up_where_they_were_many_seeds(tmp_path, first):
    seen = run(tmp_path / "runs", range(first, first + 10))
    assert any(found["before"] > 0 for found in seen)  # some had saved something
