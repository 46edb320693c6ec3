"""`miniray demo`: the numbers are right, the files are there, a log stays readable."""

import json
import re

import numpy as np
import pytest

from miniray.cli import _run

SMALL = ["demo", "--actors", "3", "--batches", "5", "--batch-size", "2000", "--seed", "7"]


def expected_hits(actor, seed=7, batches=5, points=2000):
    """What an actor's own random stream gives, without any engine."""
    random = np.random.default_rng([seed, actor])
    hits = 0
    for _ in range(batches):
        x, y = random.random((2, points))
        hits += int(np.count_nonzero(x**2 + y**2 < 1))
    return hits


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_the_result_depends_on_the_seed_only(miniray_cli, tmp_path, backend):
    done = miniray_cli(*SMALL, "--backend", backend, "--name", "first")
    assert done.returncode == 0, done.stderr
    run = json.loads((tmp_path / "runs" / "first" / "run.json").read_text("utf-8"))
    assert (run["state"], run["seed"], run["world_size"]) == ("finished", 7, 3)
    assert run["config"]["backend"] == backend
    assert [a["hits"] for a in run["actors"]] == [expected_hits(i) for i in range(3)]
    assert [a["points"] for a in run["actors"]] == [10_000] * 3
    share = sum(expected_hits(i) for i in range(3)) / 30_000
    lines = (tmp_path / "runs" / "first" / "metrics.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 15
    last = json.loads(lines[-1])
    assert last["step"] == 15
    assert last["pi"] == pytest.approx(4 * share)
    assert last["standard_error"] == pytest.approx(4 * (share * (1 - share) / 30_000) ** 0.5)


def test_it_ends_with_a_table_and_the_path_of_the_report(miniray_cli, tmp_path):
    done = miniray_cli(*SMALL, "--backend", "inline", "--name", "first")
    path = re.search(r"^Report: (.+)$", done.stdout, re.MULTILINE)[1]
    assert (tmp_path / path).is_file()
    rows = re.findall(r"│ (\w+) +│ +([\d,]+) │", done.stdout)
    assert rows == [("0", "10,000"), ("1", "10,000"), ("2", "10,000"), ("all", "30,000")]


def test_the_report_stands_alone(miniray_cli, tmp_path):
    miniray_cli(*SMALL, "--backend", "inline", "--name", "first")
    page = (tmp_path / "runs" / "first" / "report.html").read_text("utf-8")
    estimate = 4 * sum(expected_hits(i) for i in range(3)) / 30_000
    assert f"<b>{estimate:.4g}</b>" in page
    assert "pi by step" in page
    assert "<svg" in page
    assert "prefers-color-scheme: dark" in page
    assert not re.search(r"https?:|src=|href=|<script|url\(|@import", page)


def test_without_a_terminal_progress_is_plain_lines(miniray_cli):
    done = miniray_cli(*SMALL, "--backend", "inline")
    lines = done.stderr.splitlines()
    assert "\r" not in done.stderr
    assert lines[-1].startswith("darts: 15/15 batches  π ≈ ")
    assert 1 < len(lines) <= 15


def test_on_a_terminal_there_is_a_bar(miniray_on_terminal):
    code, screen = miniray_on_terminal(*SMALL, "--backend", "inline")
    assert code == 0
    assert re.search(r"\rdarts: +\d+%\|", screen)
    assert "15/15" in screen


def test_two_runs_get_two_folders(miniray_cli, tmp_path):
    for _ in range(2):
        assert miniray_cli(*SMALL, "--backend", "inline").returncode == 0
    folders = list((tmp_path / "runs").iterdir())
    assert len(folders) == 2
    assert all(re.fullmatch(r"monte-carlo-\d{8}-\d{6}(-2)?", f.name) for f in folders)


@pytest.mark.parametrize("name", ["..", "a/b", "/tmp/x", ""])
def test_a_name_cannot_lead_out_of_the_folder(monkeypatch, tmp_path, capsys, name):
    monkeypatch.chdir(tmp_path)
    assert _run([*SMALL, "--backend", "inline", "--name", name], debug=False) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert repr(name) in error
    assert list(tmp_path.iterdir()) == []
