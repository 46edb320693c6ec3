"""The recorder in real processes: what they leave behind, however they end."""

import array
import fcntl
import math
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from miniray import doctor
from miniray.doctor import in_flight, model, processes, recorder, stacks
from miniray.doctor.reader import read_run
from miniray.errors import MinirayError
from tests.doctor.helpers import Ranks, wait_until


@pytest.fixture
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.end()


@pytest.fixture
def recording(tmp_path):
    """A recorder in the test's own process."""
    current = recorder.start(tmp_path, 0, 2)
    yield current
    recorder.stop()


def only(run_dir):
    (record,) = read_run(run_dir)
    return record


def run_script(tmp_path, text, *args):
    script = tmp_path / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script), *args],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )


def test_what_the_process_is_and_that_it_lives(recording, tmp_path):
    record = only(tmp_path)
    assert (record.rank, record.world_size, record.pid) == (0, 2, os.getpid())
    assert record.launcher == "miniray"
    assert record.rss > 1_000_000
    assert record.phase.name == "start"
    assert record.alive
    assert record.process.alive
    assert record.process.state in "RS"
    assert record.exit is None
    assert abs(record.heartbeat - time.time()) < 30


def test_one_recorder_a_process(recording, tmp_path):
    assert recorder.start(tmp_path, 0, 2) is recording
    with pytest.raises(MinirayError):
        recorder.start(tmp_path, 1, 2)
    with pytest.raises(ValueError):
        recorder.start(tmp_path, 2, 2)


def test_steps_losses_and_samples_told_by_the_script(recording, tmp_path):
    doctor.step(loss=0.5, batch_size=4, sample_ids=[1, 3, 5, 7], epoch=0)
    doctor.step(loss=math.nan, sample_ids=[9, 11, 13], epoch=0)
    doctor.step(loss=0.25, sample_ids=[1], epoch=1)
    record = only(tmp_path)
    assert (record.step, record.epoch, record.batch_size, record.samples) == (3, 1, 1, 8)
    assert (record.loss, record.loss_step, record.nonfinite) == (0.25, 3, 1)
    assert record.first_nonfinite.step == 2
    assert record.first_nonfinite.samples == (9, 11, 13)
    assert math.isnan(record.first_nonfinite.value)
    assert record.first_nonfinite.site.file == __file__
    assert [(p.epoch, p.ids) for p in record.passes] == [(0, (1, 3, 5, 7, 9, 11, 13)), (1, (1,))]
    assert [s.step for s in record.steps] == [1, 2, 3]
    assert [s.batch_size for s in record.steps] == [4, 3, 1]
    with pytest.raises(TypeError):
        doctor.step(sample_ids=[None])


def test_who_tells_the_epoch_knows_better_than_a_loader(recording, tmp_path):
    recording.set_epoch(0, "train.py\x0020\0main")
    assert only(tmp_path).epoch == 0
    recording.tell_epoch(5)  # a run that was resumed
    recording.set_epoch(1, "train.py\x0020\0main")
    assert only(tmp_path).epoch == 5


def test_an_exception_in_flight_is_seen_until_it_is_over(recording, tmp_path):
    try:
        raise KeyError("label")
    except KeyError:
        known = in_flight.look(recording, 0)
        recording.flush()
        said, site = in_flight.raised(only(tmp_path))
        assert (said, Path(site.file).name) == ("KeyError: 'label'", Path(__file__).name)
    assert in_flight.look(recording, known) == 0
    recording.flush()
    assert in_flight.raised(only(tmp_path)) is None


@pytest.mark.parametrize(
    ("later", "kept"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "KeyError"),
        (ValueError("disk full"), "Value"),
    ],
)
def test_what_a_rank_says_of_others_on_its_way_out_is_not_why_it_ended(
    recording, tmp_path, later, kept
):
    try:
        try:
            raise KeyError("label")
        finally:
            raise later
    except Exception as error:
        recording.record_exception(error)
    assert only(tmp_path).exit.type.startswith(kept)


def test_phases_nest_and_come_back(recording, tmp_path):
    doctor.phase("prepare")
    with doctor.phase("validate"):
        with doctor.phase("metrics"):
            assert only(tmp_path).section.name == "metrics"
        assert only(tmp_path).section.name == "validate"
    record = only(tmp_path)
    assert record.section.name == "prepare"
    assert record.section.site.file == __file__
    told = [(e.name, e.op) for e in record.events if e.kind == model.PHASE]
    assert told == [
        ("prepare", "begin"), ("validate", "begin"), ("metrics", "begin"), ("metrics", "end"),
        ("validate", "end"),
    ]  # fmt: skip


