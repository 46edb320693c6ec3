"""The bar on a terminal, lines elsewhere, silence by choice."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import threading

import pytest
import tqdm

from miniray.train.run.progress import Progress, Steps, _bar_class, describe


def lines(epochs, start=0, **options):
    stream = io.StringIO()
    with Progress(start, epochs, stream=stream, **options) as progress:
        for epoch in range(start, start + epochs):
            progress.update(epoch, {"loss": 1 / (epoch + 1), "num_samples": 5, "name": "x"})
    return stream.getvalue().splitlines()


def test_elsewhere_it_is_a_line_an_epoch():
    found = lines(3)
    assert len(found) == 3
    assert re.fullmatch(r"epoch 1 of 3  loss=1  \[\S+ s/epoch, \d:\d\d left\]", found[0])
    assert found[2].startswith("epoch 3 of 3  loss=0.3333  [")


def test_a_run_that_goes_on_counts_on():
    assert lines(2, start=5)[0].startswith("epoch 6 of 7")


def test_long_runs_write_about_a_hundred_lines():
    found = lines(1000)
    assert len(found) == 100
    assert found[-1].startswith("epoch 1000 of 1000")


def test_off_is_off():
    assert lines(3, enabled=False) == []


def test_a_note_is_a_line():
    stream = io.StringIO()
    Progress(0, 2, stream=stream).note("worker 1 was replaced")
    assert stream.getvalue() == "worker 1 was replaced\n"


def test_numbers_only_and_nan_shows():
    assert describe({"loss": float("nan"), "x": 12345.678, "nonfinite": {"loss": [1]}}) == (
        "loss=nan x=1.235e+04"
    )


def test_progress_counts_on_after_its_stream_is_closed():
    stream = io.StringIO()
    progress = Progress(0, 3, stream=stream)
    progress.update(0, {})
    assert stream.getvalue().startswith("epoch 1 of 3")
    stream.close()
    progress.update(1, {})
    progress.update(2, {})
    progress.close()
    assert progress.done == 3


def test_counts_that_nobody_watches_are_left_out():
    metrics = {"loss": 1.0, "num_samples": 5, "val_num_samples": 3, "sync_bytes": 7, "seconds": 2}
    assert describe(metrics) == "loss=1"


def on_terminal(code, stdout=False):
    """Return what a program writes to a terminal: its stderr, or stdout and stderr."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stderr=theirs,
        stdout=theirs if stdout else None,
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the last one closed it
            break
        if not piece:
            break
        text += piece
    os.close(ours)
    assert process.wait(30) == 0
    return text.decode()


def test_on_a_terminal_it_is_one_bar():
    text = on_terminal("""
        from miniray.train.run.progress import Progress
        with Progress(2, 3) as progress:
            for epoch in range(2, 5):
                progress.update(epoch, {"loss": 0.5})
                progress.note("noted")
    """)
    assert text.count("\n") == 4  # three notes, and the end of the one bar
    assert "5/5" in text
    assert "loss=0.5" in text
    assert "100%" in text


def test_what_is_printed_goes_above_the_bar():
    text = on_terminal(
        """
        import os, sys
        import click
        from miniray.train.run.progress import Progress, Steps
        before = sys.stdout, sys.stderr
        with Progress(0, 3) as progress:
            progress.update(0, {"loss": 0.5})
            print("one line")
            print("warned", file=sys.stderr)
            click.echo("echoed", err=True)
            print("begun, ", end="", flush=True)
            progress.update(1, {"loss": 0.5})  # nothing is drawn over a line that is not complete
            print("ended")
            with Steps(2, "inner", "steps") as inner:
                inner.advance(2)
                assert sys.stdout is not before[0]
            if os.fork() == 0:  # a process of the user's own: no bars of ours in it
                print("from a fork")
                os._exit(0)
            os.wait()
            progress.update(2, {"loss": 0.5})
            print("no end", end="")
        assert (sys.stdout, sys.stderr) == before
        print("after")
        """,
        stdout=True,
    )
    # A carriage return restarts the line: keep the part of each line that stays on the screen.
    shown = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    assert shown[:4] == ["one line", "warned", "echoed", "begun, ended"]
    assert shown[-4] == "no end"
    assert "3/3" in shown[-3]
    assert shown[-2:] == ["after", ""]
    assert text.count("from a fork") == 1


def test_a_bar_keeps_its_room_and_says_seconds_for_one():
    def line(note, columns):
        return _bar_class().format_meter(
            n=1, total=3, elapsed=4.0, prefix="epochs", unit=" epochs", postfix=note, ncols=columns
        )

    many = " ".join(f"metric_{i}=0.1234" for i in range(9))
    assert "metric_0=0.1234]" in line(many, 80)
    assert "metric_1=0.1234]" in line(many, 96)
    assert "metric_8" in line(many, 400)
    assert len(line(many, 80)) <= 80
    assert line(many, 80).count("█") >= 3
    assert "4.00 s/epoch," in line(many, 80)


def test_the_bar_has_no_lock_of_other_processes_and_no_thread():
    text = on_terminal("""
        import sys, threading
        from miniray.train.run.progress import Progress
        with Progress(0, 1) as progress:
            progress.update(0, {})
            kind = type(progress._bar)
            assert type(kind.get_lock()) is type(threading.RLock()), kind.get_lock()
            assert threading.active_count() == 1
            assert "multiprocessing.synchronize" not in sys.modules
        print("fine", file=sys.stderr)
    """)
    assert "fine" in text


def test_bars_of_the_user_keep_their_lock():
    before = tqdm.tqdm.get_lock()
    lines(1)
    assert tqdm.tqdm.get_lock() is before
    assert tqdm.tqdm.monitor_interval != 0
    assert threading.active_count() >= 1


@pytest.mark.parametrize(("total", "lines"), [(100, 10), (15, 15), (3, 3), (1, 1)])
def test_steps_in_a_log_are_a_few_lines(total, lines):
    stream = io.StringIO()
    with Steps(total, "work", "steps", stream=stream) as steps:
        for i in range(total):
            steps.advance(1, f"at {i}")
    seen = stream.getvalue().splitlines()
    assert len(seen) == lines
    assert seen[-1] == f"work: {total}/{total} steps  at {total - 1}"


def test_steps_report_the_end_when_they_are_uneven():
    stream = io.StringIO()
    with Steps(10, "work", "steps", stream=stream, lines=3) as steps:
        steps.advance(7)
        steps.advance(3)
    assert stream.getvalue().splitlines() == ["work: 7/10 steps", "work: 10/10 steps"]
