"""`miniray top`: one frame, and a live table that ends with the run."""

import os
import subprocess
import sys
import time

import pytest

from miniray.cli.top import frame
from miniray.doctor import recorder
from miniray.doctor.diagnose import examine
from tests.doctor.helpers import Ranks, wait_until
from tests.doctor.records import call, calling, rank, run

pty = pytest.importorskip("pty")


def shown(record, width=80):
    from rich.console import Console

    console = Console(width=width, highlight=False, no_color=True)
    with console.capture() as captured:
        console.print(frame(record, None, width))
    return captured.get()


def test_a_frame_has_the_verdict_and_a_line_a_rank():
    record = run(*(rank(n, 4, step=100) for n in range(4)))
    lines = shown(record).splitlines()
    assert lines[0] == examine(record).verdict
    assert [line[:34] for line in lines[-4:]] == [
        f"[Rank {n}/4] Step 100, Batch size: 8" for n in range(4)
    ]


def test_a_hang_is_seen_in_it():
    record = run(calling(0, call(0, is_open=True)), calling(1))
    diagnosis = examine(record)
    assert (diagnosis.findings[0].code, diagnosis.findings[0].ranks) == ("blocked", (1,))
    assert shown(record).replace("\n  ", " ").startswith(diagnosis.verdict)


def train(run_dir):
    recorder.start(run_dir, 0, 1, heartbeat_interval=0.1)
    while not (run_dir / "enough").exists():
        recorder.current().end_step(time.monotonic_ns())
        time.sleep(0.02)


def test_on_a_terminal_it_is_live_and_ends_with_the_run(tmp_path):
    ranks = Ranks()
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    try:
        ranks.start(train, run_dir)
        wait_until((run_dir / "ranks" / "0.box").exists)
        top = subprocess.Popen(
            [sys.executable, "-m", "miniray", "top", run_dir, "--interval", "0.1"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"},
        )
        os.close(theirs)
        seen = b""
        while b"running" not in seen:
            seen += os.read(ours, 65536)
        (run_dir / "enough").touch()
        assert ranks.wait() == [0]
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # Linux's way to say that the other end is closed
            pass
        assert top.wait(timeout=40) == 0
        assert b"HEALTHY: 1 rank finished" in seen
    finally:
        ranks.end()
        os.close(ours)


def test_no_run_is_exit_status_2(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "miniray", "top"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert done.returncode == 2
    assert str(tmp_path / "runs") in done.stderr
