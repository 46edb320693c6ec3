"""What an expert would say next: records made by hand, and the cause and the fix they lead to."""

import dataclasses
import queue
import re
import subprocess
import threading
from pathlib import Path

import pytest

from miniray.doctor import processes
from miniray.doctor.diagnose import examine
from miniray.doctor.ended import site_in
from miniray.doctor.model import LOADER, Phase, Site, ThreadStack
from tests.doctor.helpers import wait_until
from tests.doctor.records import (
    ALIVE,
    FINISHED,
    GONE,
    NOW,
    at,
    call,
    calling,
    ended,
    loader,
    rank,
    run,
    samples,
    wording,
)

TIMED_OUT = "[/build/gloo/unbound_buffer.cc:78] Timed out waiting 4000ms for recv to complete"


def top(*given, **fields):
    return examine(run(*given, **fields)).findings[0]


# -- time-outs -----------------------------------------------------------------------------------


def gave_up(number, **fields):
    """It waited for 4 s, from 24 to 20 s ago."""
    failed = ended(type="RuntimeError", message=TIMED_OUT, at=NOW - 20)
    wait = call(3, "barrier", 9, ago=24.0, ended=NOW - 20, **fields)
    return calling(number, wait, exit=failed, process=GONE)


def test_a_rank_that_came_after_the_others_had_given_up(golden):
    lost = ended(
        type="RuntimeError",
        message="[gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        at=NOW - 15,
    )
    before = call(2, "DDP.backward", 7, ago=25.0)
    late = calling(0, before, call(3, "barrier", 9, ago=15.0), exit=lost, process=GONE)
    finding = top(late, gave_up(1))
    assert (finding.code, finding.severity.word, finding.ranks) == ("came-late", "FAILED", (0,))
    golden("causes/a_rank_that_came_after_the_others_had_given_up.txt", wording(finding))
    assert "init_process_group(timeout=timedelta(...))" in finding.fix


def test_a_rank_that_still_works_when_the_others_give_up(golden):
    finding = top(calling(0, call(2, "barrier", 9, ago=25.0)), gave_up(1))
    assert finding.ranks == (0,)
    golden("causes/a_rank_that_still_works_when_the_others_give_up.txt", wording(finding))
    assert finding.fix.endswith("init_process_group(timeout=timedelta(...))")


def test_where_in_torch_a_message_was_written_is_not_in_the_way(golden):
    failed = ended(type="RuntimeError", message=TIMED_OUT, at=NOW - 20)
    finding = top(rank(0, exit=failed, process=GONE), rank(1))
    golden("causes/where_in_torch_a_message_was_written_is_not_in_the_way.txt", wording(finding))


# -- runs that are over --------------------------------------------------------------------------


def ended_by_launcher(number, *events, **fields):
    by = ended("signal", signal="SIGTERM", code=None, by_launcher=True)
    return dataclasses.replace(calling(number, *events, **fields), exit=by, process=GONE)


def test_of_a_run_that_is_over_the_past_is_spoken(golden):
    sleeping = Phase("compute", at(5, function="save"), NOW - 70)
    blocked = dataclasses.replace(ended_by_launcher(1), phase=sleeping)
    finding = top(ended_by_launcher(0, call(0, "barrier", 9, is_open=True, ago=70.0)), blocked)
    golden("causes/of_a_run_that_is_over_the_past_is_spoken.txt", wording(finding))


def test_ranks_that_were_parted(golden):
    finding = top(
        ended_by_launcher(0, call(0, is_open=True, ago=70.0)),
        ended_by_launcher(1, call(0, "barrier", 9, is_open=True, ago=70.0)),
    )
    golden("causes/ranks_that_were_parted.txt", wording(finding))


def test_how_long_a_section_lasted_does_not_grow_after_its_end(golden):
    section = Phase("prepare_data", at(5), NOW - 142)
    finding = top(
        ended_by_launcher(0, section=section),
        ended_by_launcher(1, call(0, is_open=True, ago=70.0)),
    )
    golden("causes/how_long_a_section_lasted_does_not_grow_after_its_end.txt", wording(finding))
    assert "alive" not in finding.title


