"""The command line as a whole: what it shows, how it fails."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest

import miniray
from miniray.cli import COMMANDS, GROUPS, _run, _summarize, cli, demo
from miniray.cli.doctor import doctor
from miniray.errors import TaskError
from tests.cli.conftest import environment

COLOUR = re.compile(r"\x1b\[(?:\d+;)*3\d(?:;\d+)*m")


def test_no_argument_shows_what_one_can_do(miniray_cli):
    done = miniray_cli()
    assert done.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", done.stdout, re.MULTILINE)
    for heading in GROUPS:
        assert f"\n{heading}:\n" in done.stdout
    assert "Examples:" in done.stdout


def test_the_list_of_commands_loads_nothing_heavy():
    code = (
        "import sys, miniray.cli; from miniray.report import read; miniray.cli._run(['--help'], 0);"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'ray', 'rich', 'psutil')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(miniray_cli, option):
    done = miniray_cli(option)
    assert (done.returncode, done.stdout) == (0, f"miniray, version {miniray.__version__}\n")


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_an_example(name):
    with click.Context(cli, **cli.context_settings) as ctx:
        command = cli.get_command(ctx, name)
        assert command.name == name
        text = command.get_help(click.Context(command, parent=ctx, info_name=name))
    assert f"  miniray {name}" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.partition("\n\n")[2]  # Below the usage, no text is truncated.


def test_help_pages(golden):
    pages = [(), *((name,) for name in COMMANDS)]
    for name in ("runs", "doctor", "demo"):
        with click.Context(cli, **cli.context_settings) as ctx:
            names = cli.get_command(ctx, name).list_commands(ctx)
        pages += [(name, sub) for sub in names if sub not in demo.SCRIPTS]
    golden("help.txt", "\n\n".join(f"$ miniray {' '.join(p)} --help\n{help_of(*p)}" for p in pages))


def help_of(*words):
    with click.Context(cli, info_name="miniray", **cli.context_settings) as ctx:
        for word in words:
            command = ctx.command.get_command(ctx, word)
            ctx = click.Context(command, parent=ctx, info_name=word)
        return ctx.get_help()


@pytest.mark.parametrize("group", ["runs", "doctor", "demo"])
def test_the_commands_of_a_command_have_an_example_too(group):
    with click.Context(cli, **cli.context_settings) as ctx:
        command = cli.get_command(ctx, group)
        names = set(command.list_commands(ctx)) - set(demo.SCRIPTS)  # their help is the script's
    assert names
    for name in names:
        assert f"  miniray {group}" in help_of(group, name)


def test_options_that_need_no_commands_name_are_in_the_help_of_the_group():
    assert all(f"  {word}" in help_of("doctor") for word in ("--watch", "--json", "--runs-dir"))
    assert all(f"  {word}" in help_of("runs") for word in ("--json", "-n, --number"))
    assert "--actors" not in help_of("demo").partition("Examples:")[0]  # of one demo among six


def test_the_example_of_doctor_data_asks_for_its_four_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    line = re.search(r"miniray doctor data (.*)", help_of("doctor"))[1]
    with doctor.commands["data"].make_context("data", line.split()) as ctx:
        assert (ctx.params["nproc"], ctx.params["args"]) == (4, ())


WRONG_USAGE = [
    ["nonsense"],
    ["docter"],
    ["--nonsense"],
    ["demo", "--actors", "0"],
    ["demo", "--backend", "cloud"],
    ["demo", "clasify"],
    ["runs", "show"],
    ["completion"],
    ["doctor", "--nonsense"],
    ["run", "nowhere.py"],
    ["run", "--nproc", "many", "train.py"],
    ["run", "--hang-timeout", "0", "train.py"],
]


def test_wrong_usage_prints_one_error_and_exits_with_2(capsys, golden, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    outputs = []
    for args in WRONG_USAGE:
        assert _run(args, debug=False) == 2, args
        shown = capsys.readouterr()
        assert shown.out == ""
        outputs.append(f"$ miniray {' '.join(args)}\n{shown.err}")
    golden("usage_errors.txt", "\n".join(outputs))


def take(folder):
    """Another run has the name already."""
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "taken" / "run.json").write_text("{}")


def test_an_error_is_one_line_without_traceback(monkeypatch, tmp_path, capsys):
    take(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert _run(["demo", "--name", "taken"], debug=False) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert str(Path("runs", "taken")) in said
    assert said.count("\n") == 2  # with how to get the traceback
    assert "--debug" in said
    assert "Traceback" not in said


def test_debug_gives_the_traceback(miniray_cli, tmp_path):
    take(tmp_path)
    done = miniray_cli("demo", "--name", "taken", "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "FileExistsError" in done.stderr


def test_a_wrong_backend_in_the_environment_is_named(miniray_cli, tmp_path):
    done = miniray_cli("demo", MINIRAY_BACKEND="clod")
    assert done.returncode == 1
    assert "MINIRAY_BACKEND is 'clod'" in done.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_remote_error_is_shown_by_its_last_line():
    error = TaskError("Player.play", "Player", 12, "Traceback ...\n  File x\nValueError: no\n")
    assert re.fullmatch(r"Player\.play .* 12\): ValueError: no", _summarize(error))


def test_an_error_without_a_message_is_shown_by_its_type():
    assert _summarize(AssertionError()) == "AssertionError"


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (click.ClickException("no"), 1),
        (click.UsageError("no"), 2),
        (RuntimeError("no"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(monkeypatch, capsys, raised, code):
    def fail(*args, **kwargs):
        raised.__traceback__ = None
        raise raised

    monkeypatch.setattr(cli, "main", fail)
    assert _run([], debug=False) == code
    assert "Traceback" not in capsys.readouterr().err


def test_colours_on_a_terminal(miniray_on_terminal):
    code, screen = miniray_on_terminal("status")
    assert code == 0
    assert COLOUR.search(screen)


def test_no_color_is_honoured(miniray_on_terminal):
    code, screen = miniray_on_terminal("status", NO_COLOR="1")
    assert code == 0
    assert "inline" in screen
    assert not COLOUR.search(screen)


def test_no_color_is_honoured_by_errors(miniray_on_terminal):
    _, plain = miniray_on_terminal("demo", NO_COLOR="1", MINIRAY_BACKEND="clod")
    _, coloured = miniray_on_terminal("demo", MINIRAY_BACKEND="clod")
    assert "error: " in plain
    assert not COLOUR.search(plain)
    assert COLOUR.search(coloured)


def test_no_colours_in_a_pipe(miniray_cli):
    done = miniray_cli("status")
    assert "inline" in done.stdout
    assert "\x1b" not in done.stdout


def test_a_reader_that_leaves_causes_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "miniray", "status", "--json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=50) == 1
    assert errors == b""


def test_ctrl_c_ends_the_demo_quietly(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "miniray", "demo", "--batches", "1000", "--batch-size", "100000"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert "batches" in process.stderr.readline()  # it is running
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.endswith("interrupted\n")
    assert "Traceback" not in errors
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_terminal_without_pi_gets_a_question_mark(miniray_cli):
    small = ["--batches", "1", "--batch-size", "100", "--backend", "inline"]
    done = miniray_cli("demo", *small, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert re.search(r"^\? \? 3\.", done.stdout, re.MULTILINE)