def test_sequence_numbers_count_for_each_group_by_itself(recording, tmp_path):
    def begin(*words):
        return recording.begin(recording.collective(*words), time.monotonic_ns())

    recording.end(begin("all_reduce", "SUM", "default", (4,), "float32"))
    recording.end(begin("broadcast", "src=0", "ranks 0,1 (#1)"))
    begin("barrier", "", "default")
    events = only(tmp_path).events
    assert [(e.name, e.group, e.sequence) for e in events] == [
        ("all_reduce", "default", 0), ("broadcast", "ranks 0,1 (#1)", 0), ("barrier", "default", 1),
    ]  # fmt: skip
    assert [e.name for e in only(tmp_path).open_events] == ["barrier"]
    assert only(tmp_path).waiting.name == "barrier"


def test_a_with_statement_records_an_error_that_does_not_end_the_process(tmp_path):
    with pytest.raises(KeyError), recorder.start(tmp_path, 0, 1):
        raise KeyError("lost")
    assert recorder.current() is None
    assert (only(tmp_path).exit.kind, only(tmp_path).exit.type) == ("exception", "KeyError")


def test_without_a_recorder_the_calls_do_nothing(tmp_path):
    doctor.step(loss=1.0, sample_ids=[1])
    with doctor.phase("validate"):
        pass
    assert recorder.current() is None


def test_a_forked_child_writes_nothing_into_its_parents_box(recording, ranks, tmp_path):
    def child():
        assert recorder.current() is None
        doctor.step(loss=9.0)

    ranks.start(child)
    assert ranks.wait() == [0]
    record = only(tmp_path)
    assert record.step == 0
    assert record.pid == os.getpid()
    assert record.exit is None


def test_a_second_process_of_the_same_rank_is_kept_apart(recording, ranks, tmp_path):
    ranks.start(lambda: recorder.start(tmp_path, 0, 2))
    assert ranks.wait() == [0]
    run = read_run(tmp_path)
    assert run.ranks[0].pid == os.getpid()
    assert [record.rank for record in run.duplicates] == [0]


def test_the_box_of_a_dead_process_makes_room_and_is_kept(ranks, tmp_path):
    ranks.start(lambda: recorder.start(tmp_path, 0, 1))
    assert ranks.wait() == [0]
    ranks.start(lambda: recorder.start(tmp_path, 0, 1, attempt=1))
    assert ranks.wait() == [0]
    assert read_run(tmp_path).ranks[0].attempt == 1
    assert (tmp_path / "ranks" / "attempt-0" / "0.box").exists()


def test_two_processes_that_claim_one_rank_at_the_same_moment(ranks, tmp_path, monkeypatch):
    """Neither takes the other's box away: both have looked before either has written."""
    looked, told = os.pipe()
    find = recorder._free_path

    def find_together(folder, rank):
        path = find(folder, rank)
        os.write(told, b"x")
        # Until both have looked; only one can at a time, so the first does not see the other.
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline and both() < 2:
            time.sleep(0.005)
        return path

    def both():
        waiting = array.array("i", [0])
        fcntl.ioctl(looked, termios.FIONREAD, waiting)
        return waiting[0]

    def claim():
        monkeypatch.setattr(recorder, "_free_path", find_together)
        recorder.start(tmp_path, 0, 2)
        wait_until(lambda: (tmp_path / "enough").exists())

    for _ in range(2):
        ranks.start(claim)
    wait_until(lambda: both() == 2 and len(list((tmp_path / "ranks").glob("*.box"))) == 2, 5.0)
    run = read_run(tmp_path)
    assert len({record.pid for record in [*run, *run.duplicates]}) == 2
    (tmp_path / "enough").touch()
    assert ranks.wait() == [0, 0]
    for end in (looked, told):
        os.close(end)


