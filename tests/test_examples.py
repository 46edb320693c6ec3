"""The examples run as they are, and give the right answer."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_monte_carlo():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "monte_carlo.py", "5000"],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    hits = 0
    for seed in range(4):
        x, y = np.random.default_rng(seed).random((2, 5000))
        hits += int(np.count_nonzero(x**2 + y**2 < 1))
    value, error = re.fullmatch(r"pi is ([\d.]+) \+- ([\d.]+)\n", done.stdout).groups()
    assert float(value) == pytest.approx(4 * hits / 20_000, abs=1e-5)
    assert float(error) == pytest.approx(0.0116, abs=1e-3)  # 4 √(π/4 (1 - π/4) / 20000)
