"""The example runs as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_an_epoch_that_goes_on_with_fewer_workers(tmp_path):
    pytest.importorskip("PIL")
    done = subprocess.run(
        [sys.executable, EXAMPLES / "data_elastic.py", "--photos", "300"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "3 workers read [48, 48, 48] photos" in done.stdout
    assert "2 workers read [78, 78] photos" in done.stdout
    assert "every photo exactly once: True" in done.stdout