ENDS = {
    "finished": ("doctor.step(loss=1.0)", 0, "finished"),
    "exception": ("def f():\n    raise ValueError('bad row 7')\nf()", 1, "exception"),
    "os._exit": ("os._exit(7)", 7, "gone"),
    "killed": ("os.kill(os.getpid(), 9)", -9, "gone"),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_process_ended(tmp_path, end):
    code, status, kind = ENDS[end]
    header = "import os\nfrom miniray import doctor\ndoctor.attach('run')\n"
    done = run_script(tmp_path, header + code)
    assert done.returncode == status, done.stderr
    record = only(tmp_path / "run")
    assert record.exit.kind == kind
    assert not record.alive
    if end == "exception":
        assert (record.exit.type, record.exit.message) == ("ValueError", "bad row 7")
        assert record.exit.site == (str(tmp_path / "script.py"), 5, "f")
        assert "bad row 7" in record.exit.traceback
        assert "bad row 7" in done.stderr  # the user's own traceback is still shown
    if end == "finished":
        assert record.step == 1


STUCK = """
import ctypes, os, sys, threading, time
from miniray import doctor

doctor.attach("run", heartbeat_interval=0.05)


def stuck_here(how):
    print("ready", flush=True)
    if how == "sleep":
        time.sleep(600)
    while True:
        ctypes.PyDLL(None).sleep(600)  # a call that keeps Python's lock; a signal ends it


stuck_here(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["sleep", "lock"])
def test_stacks_of_a_stuck_process_are_shown_and_it_lives_on(tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(STUCK)
    process = subprocess.Popen(
        [sys.executable, str(script), how], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        found = wait_until(lambda: doctor.request_stacks(tmp_path / "run").get(0))
        (main,) = [s for s in found if any(f.function == "stuck_here" for f in s.frames)]
        assert main.frames[0].file == str(script)
        assert main.frames[-1].function == "<module>"
        again = doctor.request_stacks(tmp_path / "run", [0])
        assert len(again[0]) == len(found)  # not added to those from before
        beats = only(tmp_path / "run").heartbeat
        if how == "sleep":
            wait_until(lambda: only(tmp_path / "run").heartbeat > beats)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: only(tmp_path / "run").process.stopped)
        assert doctor.request_stacks(tmp_path / "run") == {}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_without_a_handler_is_never_sent_the_signal(tmp_path, ranks):
    """It would end it. The pid in a box may be another process's by now, too."""
    read_end, write_end = os.pipe()

    def child():
        recorder.start(tmp_path, 0, 1)
        recorder.stop()
        import faulthandler

        faulthandler.unregister(stacks.STACK_SIGNAL)
        os.write(write_end, b"x")
        time.sleep(60)

    pid = ranks.start(child)
    assert os.read(read_end, 1) == b"x"
    assert not processes.catches(pid, stacks.STACK_SIGNAL)
    assert doctor.request_stacks(tmp_path) == {}
    os.kill(pid, 0)  # it is there
    for descriptor in (read_end, write_end):
        os.close(descriptor)


def test_parsing_a_dump_of_several_threads():
    text = (
        "Thread 0x00007f01 [miniray-hea] (most recent call first):\n"
        '  File "/lib/threading.py", line 331 in wait\n'
        '  File "/lib/threading.py", line 1038 in run\n'
        "\n"
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/code/train.py", line 12 in step\n'
        '  File "/code/train.py", line 40 in <module>\n'
    )
    first, second = stacks.parse(text + text)
    assert first.current
    assert [str(site) for site in first.frames] == ["train.py:12", "train.py:40"]
    assert first.frames[0].function == "step"
    assert second.name == "miniray-hea"
    assert len(second.frames) == 2


def test_importing_the_doctor_imports_neither_torch_nor_numpy(tmp_path):
    done = run_script(
        tmp_path,
        "import sys\nimport miniray.doctor as doctor\ndoctor.attach('run')\n"
        "doctor.step(loss=1.0)\n"
        "print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])\n",
    )
    assert done.stdout == "[]\n", done.stderr


def test_a_full_disk_is_an_error_at_the_start_and_not_a_crash_later(tmp_path):
    """Pages of the box are reserved: a limit on the size of files stands for a full disk."""
    import resource

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError):
            recorder.start(tmp_path, 0, 1)
        assert not list(Path(tmp_path, "ranks").iterdir())

    ranks = Ranks()
    try:
        ranks.start(limited)
        assert ranks.wait() == [0]
    finally:
        ranks.end()


def test_what_is_between_steps_that_were_begun_anew_belongs_to_none(recording, tmp_path):
    second = 10**9
    recording.data_ns += 5 * second  # before the first
    recording.begin_steps(1 * second)
    recording.data_ns += 1 * second
    recording.end_step(3 * second)
    recording.data_ns += 4 * second  # evaluation, say
    recording.begin_steps(10 * second)
    for ended in range(11, 11 + 16):
        recording.backward_ns += second // 2
        recording.end_step(ended * second)
    recording.flush_tally()
    record = only(tmp_path)
    assert [(s.seconds, s.data, s.backward) for s in record.steps[:2]] == [(2, 1, 0), (1, 0, 0.5)]
    total = record.total
    assert (total.seconds, total.data, total.backward) == (18, 1, 8)
    assert record.step == 17
