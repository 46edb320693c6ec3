"""The run directory: made once, readable always."""

import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import miniray
from miniray.errors import ActorDiedError, RunLockedError, TaskError
from miniray.train import RunDirectory


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_default_name_is_the_class_and_the_time(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "20260102-030405")
    names = [str(RunDirectory.open(prefix="MyTrainer").path) for _ in range(3)]
    base = "runs/MyTrainer-20260102-030405"
    assert names == [base, base + "-2", base + "-3"]


def test_a_given_name_and_a_given_path(tmp_path):
    assert RunDirectory.open(name="first").path.resolve() == tmp_path / "runs" / "first"
    assert RunDirectory.open(tmp_path / "a" / "b").path == tmp_path / "a" / "b"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs"])
def test_a_name_is_a_plain_folder_name(name, raises):
    with raises(ValueError):
        RunDirectory.open(name=name)


@pytest.mark.parametrize("trace", ["run.json", "metrics.jsonl", "checkpoints"])
def test_another_run_is_never_overwritten(trace, tmp_path):
    run = RunDirectory.open(name="x")
    (run.path / trace).mkdir() if trace == "checkpoints" else (run.path / trace).touch()
    with pytest.raises(FileExistsError, match="resume=True"):
        RunDirectory.open(name="x")
    with pytest.raises(FileExistsError):
        RunDirectory.open(tmp_path / "runs" / "x")


def test_a_run_that_failed_before_its_first_epoch_is_taken_up():
    run = RunDirectory.open(name="x")
    run.write_run({})
    with pytest.raises(FileExistsError):  # it runs
        RunDirectory.open(name="x")
    run.finish("failed", error="no such file")
    RunDirectory.open(name="x")
    run.append_metrics({"epoch": 0})
    with pytest.raises(FileExistsError):
        RunDirectory.open(name="x")


@pytest.mark.parametrize("files", [[], ["notes.txt"]])
def test_open_accepts_a_directory_without_a_run(tmp_path, files):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in files:
        (folder / name).write_text("mine")
    run = RunDirectory.open(folder)
    assert run.path == folder
    run.append_metrics({"epoch": 0})
    assert [record["epoch"] for record in run.read_metrics()] == [0]
    assert {name: (folder / name).read_text() for name in files} == dict.fromkeys(files, "mine")


