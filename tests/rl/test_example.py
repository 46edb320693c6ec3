"""The example learns, and leaves its curve."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo_text.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_model_learns_to_sort(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "25"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"reward ([\d.]+) -> ([\d.]+)", done.stdout).groups()
    assert float(first) < 0.5 < 0.75 < float(last)
    (folder,) = (tmp_path / "runs").iterdir()
    left = {path.name for path in folder.iterdir()}
    assert {"reward.png", "report.html", "metrics.jsonl", "checkpoints"} <= left