# -- what a rank sleeps in -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("called", "sleeps_in", "what"),
    [
        (Site(queue.__file__, 140, "put"), "futex_wait_queue", "room in a queue"),
        (Site(subprocess.__file__, 9, "run"), "do_wait", "a child process"),
        (Site(threading.__file__, 9, "join"), "futex_wait_queue", "the end of a thread"),
        (None, "flock_lock_inode_wait", "a lock on a file"),
        (None, "nfs_wait_bit_killable", "network storage"),
    ],
)
def test_what_a_blocked_rank_waits_for(called, sleeps_in, what):
    frames = (*([called] if called else []), at(44, function="save"))
    worker = (Site("/code/train.py", 7, "upload"), Site(threading.__file__, 9, "_bootstrap"))
    shown = (ThreadStack("0x1", "", True, frames), ThreadStack("0x2", "", False, worker))
    asleep = calling(1, process=dataclasses.replace(ALIVE, sleeps_in=sleeps_in))
    diagnosis = examine(run(calling(0, call(0, is_open=True)), asleep), None, {1: shown})
    finding = diagnosis.findings[0]
    assert finding.ranks == (1,)
    assert what in finding.cause
    assert re.match(r"rank 1\b.* train\.py:7 in upload$", finding.evidence[-1])


def test_the_kernel_tells_what_a_process_sleeps_in():
    """Where a kernel does not tell at all, it says 0 of everybody, always."""
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            wait_until(lambda: processes.look(child.pid, processes.hostname(), None).state == "S")
            told = wait_until(lambda: Path(f"/proc/{child.pid}/wchan").read_text() != "0", 2.0)
            assert told
            assert "sleep" in processes.look(child.pid, processes.hostname(), None).sleeps_in
        except AssertionError:
            if Path(f"/proc/{child.pid}/wchan").read_text() == "0":
                pytest.skip("this kernel does not tell")
            raise
        finally:
            child.kill()


# -- loops over data -----------------------------------------------------------------------------


def became(*names, index=0):
    """Events of a loader."""
    return [call(n, name, 20, kind=LOADER, op=f"loader {index}") for n, name in enumerate(names)]


def test_a_look_at_the_first_batch_is_no_pass():
    """``next(iter(loader))`` to see the shapes: the loop after it counts."""
    wait = call(9, "DDP.backward", 33, is_open=True)
    looked = {"passes": 2, "finished": 0}
    more = calling(0, *became("begin", "left", "begin"), wait, batches_in_epoch=4, backwards=4)
    fewer = calling(
        1, *became("begin", "left", "begin", "end"), call(9, "barrier", 60, is_open=True),
        backwards=3,
    )  # fmt: skip
    finding = top(
        dataclasses.replace(more, loaders=(loader(**looked),)),
        dataclasses.replace(
            fewer, loaders=(loader(passes=2, finished=1, last_batches=3, batches=3),)
        ),
    )
    assert (finding.code, finding.ranks) == ("ran-out-of-data", (1,))


def test_a_pass_that_begins_before_the_last_one_is_given_up(golden):
    """Lightning's: rank 1 has begun its second epoch and left nothing; rank 0 gathers alone."""
    gathers = calling(0, *became("begin"), call(9, "all_gather", 9, is_open=True))
    waits = calling(1, *became("begin", "begin", "left"), call(9, "broadcast", 13, is_open=True))
    finding = top(
        dataclasses.replace(gathers, loaders=(loader(),), batches_in_epoch=4),
        dataclasses.replace(waits, loaders=(loader(passes=2),), batches_in_epoch=0),
    )
    assert finding.code == "collectives-parted"
    golden("causes/a_pass_that_begins_before_the_last_one_is_given_up.txt", wording(finding))


def test_fewer_batches_to_evaluate(golden):
    """The loader that matters is the one in whose pass the others are."""
    trained = loader(finished=1, last_batches=4)
    shown = [loader(index=1, trained=False, batches=n, finished=0, site=at(70)) for n in (6, 5)]
    inside = calling(
        0, *became("begin", "end"), *became("begin", index=1),
        call(9, "all_gather", 72, is_open=True),
    )  # fmt: skip
    through = calling(
        1, *became("begin", "end"), *became("begin", "end", index=1),
        call(9, "barrier", 80, is_open=True),
    )  # fmt: skip
    done = dataclasses.replace(shown[1], finished=1, last_batches=5)
    finding = top(
        dataclasses.replace(inside, loaders=(trained, shown[0])),
        dataclasses.replace(through, loaders=(trained, done)),
    )
    golden("causes/fewer_batches_to_evaluate.txt", wording(finding))


