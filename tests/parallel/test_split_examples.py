"""The examples run as they are, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def run(folder, script, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / script, *arguments],
        cwd=folder,
        env={**os.environ, "MINIRAY_BACKEND": "local"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [(), ("--workers", "2", "--data-parallel", "2", "--schedule", "zero_bubble")],
    ids=["4 stages", "2 copies"],
)
def test_a_gpt_in_stages_learns_its_story(tmp_path, options):
    pytest.importorskip("matplotlib")
    shown = run(tmp_path, "pipeline_gpt.py", "--epochs", "2", *options)
    first, last = map(float, re.search(r"Loss: ([\d.]+) -> ([\d.]+)", shown).groups())
    assert last < first < 4
    assert list((tmp_path / "runs").glob("*/pipeline.png"))
    assert "The ferry left the island" in shown


def test_a_model_in_shards_reads_digits(tmp_path):
    pytest.importorskip("sklearn")
    for options in ((), ("--by-hand", "--workers", "4")):
        shown = run(tmp_path, "tensor_parallel_mlp.py", "--epochs", "4", *options)
        assert float(re.search(r"held-out accuracy ([\d.]+)%", shown)[1]) > 88
        whole, mine = re.search(r"weights: ([\d,]+) bytes, ([\d,]+) on each", shown).groups()
        assert int(mine.replace(",", "")) < 0.6 * int(whole.replace(",", ""))
