"""Completion: scripts a shell accepts, and runs among what it offers."""

import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from miniray.cli import COMMANDS, cli


def offered(*words):
    """What a shell is offered for the last word."""
    complete = BashComplete(cli, {}, "miniray", "_MINIRAY_COMPLETE")
    return [item.value for item in complete.get_completions(list(words[:-1]), words[-1])]


@pytest.fixture
def two_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_the_shell_accepts(shell):
    script = CliRunner().invoke(cli, ["completion", shell], prog_name="miniray").output
    assert "_MINIRAY_COMPLETE" in script
    if shutil.which(shell) is not None:
        checked = subprocess.run([shell, "-n"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_commands_complete(two_runs):
    assert set(offered("")) == set(COMMANDS)
    assert offered("re") == ["report"]
    assert offered("demo", "g") == ["gan", "geoguessr"]
    assert offered("runs", "") == ["compare", "delete", "list"]
    assert "--nproc" in offered("run", "--n")


@pytest.mark.parametrize(
    "command", [("report",), ("top",), ("doctor",), ("dashboard",), ("runs", "delete")]
)
def test_names_of_runs_complete(two_runs, command):
    assert offered(*command, "f") == ["first"]
    assert {"latest", "first", "second"} <= set(offered(*command, ""))


def test_the_doctor_offers_its_commands_too(two_runs):
    assert {"data", "speedup", "latest"} <= set(offered("doctor", ""))
    assert "--watch" in offered("doctor", "first", "--")


@pytest.mark.parametrize("words", [("run", "tr"), ("run", "t.py", "x"), ("doctor", "data", "tr")])
def test_a_script_and_its_arguments_are_the_shells_own_affair(words):
    complete = BashComplete(cli, {}, "miniray", "_MINIRAY_COMPLETE")
    found = complete.get_completions(list(words[:-1]), words[-1])
    assert [(item.type, item.value) for item in found] == [("file", words[-1])]


def test_benchmarks_complete():
    assert {"engine", "ps"} <= set(offered("bench", ""))
    assert offered("bench", "eng") == ["engine"]


def test_a_shell_gets_its_answer_from_a_real_process(two_runs, tmp_path):
    for name in (b"s\xff", b"s\nx"):  # what no shell could be told
        (tmp_path / "runs" / os.fsdecode(name)).mkdir()
    env = {"COMP_WORDS": "miniray report s", "COMP_CWORD": "2", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "miniray"],
        env={**env, "_MINIRAY_COMPLETE": "bash_complete"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == "plain,second\n"
