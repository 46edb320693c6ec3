"""`demo NAME`, `bench`, `dashboard`, `run`: what is handed over, and what is said instead."""

import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from miniray import limits
from miniray.cli import _extract_debug, bench, cli, demo
from miniray.cli.run import run
from miniray.core import machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def handed_over(monkeypatch):
    """What the process would have become."""
    found = []
    monkeypatch.setattr(os, "execv", lambda program, args: found.append((program, args)))
    return found


def invoke(*args):
    return CliRunner().invoke(cli, args, prog_name="miniray")


@pytest.mark.parametrize(
    ("name", "given", "passed"),
    [
        ("classify", [], ["classification"]),
        ("classify", ["--workers", "2"], ["classification", "--workers", "2"]),
        ("gan", ["--help"], ["--help"]),
        ("geoguessr", ["--quick"], ["--quick"]),
        ("geoguessr", ["--steps", "5"], ["--steps", "5"]),
    ],
)
def test_a_demo_is_its_example(handed_over, name, given, passed):
    done = invoke("demo", name, *given)
    assert done.exit_code == 0, done.output
    script = str(ROOT / demo.SCRIPTS[name].path)
    assert handed_over == [(sys.executable, [sys.executable, script, *passed])]
    assert "$ python " in done.output


@pytest.mark.parametrize("name", list(demo.SCRIPTS))
def test_every_demo_has_its_example_in_the_checkout(name):
    assert demo.find_script(demo.SCRIPTS[name].path) == ROOT / demo.SCRIPTS[name].path


def test_a_demo_whose_packages_are_missing_says_what_to_install(handed_over, monkeypatch):
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == "sklearn" else object()
    )
    done = invoke("demo", "classify")
    assert done.exit_code == 1
    assert "scikit-learn" in done.output
    assert "pip install 'miniray[examples]'" in done.output
    assert handed_over == []
    listed = json.loads(invoke("demo", "--list", "--json").output)
    assert "scikit-learn" in listed["gan"]["obstacle"]
    assert listed["pipeline"]["obstacle"] == ""


def test_an_installation_without_sources(handed_over, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "PACKAGE", tmp_path / "lib" / "miniray")
    done = invoke("demo", "ddp")
    assert done.exit_code == 1
    assert "examples/ddp_digits.py" in done.output
    done = invoke("bench", "engine")
    assert done.exit_code == 1
    assert "pip install -e '.[bench]'" in done.output
    shipped = tmp_path / "lib" / "miniray" / "demos" / "scripts" / "examples" / "ddp_digits.py"
    shipped.parent.mkdir(parents=True)
    shipped.touch()
    assert invoke("demo", "ddp").exit_code == 0
    assert handed_over[-1][1][1] == str(shipped)


def test_an_unknown_demo_is_refused():
    done = invoke("demo", "chess")
    assert done.exit_code == 2
    assert "chess" in done.output


def test_benchmarks_are_listed_and_handed_over(handed_over):
    listed = invoke("bench").output
    found = bench.find_benchmarks()
    assert {"engine", "ps", "data", "train"} <= set(found)
    assert "common" not in found
    for name, (_, text) in found.items():
        assert f"  {name}" in listed
        assert text
    invoke("bench", "engine", "--quick", "--debug")
    script = str(ROOT / "benchmarks" / "engine.py")
    assert handed_over == [(sys.executable, [sys.executable, script, "--quick", "--debug"])]
    assert invoke("bench", "nothing").exit_code == 2


@pytest.mark.parametrize(
    ("args", "kept", "debug"),
    [
        (["--debug", "runs"], ["runs"], True),
        (["runs", "list", "--debug"], ["runs", "list"], True),
        (["run", "train.py", "--debug"], ["run", "train.py", "--debug"], False),
        (["run", "--debug", "train.py"], ["run", "train.py"], True),
        (["--debug", "run", "train.py", "--debug"], ["run", "train.py", "--debug"], True),
        (["doctor", "data", "t.py", "--debug"], ["doctor", "data", "t.py", "--debug"], False),
        (["doctor", "latest", "--debug"], ["doctor", "latest"], True),
        (["doctor", "speedup", "t.py", "--", "--debug"],
         ["doctor", "speedup", "t.py", "--", "--debug"], False),
        ([], [], False),
    ],
)  # fmt: skip
def test_the_scripts_own_debug_stays_its_own(args, kept, debug):
    assert _extract_debug(args) == (kept, debug)


def test_the_dashboard_gets_what_was_asked_for(monkeypatch, tmp_path):
    asked = []
    module = type(sys)("miniray.dashboard")
    module.serve = lambda root, **options: asked.append((root, options))
    monkeypatch.setitem(sys.modules, "miniray.dashboard", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    assert invoke("dashboard", "mine", "--port", "8080", "--no-browser").exit_code == 0
    assert invoke("dashboard").exit_code == 0
    assert invoke("dashboard", str(tmp_path / "runs")).exit_code == 0  # a folder of runs
    here = {"host": "127.0.0.1"}
    assert asked == [
        (tmp_path / "runs", {**here, "run": "mine", "port": 8080, "open_browser": False}),
        (Path("runs"), {**here, "run": None, "port": 0, "open_browser": True}),
        (tmp_path / "runs", {**here, "run": None, "port": 0, "open_browser": True}),
    ]


def test_a_port_that_is_taken_is_named(tmp_path):
    pytest.importorskip("plotly")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = invoke("dashboard", "--runs-dir", str(tmp_path), "--port", str(port))
    assert done.exit_code == 1
    assert str(port) in done.output


def test_a_missing_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    done = invoke("dashboard")
    assert done.exit_code == 1
    assert "plotly" in done.output
    assert done.output.count("pip install 'miniray[dashboard]'") == 1


@pytest.mark.parametrize(
    ("word", "gpus", "ranks"), [("gpu", 3, 3), ("auto", 3, 3), ("auto", 0, 5), ("cpu", 3, 5)]
)
def test_numbers_of_ranks_in_torchruns_words(monkeypatch, word, gpus, ranks):
    monkeypatch.setattr(machine, "gpu_ids", lambda: ["0"] * gpus)
    monkeypatch.setattr(limits, "cpu_count", lambda: 5)
    made = run.make_context("run", ["--standalone", f"--nproc_per_node={word}", "train.py"])
    assert made.params["nproc"] == ranks


def test_what_torchrun_would_refuse_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "gpu_ids", list)
    monkeypatch.chdir(tmp_path)
    assert invoke("run", "--nproc", "gpu", "train.py").exit_code == 2
    assert "--nnodes 1" in invoke("run", "--standalone", "--nnodes", "2", "x.py").output
    assert list(tmp_path.iterdir()) == []


def test_miniray_run_leaves_a_page(miniray_cli, tmp_path):
    (tmp_path / "train.py").write_text("print('hello')\n")
    done = miniray_cli("run", "--nproc", "1", "train.py")
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.glob("runs/train-*/report.html")
    assert f"[miniray run] report: {page.relative_to(tmp_path)}" in done.stderr
    assert "miniray run" in page.read_text("utf-8")


def test_a_folder_of_runs_is_not_made_a_run(tmp_path):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").write_text("{}")
    done = invoke("run", "--run-dir", str(tmp_path / "runs"), __file__)
    assert done.exit_code == 2
    assert "--run-dir" in done.output
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def test_miniray_run_of_a_missing_script_leaves_nothing(miniray_cli, tmp_path):
    done = miniray_cli("run", "nothing.py")
    assert done.returncode == 2
    assert "nothing.py" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
