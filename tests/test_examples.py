"""The examples run as they are, and give the right answer."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.timeout(180)  # seconds each, but on a crowded machine minutes

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def interpreter(script, *arguments, **options):
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def run(folder, script, *arguments, backend="local", start=interpreter):
    environment = {**os.environ, "MINIRAY_BACKEND": backend}
    done = start(EXAMPLES / script, *arguments, cwd=folder, env=environment, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_monte_carlo(tmp_path):
    shown = run(tmp_path, "monte_carlo.py", "5000")
    hits = 0
    for seed in range(4):
        x, y = np.random.default_rng(seed).random((2, 5000))
        hits += int(np.count_nonzero(x**2 + y**2 < 1))
    value, error = re.fullmatch(r"pi is ([\d.]+) \+- ([\d.]+)\n", shown).groups()
    assert float(value) == pytest.approx(4 * hits / 20_000, abs=1e-5)
    assert float(error) == pytest.approx(0.0116, abs=1e-3)  # 4 √(π/4 (1 - π/4) / 20000)


def test_one_framework_for_three_trainings(tmp_path):
    pytest.importorskip("sklearn")
    shown = run(tmp_path, "train_framework_demo.py")
    assert float(re.search(r"Held-out accuracy: ([\d.]+)%", shown)[1]) > 95
    (folder,) = (tmp_path / "runs").glob("ClassificationTrainer-*")
    left = {path.name for path in folder.iterdir()}
    assert {"report.html", "curves.png", "final_model.safetensors", "metrics.jsonl"} <= left
    assert "ClassificationTrainer" in (folder / "report.html").read_text("utf-8")
    slope, offset = re.search(r"y = ([\d.]+) x (-[\d.]+)", shown).groups()
    assert float(slope) == pytest.approx(3, abs=0.05)
    assert float(offset) == pytest.approx(-1, abs=0.05)
    # The hill exp(-(x-2)^2) + 0.1 cos 8x has its top where its derivative is 0, at 2.27.
    assert float(re.search(r"maximum at x = ([\d.]+)", shown)[1]) == pytest.approx(2.27, abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["inline", "ray"])
@pytest.mark.parametrize(
    "command",
    [
        ("train_framework_demo.py", "--workers", "2"),
        ("distributed_gan_v2.py", "--epochs", "10", "--workers", "2"),
    ],
    ids=lambda command: command[0],
)
def test_the_same_scripts_on_other_engines(tmp_path, command, backend):
    pytest.importorskip("sklearn")
    if backend == "ray":
        pytest.importorskip("ray")
    shown = run(tmp_path, *command, backend=backend)
    assert "curves:" in shown.lower()


def test_ddp_on_parquet_files(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    shown = run(tmp_path, "ddp_parquet.py")
    assert "Rows per epoch: 2000\n" in shown
    assert float(re.search(r"Accuracy: ([\d.]+)%", shown)[1]) > 95


def test_ddp_on_hugging_face_model(tmp_path, run_script):
    pytest.importorskip("transformers")
    shown = run(tmp_path, "ddp_hugging_face.py", "--steps", "120", start=run_script)
    assert "Steps: 120, " in shown
    assert "16 17 18 is continued with 19 0 1 2\n" in shown
    files = {path.name for path in (tmp_path / "counting-model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files


def test_a_model_without_torch(tmp_path):
    pytest.importorskip("sklearn")
    shown = run(tmp_path, "plain_numpy.py")
    assert float(re.search(r"held-out accuracy ([\d.]+)%", shown)[1]) > 95


@pytest.mark.slow
def test_the_transformer_reads_new_sentences(tmp_path, run_script):
    pytest.importorskip("torch")
    shown = run(tmp_path, "bert_tiny.py", start=run_script)
    assert float(re.search(r"new sentences ([\d.]+)%", shown)[1]) > 95


def test_ddp_reads_the_digits(tmp_path, run_script):
    pytest.importorskip("sklearn")
    shown = run(tmp_path, "ddp_digits.py", "--epochs", "6", start=run_script)
    assert float(re.search(r"Held-out accuracy: ([\d.]+)%", shown)[1]) > 95


@pytest.mark.slow
def test_the_gan_draws_its_samples(tmp_path, run_script):
    pytest.importorskip("sklearn")
    shown = run(
        tmp_path, "distributed_gan_v2.py", "--epochs", "10", "--workers", "2", start=run_script
    )
    assert "g_loss" in shown
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "samples-010.png").stat().st_size > 1000
    assert list((folder / "checkpoints").iterdir())


@pytest.mark.slow
def test_the_readme_shows_the_verdict_that_the_doctor_prints(tmp_path):
    readme = (EXAMPLES.parent / "README.md").read_text("utf-8")
    shown = re.search(r"^\$ miniray run (.*?)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    options, script = shown[1].rsplit(" ", 1)
    command = [sys.executable, "-m", "miniray", "run", *options.split(), EXAMPLES.parent / script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0

    def without_measurements(line):
        return re.sub(r"\s*\d[\d.]*", " #", line.rstrip())

    printed = {without_measurements(line) for line in (done.stdout + done.stderr).splitlines()}
    missing = {without_measurements(line) for line in shown[2].splitlines()} - printed
    assert missing == set()
