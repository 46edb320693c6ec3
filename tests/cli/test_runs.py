"""`miniray runs`, `report`: which run is meant, what is shown, and what is never deleted."""

import json
import os
import pathlib
import socket
import tempfile

import psutil
import pytest
from click.testing import CliRunner

from miniray.cli import _run, cli, terminal
from miniray.dashboard.access import ServedDirectory
from miniray.report import find_runs
from tests.dashboard import synthetic


@pytest.fixture
def run_cli(tmp_path, monkeypatch):
    """The command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(*args, **options):
        return CliRunner().invoke(cli, args, prog_name="miniray", standalone_mode=True, **options)

    return run


@pytest.fixture
def make_run(tmp_path):
    def make(name, metrics=(), **info):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        said = {"state": "finished", "world_size": 2, "versions": {"miniray": "0.1.0"}}
        (folder / "run.json").write_text(json.dumps({**said, **info}))
        if metrics:
            text = "".join(json.dumps(line) + "\n" for line in metrics)
            (folder / "metrics.jsonl").write_text(text)
        return folder

    return make


@pytest.fixture
def three(make_run):
    """Begun in the order old, middle, new."""
    make_run("middle", [{"epoch": 0, "loss": 0.5}], started="2026-01-02T00:00:00+00:00",
             ended="2026-01-02T00:00:30+00:00", config={"lr": 0.1, "trainer": "T"})  # fmt: skip
    make_run("new", [{"epoch": 0, "loss": 4.0}, {"epoch": 1, "loss": "NaN"}], state="failed",
             started="2026-01-03T00:00:00+00:00", config={"lr": 0.2, "trainer": "T"})  # fmt: skip
    make_run("old", started="2026-01-01T00:00:00+00:00")


# -- list, compare --------------------------------------------------------------------------------


def test_runs_are_listed_newest_first(run_cli, three):
    done = run_cli("runs")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].split()[:2] == ["run", "state"]
    assert [line.split()[:2] for line in lines[1:]] == [
        ["new", "failed"],
        ["middle", "finished"],
        ["old", "finished"],
    ]
    assert "loss 0.5" in lines[2]
    assert "30 s" in lines[2]


def test_the_newest_so_many(run_cli, three):
    done = run_cli("runs", "-n", "1")
    assert [line.split()[0] for line in done.output.splitlines()[1:]] == ["new", "…"]
    assert done.output.endswith("… and 2 older\n")


@pytest.mark.parametrize(
    ("width", "head"),
    [
        (100, ["run", "state", "started", "took", "ranks", "epochs", "metrics"]),
        (60, ["run", "state", "started", "took", "epochs", "metrics"]),
        (30, ["run", "state", "metrics"]),
    ],
)
def test_on_a_narrow_terminal_columns_give_way(run_cli, three, monkeypatch, width, head):
    monkeypatch.setattr(terminal, "columns", lambda: width)
    lines = run_cli("runs").output.splitlines()
    assert lines[0].split() == head
    assert all(len(line) <= width for line in lines)
    assert [line.split()[0] for line in lines[1:]] == ["new", "middle", "old"]


def test_long_metrics_have_a_line_of_their_own(run_cli, make_run, monkeypatch):
    """Rather than to be cut after a few letters, with what the first line has no room for."""
    make_run("a-run-with-a-rather-long-name", [{"epoch": 4, "loss": 0.12345, "accuracy": 0.5}],
             started="2026-01-02T00:00:00+00:00", ended="2026-01-02T00:00:30+00:00")  # fmt: skip
    monkeypatch.setattr(terminal, "columns", lambda: 60)
    head, line, below = run_cli("runs").output.splitlines()
    assert head.split() == ["run", "state", "started", "epochs"]
    assert line.split()[0] == "a-run-with-a-rather-long-name"
    assert below == "  loss 0.1235  accuracy 0.5  took 30 s  ranks 2"


def test_json_has_no_nan(run_cli, three):
    found = json.loads(run_cli("runs", "--json").output, parse_constant=pytest.fail)
    assert [run["name"] for run in found] == ["new", "middle", "old"]
    assert found[0]["metrics"] == {"epoch": 1, "loss": "NaN"}
    assert (found[1]["seconds"], found[1]["world_size"], found[1]["kind"]) == (30, 2, "T")


def test_names_are_one_line_each_and_as_wide_as_they_look(run_cli, make_run):
    for name in ("plain", "new\nline", "\x1b[31mred", "训练"):
        make_run(name, [{"epoch": 0, "loss": 0.5}])
    lines = run_cli("runs").output.splitlines()
    assert len(lines) == 5
    assert not any("\x1b" in line for line in lines)
    # Two characters of two columns each: the state begins two characters earlier.
    places = {line.split()[0]: line.index("finished") for line in lines[1:]}
    assert places["训练"] == places["plain"] - 2 == places["new\ufffdline"] - 2


def test_a_damaged_run_does_not_hide_the_others(run_cli, three, tmp_path):
    for name, text in (("null", "null"), ("deep", '{"a":' * 100_000), ("torn", '{"st')):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "run.json").write_text(text)
    done = run_cli("runs")
    assert done.exit_code == 0
    states = dict(line.split()[:2] for line in done.output.splitlines()[1:])
    assert states | {"middle": "finished", "null": "unknown", "deep": "unknown"} == states
    assert len(json.loads(run_cli("runs", "--json").output)) == 6


@pytest.fixture
def closed_run():
    """A folder of two runs, one of which this process may not look into."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("closed", "open"):
            (pathlib.Path(folder) / name).mkdir()
            (pathlib.Path(folder) / name / "run.json").write_text('{"state": "finished"}')
        os.chmod(folder, 0o755)
        os.chmod(os.path.join(folder, "closed"), 0)
        mine = os.geteuid()
        if mine == 0:  # root may look everywhere
            os.seteuid(65534)
        yield pathlib.Path(folder)
        os.seteuid(mine)
        os.chmod(os.path.join(folder, "closed"), 0o755)