def test_looking_at_nothing_makes_nothing(tmp_path, raises):
    with raises(FileNotFoundError):
        RunDirectory(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_run_json_says_what_ran():
    run = RunDirectory.open(name="x")
    run.write_run({"num_workers": 4, "seed": 7, "lr": np.float32(0.5), "model": object})
    text = json.loads((run.path / "run.json").read_text())
    assert text["state"] == "running"
    assert text["world_size"] == 4
    assert text["seed"] == 7
    assert text["config"]["lr"] == 0.5
    assert text["config"]["model"] == "<class 'object'>"
    assert text["versions"]["python"].startswith("3.")
    assert text["versions"]["miniray"] == miniray.__version__
    assert text["versions"]["numpy"] == np.__version__
    assert text["host"] == socket.gethostname()
    assert text["pid"] == os.getpid()
    assert text["command"] == shlex.join(sys.orig_argv)
    assert run.status() == "running"


def test_versions_do_not_load_torch():
    code = (
        "import sys; from miniray.train.run.directory import RunDirectory\n"
        "RunDirectory.open(name='x').write_run({})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
    assert RunDirectory("runs/x").read_run()["versions"]["torch"]


def test_the_end_is_written_with_its_error():
    run = RunDirectory.open(name="x")
    run.write_run({})
    run.finish("finished", stop_reason="enough")
    assert run.status() == "finished"
    assert run.read_run()["stop_reason"] == "enough"
    try:
        raise ValueError("bad batch")
    except ValueError as error:
        run.finish("failed", error=error)
    told = RunDirectory(run.path).read_run()
    assert told["state"] == "failed"
    assert told["error"]["type"] == "ValueError"
    assert told["error"]["message"] == "bad batch"
    assert "test_rundir.py" in told["error"]["traceback"]
    assert told["ended"] >= told["started"]
    assert told["error"].keys() == {"type", "message", "traceback"}


def test_fields_of_an_error_are_recorded():
    run = RunDirectory.open(name="x")
    run.write_run({})
    run.finish("failed", error=ActorDiedError("gone", worker=1, epoch=0, signal="SIGKILL"))
    error = run.read_run()["error"]
    assert (error["code"], error["worker"], error["signal"]) == ("actor-died", 1, "SIGKILL")
    assert error["epoch"] == 0
    assert "exit_code" not in error
    trace = "Traceback (most recent call last):\nKeyError: 3\n"
    run.finish("failed", error=TaskError("f", "W", 7, trace))
    error = run.read_run()["error"]
    assert (error["remote_traceback"], error["pid"]) == (trace, 7)


def test_a_run_taken_up_again_remembers_its_attempts():
    run = RunDirectory.open(name="x")
    run.write_run({"num_workers": 2})
    run.finish("failed", error="out of memory")
    again = RunDirectory.reopen(run.path)
    again.write_run({"num_workers": 3})
    told = again.read_run()
    assert told["state"] == "running"
    assert told["error"] is None
    assert told["world_size"] == 3
    assert [(a["state"], a["world_size"]) for a in told["attempts"]] == [("failed", 2)]
    assert told["attempts"][0]["error"]["message"] == "out of memory"


def test_a_killed_run_reads_as_died_and_a_running_one_cannot_be_taken():
    code = """
        import sys
        from miniray.train.run.directory import RunDirectory
        run = RunDirectory.open(name="x")
        run.write_run({})
        for epoch in range(3):
            run.append_metrics({"epoch": epoch, "loss": float("nan")})
        print("ready", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    run = RunDirectory("runs/x")
    assert run.status() == "running"
    with pytest.raises(RunLockedError) as caught:
        RunDirectory.reopen("runs/x")
    assert (caught.value.pid, caught.value.host) == (process.pid, socket.gethostname())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert run.status() == "died"
    assert run.read_run()["state"] == "running"
    assert [r["epoch"] for r in run.read_metrics()] == [0, 1, 2]
    again = RunDirectory.reopen("runs/x")
    again.write_run({})
    assert again.read_run()["attempts"][0]["state"] == "died"


def test_of_another_machine_one_knows_what_it_wrote():
    run = RunDirectory.open(name="x")
    run.write_run({})
    told = {**json.loads(run.run_file.read_text()), "host": "elsewhere", "pid": 2**22 + 5}
    run.run_file.write_text(json.dumps(told))
    assert run.status() == "running"


def test_a_directory_without_run_json_is_unknown_and_a_damaged_one_is_named():
    run = RunDirectory.open(name="x")
    assert run.read_run() == {}
    assert run.status() == "unknown"
    run.run_file.write_text("{")
    with pytest.raises(ValueError, match=r"run\.json"):
        run.read_run()


def test_metrics_come_back():
    run = RunDirectory.open(name="x")
    run.append_metrics({"epoch": 0, "loss": np.float64("nan"), "acc": np.float32(0.5)})
    (record,) = run.read_metrics()
    assert math.isnan(record["loss"])
    assert record["acc"] == 0.5


def test_truncating_keeps_what_is_dropped_and_says_so():
    run = RunDirectory.open(name="x")
    for epoch in range(5):
        run.append_metrics({"epoch": epoch, "loss": math.inf})
    run.append_metrics({"note": "without an epoch"})
    with open(run.metrics_file, "ab") as file:
        file.write(b'{"epoch": 5, "lo')
    assert run.truncate_metrics(2) == 2
    assert [r.get("epoch") for r in run.read_metrics()] == [0, 1, 2, None]
    assert run.read_metrics()[0]["loss"] == math.inf
    discarded = (run.path / "metrics.discarded.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in discarded] == [3, 4]
    (event,) = run.read_events()
    assert (event["event"], event["epoch"], event["lines"]) == ("metrics_truncated", 2, 2)
    assert event["time"].endswith("+00:00")
    run.append_metrics({"epoch": 3})
    assert [r.get("epoch") for r in run.read_metrics()] == [0, 1, 2, None, 3]


def test_truncating_where_nothing_is_beyond_changes_nothing():
    run = RunDirectory.open(name="x")
    assert run.truncate_metrics(3) == 0
    run.append_metrics({"epoch": 3})
    assert run.truncate_metrics(3) == 0
    assert run.read_events() == []
    assert not (run.path / "metrics.discarded.jsonl").exists()