def test_one_rank_stops_at_the_end_of_an_epoch(golden):
    lost = ended(
        type="RuntimeError",
        message="[gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        at=NOW - 10,
    )
    waited = call(5, "DDP.backward", ago=10.0)
    on = {"loaders": (loader(passes=3, finished=2),), "batches_in_epoch": 1}
    off = {"loaders": (loader(passes=2, finished=2, last_batches=4),), "step": 8}
    finding = top(
        rank(0, events=(waited,), exit=lost, process=GONE, **on),
        rank(1, exit=FINISHED, process=GONE, **off),
    )
    assert finding.code == "left-the-loop"
    golden("causes/one_rank_stops_at_the_end_of_an_epoch.txt", wording(finding))


def test_validation_on_one_rank_when_the_others_are_done(golden):
    forward = call(3, "DDP.forward", 17, is_open=True, ago=3.0)
    finding = top(calling(0, forward), calling(1, exit=FINISHED, process=GONE))
    assert finding.code == "finished-early"
    golden("causes/validation_on_one_rank_when_the_others_are_done.txt", wording(finding))


def with_passes(*counts, **fields):
    """Each pass with the first of 32 ids in one order."""
    given = tuple(samples(range(n), epoch) for epoch, n in enumerate(counts))
    return rank(0, 1, passes=given, loaders=(loader(replicas=2, **fields),), batches=3, backwards=3)


def test_looks_at_the_first_batch_have_no_order():
    looks = with_passes(8, 32, 8, passes=3)
    assert examine(run(looks)).findings == ()


def test_a_pass_for_every_batch(golden):
    """``next(iter(loader))`` in the loop, and no set_epoch."""
    finding = top(with_passes(8, 8, 8, passes=3, trained=False))
    assert finding.code == "set-epoch-forgotten"
    golden("causes/a_pass_for_every_batch.txt", wording(finding))


# -- collectives that do not match ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two", "fix"),
    [
        ({"dtype": "int64"}, {}, "the same dtype on all ranks"),
        ({"shape": (8,)}, {}, "make the sizes equal"),
        ({"op": "MAX"}, {}, "pass the same op= on all ranks"),
        (
            {"name": "broadcast", "op": "src=0"},
            {"name": "broadcast", "op": "src=1"},
            "pass the same src= on all ranks",
        ),
    ],
)
def test_what_to_make_equal(one, two, fix):
    finding = top(*(calling(n, call(0, is_open=True, **f)) for n, f in enumerate((one, two))))
    assert finding.code == "mismatch"
    assert fix in finding.fix


def test_gloo_says_in_the_log_why_it_aborted(tmp_path, golden):
    (tmp_path / "0.log").write_text(
        "[Rank 0/2] terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "[Rank 0/2]   what():  [enforce fail at /x/pair.cc:456] op.preamble.length <= op.nbytes. "
        "112 vs 96. Received data size doesn't match expected size. Is there a mismatch?\n"
    )
    aborted = ended("signal", signal="SIGABRT", code=None)
    finding = top(
        calling(0, exit=aborted, process=GONE, path=tmp_path / "0.box"),
        calling(1, call(3, "barrier", 9, is_open=True, ago=2.0)),
    )
    assert finding.code == "mismatch"
    golden("causes/gloo_says_in_the_log_why_it_aborted.txt", wording(finding))


def test_input_that_nobody_gives(golden):
    failed = ended(type="EOFError", message="EOF when reading a line")
    finding = top(rank(0, exit=failed, process=GONE), rank(1))
    golden("causes/input_that_nobody_gives.txt", wording(finding))


def test_a_line_without_its_text_does_not_swallow_the_next():
    trace = (
        "Traceback (most recent call last):\n"
        '  File "<frozen runpy>", line 88, in _run_code\n'
        '  File "/code/train.py", line 5, in main\n'
        "    raise ValueError\n"
        "ValueError\n"
    )
    assert site_in(trace) == Site("/code/train.py", 5, "main")