def test_a_run_of_somebody_else_does_not_hide_ours(closed_run):
    assert [run.name for run in find_runs(closed_run)] == ["open"]
    assert ServedDirectory(closed_run).names() == ["open"]


@pytest.mark.parametrize("words", [["--once"], []])
def test_top_of_a_run_without_ranks_says_so_and_ends(miniray_on_terminal, three, words):
    code, screen = miniray_on_terminal("top", "middle", *words)
    assert code == 2
    assert "UNREADABLE: " in screen
    assert "middle" in screen


def test_no_runs_is_said(run_cli):
    assert run_cli("runs").output.count("\n") == 1
    assert json.loads(run_cli("runs", "--json").output) == []


@pytest.mark.parametrize("command", ["top", "doctor", "report", "dashboard", "runs"])
def test_where_there_are_no_runs_every_command_says_how_to_get_one(
    command, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    assert _run([command], debug=False) == (0 if command == "runs" else 2)
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert str(tmp_path / "runs") in line
    assert "`miniray demo classify`" in line
    assert _run([command, "--runs-dir", "elsewhere"], debug=False) == (
        0 if command == "runs" else 2
    )
    (line,) = "".join(capsys.readouterr()).splitlines()
    assert "elsewhere" in line
    assert "--runs-dir" in line


@pytest.mark.parametrize("words", [["report", "x"], ["runs", "compare", "x"], ["dashboard", "x"]])
def test_a_name_where_there_are_no_runs_at_all(words, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert _run(words, debug=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`miniray demo classify`" in line


def test_compare_shows_metrics_and_differing_settings(run_cli, three):
    done = run_cli("runs", "compare", "middle", "latest")
    rows = {line[:20].strip(): line.split() for line in done.output.splitlines()}
    head = done.output.splitlines()[0].split()
    assert head == ["middle", "new"]
    cells = {" ".join(row[:-2]): row[-2:] for row in rows.values() if len(row) > 2}
    assert cells["loss"] == ["0.5", "nan"]
    assert "best loss 0.5 (epoch 1) 4 (epoch 1)" in " ".join(done.output.split())
    assert cells["config.lr"] == ["0.1", "0.2"]
    assert "config.trainer" not in cells  # equal in both


def test_compare_for_programs(run_cli, three):
    found = json.loads(run_cli("runs", "compare", "new", "old", "--json").output)
    assert [run["name"] for run in found] == ["new", "old"]
    assert (found[0]["axis"], found[0]["last"]) == ("epoch", {"loss": "NaN"})
    assert (found[0]["best"], found[0]["best_at"]) == ({"loss": 4.0}, {"loss": 1})
    assert found[0]["settings"]["config.lr"] == 0.2  # a number, as in run.json


def test_compare_uses_records_of_steps(run_cli, make_run):
    """As the report does: one run has two epochs, the other was stopped inside the first."""
    epochs = [{"epoch": n, "step": 100 * (n + 1), "loss": 2.0, "val_loss": 3 - n} for n in (0, 1)]
    steps = [(1, 9.0, 0.1), (60, 0.25, 0.2), (1150, 1.5, 0.4)]
    config = {"trainer": "DDPTrainer"}
    for name, metrics in (("whole", epochs), ("stopped", [])):
        folder = make_run(name, metrics, config=config)
        lines = [{"step": step, "epoch": 0, "loss": loss, "lr": lr} for step, loss, lr in steps]
        (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, stopped = json.loads(run_cli("runs", "compare", "whole", "stopped", "--json").output)
    assert (whole["axis"], stopped["axis"]) == ("step", "step")
    assert whole["last"] == {"loss": 1.5, "lr": 0.4, "val_loss": 2}
    assert whole["best"] == {"loss": 0.25, "val_loss": 2}  # no learning rate is the best
    assert whole["best_at"] == {"loss": 60, "val_loss": 200}
    assert (stopped["metrics"], stopped["last"]) == ({}, {"loss": 1.5, "lr": 0.4})
    table = " ".join(run_cli("runs", "compare", "whole", "stopped").output.split())
    assert "best loss 0.25 (step 60) 0.25 (step 60)" in table
    assert "best val_loss 2 (step 200) –" in table


def test_compare_in_a_pipe_has_names_whole_and_on_one_line(run_cli, make_run):
    names = ["DataParallelTrainer-Worker-20260101-120000", "DataParallelTrainer-Worker-20260101-13"]
    for name, metric in zip(names, ("a_metric_with_a_rather_long_name_" * 2, "loss"), strict=True):
        make_run(name, [{"epoch": 0, metric: 1.5}])
    lines = run_cli("runs", "compare", *names).output.splitlines()
    assert lines[0].split() == names
    assert all(line == line.rstrip() for line in lines)
    assert any(line.split()[:1] == ["a_metric_with_a_rather_long_name_" * 2] for line in lines)


def test_compare_of_what_is_no_run_is_wrong_usage(run_cli, three, tmp_path):
    (tmp_path / "empty").mkdir()
    done = run_cli("runs", "compare", "new", "empty")
    assert done.exit_code == 2
    assert done.output.startswith("Error: empty ")


@pytest.mark.parametrize("command", [["doctor"], ["top", "--once"]])
def test_latest_names_the_run_that_it_found(run_cli, three, tmp_path, command):
    synthetic.still_rank(tmp_path / "runs" / "new", 0, 1, steps=2)
    assert str(pathlib.Path("runs", "new")) in run_cli(*command).output
    assert run_cli("doctor", "new").output.splitlines()[0] != "runs/new:"


@pytest.mark.parametrize("command", [["doctor"], ["report"], ["top"], ["runs", "delete"]])
def test_a_folder_of_runs_is_said_to_be_one(run_cli, three, command):
    done = run_cli(*command, "runs")
    assert done.exit_code == 2
    assert "such as runs/new" in done.output


def test_a_folder_of_the_same_name_does_not_hide_a_run(run_cli, three, tmp_path):
    (tmp_path / "middle").mkdir()
    assert run_cli("report", "middle").output.startswith("Report: runs/middle/")
    assert run_cli("report", "./middle").exit_code == 2


def test_a_name_that_is_nearly_right_is_offered(run_cli, three):
    done = run_cli("runs", "compare", "midle")
    assert done.exit_code == 2
    assert "middle" in done.output


# -- delete ---------------------------------------------------------------------------------------


def test_delete_removes_the_run_and_nothing_else(run_cli, three, tmp_path):
    done = run_cli("runs", "delete", "old", "new", "--yes")
    assert done.exit_code == 0, done.output
    assert done.output.endswith("deleted 2 runs\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["middle"]


def test_a_run_with_two_names_is_deleted_once(run_cli, three, tmp_path):
    done = run_cli("runs", "delete", "old", str(tmp_path / "runs" / "old"), "new", "--yes")
    assert done.exit_code == 0, done.output
    assert done.output.endswith("deleted 2 runs\n")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["middle"]


def test_delete_asks_and_without_a_terminal_refuses(run_cli, three, tmp_path, monkeypatch):
    done = run_cli("runs", "delete", "old")
    assert done.exit_code == 2
    assert "--yes" in done.output
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert (tmp_path / "runs" / "old").is_dir()


def test_no_is_an_answer(miniray_on_terminal_with, three, tmp_path):
    code, screen = miniray_on_terminal_with("n\n", "runs", "delete", "old")
    assert code == 130
    assert "Delete 1 run?" in screen
    assert (tmp_path / "runs" / "old").is_dir()
    code, screen = miniray_on_terminal_with("y\n", "runs", "delete", "old")
    assert code == 0
    assert not (tmp_path / "runs" / "old").exists()


def not_a_run(folder):
    (folder / "notes.txt").write_text("mine")


def metrics_of_another_tool(folder):
    (folder / "metrics.jsonl").write_text('{"loss": 1}\n')


def run_json_of_another_tool(folder):
    (folder / "run.json").write_text('{"name": "mine", "versions": {"torch": "2"}}')


def repository(folder):
    ours(folder)
    (folder / ".git").mkdir()


def root_of_runs(folder):
    ours(folder)
    (folder / "inner").mkdir()
    ours(folder / "inner")


def box_of_another_format(folder):
    (folder / "ranks").mkdir()
    (folder / "ranks" / "0.box").write_bytes(b"something else")


def ours(folder):
    (folder / "run.json").write_text('{"state": "finished", "versions": {"miniray": "0.1.0"}}')


@pytest.mark.parametrize(
    "make",
    [
        not_a_run,
        metrics_of_another_tool,
        run_json_of_another_tool,
        repository,
        root_of_runs,
        box_of_another_format,
    ],
)
def test_what_is_not_a_run_is_never_deleted(run_cli, three, tmp_path, make):
    folder = tmp_path / "precious"
    folder.mkdir()
    make(folder)
    before = sorted(path.name for path in folder.rglob("*"))
    done = run_cli("runs", "delete", "old", "precious", "--yes")
    assert done.exit_code == 1
    assert "Can't delete precious" in done.output
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert (tmp_path / "runs" / "old").is_dir()  # none is, if one is refused


def test_the_current_directory_and_links_are_not_deleted(run_cli, three, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "old")
    assert "symbolic link" in run_cli("runs", "delete", "link", "--yes").output
    monkeypatch.chdir(tmp_path / "runs" / "old")
    done = run_cli("runs", "delete", ".", "--yes")
    assert done.exit_code == 1
    assert "current directory" in done.output
    assert (tmp_path / "runs" / "old").is_dir()


def test_a_run_that_lives_is_not_deleted(run_cli, make_run, tmp_path):
    me = psutil.Process()
    make_run("alive", state="running", pid=os.getpid(), process_started=me.create_time(),
             host=socket.gethostname())  # fmt: skip
    done = run_cli("runs", "delete", "alive", "--yes")
    assert done.exit_code == 1
    assert f"(process {os.getpid()})" in done.output
    assert (tmp_path / "runs" / "alive" / "run.json").is_file()


def test_a_run_that_lives_elsewhere_is_not_deleted(run_cli, make_run):
    make_run("far", state="running", pid=1, host="another-machine")
    assert "on another-machine" in run_cli("runs", "delete", "far", "--yes").output


def test_a_run_that_died_can_be_deleted(run_cli, make_run, tmp_path):
    make_run("dead", state="running", pid=2**22 + 7, process_started=1.0, host=socket.gethostname())
    assert run_cli("runs", "delete", "dead", "--yes").exit_code == 0
    assert not (tmp_path / "runs" / "dead").exists()


# -- report ---------------------------------------------------------------------------------------


def test_report_writes_the_page_and_says_where(run_cli, three, tmp_path):
    done = run_cli("report", "middle")
    assert done.output == f"Report: {os.path.join('runs', 'middle', 'report.html')}\n"
    assert "middle" in (tmp_path / "runs" / "middle" / "report.html").read_text("utf-8")


def test_report_of_the_latest_elsewhere_for_a_program(run_cli, three, tmp_path):
    done = run_cli("report", "-o", "page.html", "--json")
    said = json.loads(done.output, parse_constant=pytest.fail)
    assert (said["name"], said["report"], said["findings"]) == ("new", "page.html", [])
    assert (tmp_path / "page.html").is_file()
    assert not (tmp_path / "runs" / "new" / "report.html").exists()


def test_a_page_that_cannot_be_written_names_the_way_out(run_cli, three, tmp_path):
    (tmp_path / "runs" / "middle" / "report.html").mkdir()
    (tmp_path / "file").touch()
    for options in ([], ["-o", "file/page.html"]):
        done = run_cli("report", "middle", *options)
        assert done.exit_code == 1
        assert "-o FILE" in done.output
    assert run_cli("report", "middle", "-o", "page.html").exit_code == 0


@pytest.mark.parametrize("target", ["nowhere", ".", "latest"])
def test_report_of_nothing_is_refused(miniray_cli, tmp_path, target):
    done = miniray_cli("report", target)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []
