"""`miniray doctor` as a user calls it: exit status, targets, watching; and the real launcher."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from unittest.mock import ANY

import pytest

from miniray.doctor import recorder
from miniray.doctor.diagnose import find_run_of_process
from tests.doctor.forking import SCRIPTS
from tests.doctor.helpers import Ranks, wait_until
from tests.time_scale import TIME_SCALE


def miniray(*args, cwd, timeout=50, **env):
    return subprocess.run(
        [sys.executable, "-m", "miniray", *map(str, args)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "80", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def record(run_dir, rank, world, what):
    recorder.start(run_dir, rank, world, heartbeat_interval=0.2)
    for _ in range(3):
        recorder.current().end_step(time.monotonic_ns())
    what()


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.end()


def fail():
    raise ValueError("bad label")


def sleep():
    time.sleep(600)  # not pause(): that ends when the stack is asked for


def wait_for_ever():
    current = recorder.current()
    call = current.collective("all_reduce", "SUM", "default", (4,), "float32")
    current.begin(call, time.monotonic_ns())
    time.sleep(600)


def test_a_finished_run_is_healthy_and_a_failed_one_is_not(ranks, tmp_path):
    for rank in range(2):
        ranks.start(record, tmp_path / "runs" / "good", rank, 2, lambda: None)
    ranks.start(record, tmp_path / "runs" / "bad", 0, 1, fail)
    assert ranks.wait() == [0, 0, 3]
    good = miniray("doctor", "runs/good", cwd=tmp_path)
    assert good.returncode == 0, good.stderr
    assert re.match("HEALTHY: .* step 3$", good.stdout, re.MULTILINE)
    bad = miniray("doctor", "runs/bad", "--json", cwd=tmp_path)
    assert bad.returncode == 1, bad.stderr
    said = json.loads(bad.stdout)
    assert said["findings"][0]["code"] == "exception"
    assert said["ranks"][0]["step"] == 3


def test_what_cannot_be_read_is_exit_status_2(tmp_path):
    missing = miniray("doctor", "nowhere", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "nowhere" in missing.stderr
    (tmp_path / "empty" / "ranks").mkdir(parents=True)
    (tmp_path / "empty" / "ranks" / "0.box").write_bytes(b"no box")
    empty = miniray("doctor", "empty", cwd=tmp_path)
    assert empty.returncode == 2
    assert empty.stdout.startswith("UNREADABLE: ")
    none = miniray("doctor", cwd=tmp_path)
    assert none.returncode == 2
    assert str(tmp_path / "runs") in none.stderr


def test_a_run_is_found_by_the_pid_of_a_rank(ranks, tmp_path):
    runs = tmp_path / "runs"
    ranks.start(record, runs / "old", 0, 1, lambda: None)
    ranks.wait()
    pid = ranks.start(record, runs / "new", 0, 1, sleep)
    wait_until((runs / "new" / "ranks" / "0.box").exists)
    assert find_run_of_process(pid, tmp_path) == runs / "new"  # by what the process has mapped
    with pytest.raises(FileNotFoundError):
        find_run_of_process(999999999, runs)


def verdict(watching, kind):
    """The next line of that kind."""
    line = ""
    while not line.startswith(kind):
        line = watching.stdout.readline()
        assert line, "it ended without a verdict"
    return line


def test_watching_goes_on_until_the_run_has_ended(ranks, tmp_path):
    run_dir = tmp_path / "run"
    for rank in range(2):
        ranks.start(record, run_dir, rank, 2, wait_for_ever if rank else sleep)
    wait_until(lambda: len(list(run_dir.glob("ranks/*.box"))) == 2)
    watching = subprocess.Popen(
        [sys.executable, "-m", "miniray", "doctor", run_dir, "--watch", "--hang-timeout", "0.5"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert verdict(watching, "STUCK").startswith("STUCK: rank 0 ")
        os.kill(ranks.pids[0], signal.SIGKILL)
        assert verdict(watching, "FAILED").startswith("FAILED: rank 0 ")
        ranks.end()
        ranks.pids.clear()
        watching.stdout.read()
        assert watching.wait(timeout=40) == 1
    finally:
        watching.kill()
        watching.wait()
        watching.stdout.close()


def test_help_shows_both_ways(tmp_path):
    shown = miniray("doctor", "--help", cwd=tmp_path).stdout
    for word in ("RUN_DIR", "PID", "latest", "speedup", "Exit status: "):
        assert word in shown


def test_numbers_of_ranks_are_checked(tmp_path):
    (tmp_path / "x.py").write_text("")
    done = miniray("doctor", "speedup", "x.py", "--nproc", "1,two", cwd=tmp_path)
    assert done.returncode == 2
    assert "1,two" in done.stderr


def test_top_shows_one_frame(ranks, tmp_path):
    ranks.start(record, tmp_path / "runs" / "x", 0, 1, lambda: None)
    ranks.wait()
    done = miniray("top", "--once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.match("HEALTHY: .* step 3$", done.stdout, re.MULTILINE)
    assert re.search(r"^\[Rank 0/1\] Step 3, .* finished ", done.stdout, re.MULTILINE)


# -- with the real launcher ----------------------------------------------------------------------


def launched(script, nproc, cwd, limit):
    return miniray(
        "run", "--nproc", nproc, "--run-dir", "run", "--hang-timeout", limit,
        SCRIPTS / f"{script}.py", cwd=cwd, timeout=110, OMP_NUM_THREADS="1",
    )  # fmt: skip


@pytest.mark.timeout(120)
def test_a_hang_is_diagnosed_ended_and_kept(tmp_path):
    pytest.importorskip("torch")
    done = launched("fewer_batches", 2, tmp_path, limit=4 * TIME_SCALE)
    assert done.returncode != 0
    saved = json.loads((tmp_path / "run" / "doctor.json").read_text())
    finding, verdict = saved["findings"][0], saved["verdict"]
    assert (finding["code"], finding["ranks"], finding["step"]) == ("ran-out-of-data", [1], 3)
    assert finding["site"] == "fewer_batches.py:13"
    assert verdict == f"STUCK: {finding['title']}"
    assert verdict in done.stderr
    assert (tmp_path / "run" / "doctor.txt").read_text().startswith(verdict)
    again = miniray("doctor", "run", cwd=tmp_path)  # the run is dead and as readable as before
    assert again.returncode == 1
    assert again.stdout.startswith(verdict)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_who_gets_which_samples_is_told_before_training(tmp_path):
    pytest.importorskip("torch")
    script = SCRIPTS / "same_data.py"
    done = miniray("doctor", "data", "--nproc", 2, "--json", script, cwd=tmp_path, timeout=110)
    assert done.returncode == 1, done.stderr
    (report,) = json.loads(done.stdout)
    assert [rank["samples"] for rank in report["ranks"]] == [32, 32]
    assert [finding["code"] for finding in report["findings"]] == ["no-distributed-sampler"]
    assert done.stderr.startswith("[miniray run] 2 ranks\n")  # no word of a folder that is gone
    assert tempfile.gettempdir() not in done.stderr


#: Severity, code, ranks and step; and what the title contains besides.
REAL = {
    "exception": (("failed", "exception", [1], 2), "ValueError: label 17 out of range"),
    "early_stop": (("stuck", "left-the-loop", [1], 2), "rank 0"),
    "named_barrier_in_branch": (("stuck", "collectives-parted", [0], 3), "barrier 'save'"),
    "nan_skipped": (("stuck", "skipped-backward", [1], 2), "NaN"),
    "killed": (("failed", "killed", [1], 3), "SIGKILL"),
    "stopped": (("stuck", "stopped", [1], 5), "SIGSTOP"),
    "lock": (("stuck", "blocked", [1], 3), "lock.py:19"),
    "holds_gil": (("stuck", "holds-gil", [1], 0), "holds_gil.py:13"),
    "unused_parameters": (("failed", "unused-parameters", [1], 1), "b.weight, b.bias"),
    "models_differ": ((ANY, "models-differ", [1], None), "rank 0 has 2"),
    "validation_on_rank_0": (("stuck", "collectives-parted", [0], 4), "DDP forward"),
    "bar_between_barriers": (
        ("stuck", "bar-between-barriers", [0], 0),
        "bar_between_barriers.py:16",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", REAL)
def test_causes_through_the_real_launcher(script, tmp_path):
    done = launched(script, 2, tmp_path, limit=5)
    assert done.returncode != 0
    saved = json.loads((tmp_path / "run" / "doctor.json").read_text())
    finding, (expected, words) = saved["findings"][0], REAL[script]
    fields = tuple(finding[name] for name in ("severity", "code", "ranks", "step"))
    assert fields == expected, finding
    assert words in finding["title"]
    shown = (tmp_path / "run" / "doctor.txt").read_text()
    assert re.sub(r"\n +", " ", shown).startswith(saved["verdict"]), shown


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("script", ["healthy", "slow_start", "slow_but_moving", "joined"])
def test_healthy_runs_through_the_real_launcher(script, tmp_path):
    done = launched(script, 2, tmp_path, limit=3)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "doctor.txt").exists()
    assert miniray("doctor", "run", cwd=tmp_path).returncode == 0


EXAMPLE = SCRIPTS.parents[2] / "examples" / "deadlock_tqdm.py"


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 1, r"^STUCK: rank 0 .*\(deadlock_tqdm\.py:\d+\)"),
        (["--fixed"], 0, r"\bdone: "),
    ],
)
def test_the_hang_this_began_with(tmp_path, arguments, status, words):
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert re.search(words, done.stdout + done.stderr, re.MULTILINE)
