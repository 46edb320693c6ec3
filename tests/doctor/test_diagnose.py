"""The doctor's reasoning on records made by hand: who waits for whom, and who is to blame."""

import dataclasses
import re
import socket
import subprocess
import threading

import pytest

from miniray.doctor.diagnose import examine
from miniray.doctor.model import (
    BARRIER,
    GROUP,
    LOADER,
    NOTE,
    POINT_TO_POINT,
    Phase,
    Process,
    Site,
    ThreadStack,
)
from tests.doctor import records
from tests.doctor.records import (
    FINISHED,
    GONE,
    NOW,
    at,
    call,
    calling,
    ended,
    groups,
    loader,
    model,
    rank,
    run,
    wording,
)


def top(*given, **fields):
    diagnosis = examine(run(*given, **fields))
    assert diagnosis.findings, diagnosis.text()
    return diagnosis.findings[0]


def healthy(*given, **fields):
    diagnosis = examine(run(*given, **fields))
    assert diagnosis.findings == (), diagnosis.text()
    assert diagnosis.exit_code == 0
    return diagnosis


# -- runs that are well --------------------------------------------------------------------------


def test_a_run_that_moves_is_healthy(golden):
    golden("diagnose/healthy_running.txt", healthy(rank(0), rank(1)).verdict + "\n")


def test_waiting_within_the_limit_is_no_hang():
    healthy(calling(0, call(0, is_open=True, ago=59.0)), calling(1))


def test_waiting_beyond_the_limit_is_one():
    finding = top(calling(0, call(0, is_open=True, ago=61.0)), calling(1))
    assert (finding.severity.word, finding.ranks) == ("STUCK", (1,))


def test_a_rank_that_moves_is_waited_for():
    first = run(calling(0, call(0, is_open=True)), calling(1))
    working = dataclasses.replace(first.ranks[1], batches=first.ranks[1].batches + 1)
    second = run(calling(0, call(0, is_open=True)), working)
    assert examine(second, first).findings == ()


def test_a_rank_that_reads_from_disk_is_waited_for():
    first = run(calling(0, call(0, is_open=True)), calling(1))
    process = dataclasses.replace(first.ranks[1].process, io_bytes=10_000_000)
    second = run(
        calling(0, call(0, is_open=True)), dataclasses.replace(first.ranks[1], process=process)
    )
    assert examine(second, first).findings == ()


def test_a_long_step_of_all_ranks_is_no_hang():
    first = run(calling(0), calling(1))
    assert examine(with_cpu(first, 0.45), first).findings == ()
    assert examine(with_cpu(first, 0.0), first).findings[0].code == "blocked"


def test_ranks_may_reach_one_collective_from_different_lines():
    healthy(
        calling(0, *(call(n, line=10) for n in range(6))),
        calling(1, *(call(n, line=12) for n in range(6))),
    )


def test_one_rank_may_be_a_few_calls_ahead():
    healthy(calling(0, *(call(n) for n in range(9))), calling(1, *(call(n) for n in range(7))))


def test_a_finished_run_is_healthy(golden):
    done = [rank(n, exit=FINISHED, process=GONE) for n in range(2)]
    golden("diagnose/healthy_finished.txt", healthy(*done).verdict + "\n")


# -- somebody does not come ----------------------------------------------------------------------


def test_a_stopped_rank_is_named_with_the_way_to_continue_it(golden):
    process = Process(True, "T", 1.0, 0, 3, 0)
    finding = top(calling(0, call(0, is_open=True)), calling(1, process=process))
    assert finding.code == "stopped"
    assert finding.ranks == (1,)
    golden("diagnose/a_stopped_rank_is_named_with_the_way_to_continue_it.txt", wording(finding))
    assert "kill -CONT 101" in finding.fix


@pytest.mark.parametrize(("waited", "verdict"), [(2.0, "STUCK"), (0.5, "HEALTHY")])
def test_a_stopped_rank_is_found_before_the_limit(waited, verdict):
    process = Process(True, "T", 1.0, 0, 3, 0)
    phase = Phase("compute", at(9), NOW - waited)
    stopped = rank(1, process=process, phase=phase, attached=NOW - 100)
    found = examine(run(calling(0, call(0, ago=waited, is_open=True)), stopped))
    assert found.verdict.startswith(verdict)


def test_without_a_heartbeat_the_gil_is_held(golden):
    finding = top(calling(0, call(0, is_open=True)), calling(1, heartbeat=NOW - 120, cpu_seconds=9))
    assert finding.code == "holds-gil"
    golden("diagnose/without_a_heartbeat_the_gil_is_held.txt", wording(finding))


def with_cpu(first, used):
    """The second of two readings, half a second apart, in which rank 1 used ``used`` seconds."""
    one = first.ranks[1]
    process = dataclasses.replace(one.process, cpu_seconds=one.process.cpu_seconds + used)
    ranks = {**first.ranks, 1: dataclasses.replace(one, process=process)}
    return dataclasses.replace(first, ranks=ranks, read_at=first.read_at + 0.5)


@pytest.mark.parametrize(("used", "code"), [(0.49, "busy"), (0.0, "blocked")])
def test_a_rank_that_computes_is_told_from_one_that_sleeps(used, code):
    first = run(calling(0, call(0, is_open=True)), calling(1))
    finding = examine(with_cpu(first, used), first).findings[0]
    assert (finding.code, finding.ranks) == (code, (1,))


def test_the_line_it_is_stuck_at_comes_from_its_stack(golden):
    shown = ThreadStack(
        "0x1", "", True, (Site(threading.__file__, 7, "x"), at(44, function="save"))
    )
    first = run(calling(0, call(0, is_open=True)), calling(1))
    finding = examine(with_cpu(first, 0.0), first, {1: (shown,)}).findings[0]
    golden("diagnose/the_line_it_is_stuck_at_comes_from_its_stack.txt", wording(finding))
    assert str(finding.site) == "train.py:44"


def test_a_rank_that_waits_for_a_thread_that_is_gone(golden):
    lost = call(1, "a thread raised", 70, kind=NOTE, op="KeyError: 'row 7'", group="", ago=400.0)
    wait = call(1, is_open=True)
    phase = Phase("compute", at(1), NOW - 300)
    blocked = dataclasses.replace(calling(1, call(0), lost), phase=phase)
    finding = top(calling(0, call(0), wait), blocked)
    assert (finding.code, finding.ranks) == ("thread-lost", (1,))
    golden("diagnose/a_rank_that_waits_for_a_thread_that_is_gone.txt", wording(finding))


def test_a_long_section_is_called_by_its_name(golden):
    preparing = calling(0, section=Phase("prepare_data", at(5), NOW - 132))
    finding = top(preparing, calling(1, call(0, is_open=True)))
    golden("diagnose/a_long_section_is_called_by_its_name.txt", wording(finding))


def test_a_loader_that_gives_nothing():
    stuck = dataclasses.replace(calling(0), phase=Phase("data", at(20), NOW - 100))
    finding = top(stuck, calling(1, call(0, is_open=True)))
    assert finding.code == "loader-stuck"


def test_a_rank_that_never_started(golden):
    waiting = records.call(0, "init_process_group", kind=GROUP, group="", is_open=True)
    ranks = [
        calling(n, waiting, world=3, initialised=False, group_size=-1, step=0) for n in range(2)
    ]
    finding = top(*ranks, world=3)
    golden("diagnose/a_rank_that_never_started.txt", wording(finding))


def test_recv_waits_for_its_sender_only():
    receive = call(0, "recv", kind=POINT_TO_POINT, op="src=2", is_open=True)
    finding = top(calling(0, receive, world=3), calling(1, world=3), calling(2, world=3))
    assert finding.ranks == (2,)


def test_two_that_wait_for_each_others_message(golden):
    receive = [
        call(0, "recv", 7, kind=POINT_TO_POINT, op=f"src={1 - n}", is_open=True) for n in range(2)
    ]
    finding = top(*(calling(n, receive[n]) for n in range(2)))
    golden("diagnose/two_that_wait_for_each_others_message.txt", wording(finding))


def test_a_message_that_is_waited_for_by_one_who_waits_elsewhere(golden):
    receive = call(0, "recv", 7, kind=POINT_TO_POINT, op="src=1", is_open=True)
    finding = top(calling(0, receive), calling(1, call(0, "barrier", 9, is_open=True)))
    golden("diagnose/a_message_that_is_waited_for_by_one_who_waits_elsewhere.txt", wording(finding))


def test_a_rank_that_began_before_the_others_were_started():
    """Lightning's first process starts them, and says that it is alone when it attaches."""
    waiting = call(0, "init_process_group", kind=GROUP, group="", is_open=True)
    first = calling(0, waiting, world=1, initialised=False, group_size=-1)
    second = calling(1, initialised=False, group_size=-1)
    assert top(first, second, world=1).ranks == (1,)


def test_a_rank_that_left_is_known_at_once(golden):
    done = calling(1, exit=FINISHED, process=GONE)
    finding = top(calling(0, call(0, is_open=True, ago=3.0)), done)
    golden("diagnose/a_rank_that_left_is_known_at_once.txt", wording(finding))


def test_a_rank_that_ended_itself_in_mid_pass_left_the_loop(golden):
    """The other one's loader was closed by the exception that this gave it."""
    inside = loader(passes=1, finished=0, batches=8)
    left = call(9, "left", kind=LOADER, op="loader 0", ended=NOW - 10)
    lost = ended(
        type="RuntimeError",
        message="[gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        at=NOW - 10,
    )
    waited = call(5, "DDP.backward", ago=10.0)
    finding = top(
        rank(0, events=(waited, left), loaders=(inside,), exit=lost, process=GONE),
        rank(1, step=5, batches_in_epoch=5, loaders=(inside,), exit=FINISHED, process=GONE),
    )
    golden("diagnose/a_rank_that_ended_itself_in_mid_pass_left_the_loop.txt", wording(finding))


def test_a_batch_skipped_with_fsdp(golden):
    """Its ranks wait in forward, before the backward that would tell them apart."""
    inside, through = loader(passes=1, batches=10), loader(passes=1, finished=1, last_batches=10)
    skip = call(1, "no backward", kind=LOADER, op="loader 0: batch 4", step=3, ended=NOW - 350)
    gather, wait = (
        call(3, name, line, is_open=True) for name, line in (("all_gather", 7), ("barrier", 9))
    )
    finding = top(
        dataclasses.replace(calling(0, gather, backwards=9), loaders=(inside,)),
        dataclasses.replace(calling(1, skip, wait, backwards=9), loaders=(through,)),
    )
    golden("diagnose/a_batch_skipped_with_fsdp.txt", wording(finding))


def in_flight(step=10, message="bad label 17"):
    return {"in_flight": {"type": "ValueError", "message": message, "site": at(6), "step": step}}


def parted(*notes):
    """Rank 1 waits in a barrier, rank 0 in a backward."""
    waits = call(3, "DDP.backward", 7, is_open=True), call(3, "barrier", 9, is_open=True)
    return [calling(n, waits[n], notes=notes[n]) for n in range(2)]


def test_an_exception_that_waits_on_its_way_out(golden):
    finding = top(*parted({}, in_flight()))
    assert (finding.code, finding.ranks) == ("exception", (1,))
    golden("diagnose/an_exception_that_waits_on_its_way_out.txt", wording(finding))


@pytest.mark.parametrize(
    "note",
    [
        in_flight(step=4),  # steps were made since: training goes on in an `except`
        in_flight(message="[gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        {"in_flight": None},
    ],
)
def test_an_exception_that_is_not_why(note):
    assert top(*parted({}, note)).code == "collectives-parted"


def test_another_number_of_epochs():
    ranks = parted({}, {})
    more, fewer = loader(passes=3, finished=2), loader(passes=2, finished=2, last_batches=4)
    finding = top(
        dataclasses.replace(ranks[0], loaders=(more,), batches_in_epoch=1),
        dataclasses.replace(ranks[1], loaders=(fewer,)),
    )
    assert "DDP" in finding.cause


def test_a_breakpoint_that_nobody_answers(golden):
    quit = ended(type="BdbQuit", message="")
    finding = top(rank(0, exit=quit, process=GONE), rank(1))
    golden("diagnose/a_breakpoint_that_nobody_answers.txt", wording(finding))
    assert "breakpoint" in finding.fix


def test_a_crash_after_the_end(golden):
    crash = ended("signal", signal="SIGABRT", code=None)
    ending = Phase("exit", records.NOWHERE, NOW - 11)
    finding = top(rank(0, exit=crash, phase=ending, process=GONE), rank(1))
    golden("diagnose/a_crash_after_the_end.txt", wording(finding))


def test_a_stage_that_hangs_while_the_other_waits_for_its_message(golden):
    """Messages of a pipeline are waited for in torch, and not recorded."""
    torch = Site("/x/site-packages/torch/distributed/pipelining/schedules.py", 683, "_wait")
    stacks = {0: (torch, at(90)), 1: (at(26, function="forward"),)}
    shown = {n: (ThreadStack("0x1", "", True, frames),) for n, frames in stacks.items()}
    ranks = [
        dataclasses.replace(calling(n), section=Phase(f"stage {n} fwd mb 3", at(1), NOW - 90 + n))
        for n in range(2)
    ]
    (finding,) = examine(run(*ranks), shown=shown).findings
    assert finding.ranks == (1,)
    golden(
        "diagnose/a_stage_that_hangs_while_the_other_waits_for_its_message.txt", wording(finding)
    )


def test_a_process_that_does_not_end():
    stuck = [
        dataclasses.replace(calling(n), phase=Phase("exit", at(0), NOW - 90)) for n in range(2)
    ]
    assert top(*stuck).code == "does-not-end"


@pytest.mark.parametrize("code", ["killed", "does-not-end"])
@pytest.mark.parametrize(
    ("initialized", "destroys", "advised"),
    [(True, False, True), (False, False, False), (True, True, False)],
)
def test_destroying_the_group_is_advised_if_the_script_does_not(
    code, initialized, destroys, advised
):
    destroy = call(3, "destroy_process_group", is_open=True, kind=GROUP, blocking=False)
    fields = {
        "initialised": initialized,
        "events": (destroy,) if destroys else (),
        "phase": Phase("exit", at(0), NOW - 90),
    }
    if code != "does-not-end":
        crash = ended("signal", signal="SIGSEGV", code=None, type="", message="")
        fields |= {"exit": crash, "process": GONE}
    finding = top(*(dataclasses.replace(calling(n), **fields) for n in range(2)))
    assert finding.code == code
    assert ("destroy_process_group" in finding.fix) == advised
    assert ("process group" in finding.cause) == advised


def test_a_thread_that_keeps_a_process_from_ending(golden):
    """Python waits for threads before it tells anybody that it is ending."""
    shown = (
        ThreadStack("0x1", "", False, (at(70, function="pump"), Site("t.py", 1, "_bootstrap"))),
        ThreadStack("0x2", "", True, (Site(threading.__file__, 9, "_shutdown"),)),
    )
    one = dataclasses.replace(calling(0, world=1), phase=Phase("epoch end", at(20), NOW - 90))
    (finding,) = examine(run(one), shown={0: shown}).findings
    golden("diagnose/a_thread_that_keeps_a_process_from_ending.txt", wording(finding))


# -- all wait for each other ---------------------------------------------------------------------


def test_a_collective_under_if_rank_0(golden):
    finding = top(
        calling(0, call(0), call(1, "all_gather", 12, is_open=True, ago=3.0), world=4),
        *(calling(n, call(0), call(1, line=80, is_open=True, ago=3.0), world=4) for n in (1, 2, 3)),
    )
    golden("diagnose/a_collective_under_if_rank_0.txt", wording(finding))
    assert finding.ranks == (0,)


def test_a_named_barrier_in_one_branch(golden):
    held = call(1, "save", 9, kind=BARRIER, group="", is_open=True)
    one = calling(0, call(0), held, world=4, barrier=records.barrier(1))
    finding = top(one, *(calling(n, call(0), call(1, is_open=True), world=4) for n in (1, 2, 3)))
    golden("diagnose/a_named_barrier_in_one_branch.txt", wording(finding))


def test_of_two_ranks_the_one_on_a_line_nobody_else_ran_is_odd():
    usual = [call(n) for n in range(3)]
    finding = top(
        calling(0, *usual, call(3, "broadcast", 55, is_open=True, ago=3.0)),
        calling(1, *usual, call(3, is_open=True, ago=3.0)),
    )
    assert finding.ranks == (0,)


def test_two_ranks_nothing_tells_apart_are_both_named():
    finding = top(
        calling(0, call(0, "broadcast", 55, is_open=True, ago=3.0)),
        calling(1, call(0, "all_reduce", 56, is_open=True, ago=3.0)),
    )
    assert finding.ranks == (0, 1)


def test_validation_on_rank_0_through_the_wrapper(golden):
    forward = call(1, "DDP.forward", 40, op="buffers", is_open=True)
    finding = top(
        calling(0, call(0), forward, world=3),
        *(calling(n, call(0), call(1, "barrier", 50, is_open=True), world=3) for n in (1, 2)),
    )
    golden("diagnose/validation_on_rank_0_through_the_wrapper.txt", wording(finding))
    assert "model.module" in finding.fix


def test_all_in_one_collective_that_does_not_complete(golden):
    finding = top(*(calling(n, call(0, is_open=True)) for n in range(2)))
    assert finding.code == "does-not-complete"
    golden("diagnose/all_in_one_collective_that_does_not_complete.txt", wording(finding))


def test_two_groups_that_wait_for_each_other(golden):
    pair = "ranks 0,1 (#1)"
    finding = top(
        calling(0, call(0, line=9, group=pair, is_open=True), world=3, notes=groups(pair, 0, 1)),
        calling(1, call(0, line=11, is_open=True), world=3),
        calling(2, call(0, line=12, is_open=True), world=3),
    )
    golden("diagnose/two_groups_that_wait_for_each_other.txt", wording(finding))
    assert "different process groups" in finding.cause


def test_a_group_waits_for_its_own_members_only():
    """Rank 2 is no member: that it does other things is nobody's business."""
    pair = "ranks 0,1 (#1)"
    finding = top(
        calling(0, call(0, line=9, group=pair, is_open=True), world=3, notes=groups(pair, 0, 1)),
        calling(1, world=3),
        calling(2, world=3),
    )
    assert finding.ranks == (1,)


def test_a_large_group_waits_for_its_own_members_only():
    """Its name doesn't list more than eight ranks."""
    name = "10 of 12 ranks"
    members = range(10)
    records = [
        calling(
            n, call(0, line=9, group=name, is_open=True), world=12, notes=groups(name, *members)
        )
        for n in members[:-1]
    ]
    others = [calling(n, world=12) for n in (9, 10, 11)]
    assert top(*records, *others).ranks == (9,)


def test_a_call_that_one_member_of_a_group_skipped(golden):
    """Ranks 0 and 1 are no members: they wait for these two, and had no part in it."""
    pair = "ranks 2,3 (#2)"
    shared = [call(0, "DDP.backward", 20), call(0, line=12, group=pair)]
    later = call(1, "DDP.backward", 20, is_open=True)
    ranks = [
        calling(0, call(0, "DDP.backward", 20), later, world=4),
        calling(1, call(0, "DDP.backward", 20), later, world=4),
        calling(
            2,
            *shared,
            call(1, line=12, group=pair, is_open=True),
            world=4,
            notes=groups(pair, 2, 3),
        ),
        calling(3, *shared, later, world=4),
    ]
    finding = top(*ranks)
    golden("diagnose/a_call_that_one_member_of_a_group_skipped.txt", wording(finding))
    assert finding.ranks == (2, 3)


# -- sequences -----------------------------------------------------------------------------------


def test_shapes_that_differ_are_a_mismatch_although_it_runs():
    finding = top(
        calling(0, call(0), call(1, shape=(4,))), calling(1, call(0), call(1, shape=(8,)))
    )
    assert (finding.code, finding.severity.word) == ("mismatch", "WRONG")
    assert "(4,)" in finding.title
    assert "(8,)" in finding.title


def test_sizes_count_and_not_shapes():
    healthy(calling(0, call(0), call(1, shape=(4,))), calling(1, call(0), call(1, shape=(2, 2))))


def test_equal_collectives_swapped_on_one_of_three_ranks():
    order = {0: (10, 20), 1: (10, 20), 2: (20, 10)}
    ranks = [
        calling(n, *(call(i, line=order[n][i % 2]) for i in range(6)), world=3) for n in range(3)
    ]
    finding = top(*ranks)
    assert finding.code == "collectives-swapped"
    assert finding.ranks == (2,)


def test_a_rotation_of_three_is_found_too():
    one, two = (10, 20, 30), (20, 30, 10)
    finding = top(
        calling(0, *(call(i, line=one[i % 3]) for i in range(6))),
        calling(1, *(call(i, line=two[i % 3]) for i in range(6))),
    )
    assert finding.code == "collectives-swapped"


def test_only_the_part_both_rings_still_have_is_compared():
    healthy(
        calling(0, *(call(n) for n in range(5, 9))), calling(1, *(call(n) for n in range(7, 9)))
    )


def test_joined_ranks_are_not_compared():
    healthy(
        calling(0, call(0, "DDP.backward"), call(1), notes={"join": True}),
        calling(1, call(0), call(1, "barrier"), notes={"join": True}),
    )


# -- NCCL: the call returns, the GPU waits --------------------------------------------------------


def on_gpu(number, *events, **fields):
    record = calling(number, *events, backend="nccl", **fields)
    return dataclasses.replace(record, phase=Phase("compute", at(70), NOW - 100))


def test_with_nccl_the_rank_that_handed_over_fewer_is_waited_for(golden):
    finding = top(
        on_gpu(0, call(0, ago=200.0), call(1, ago=100.0), world=3),
        on_gpu(1, call(0, ago=200.0), world=3),
        on_gpu(2, call(0, ago=200.0), call(1, ago=100.0), world=3),
    )
    assert finding.ranks == (1,)
    golden("diagnose/with_nccl_the_rank_that_handed_over_fewer_is_waited_for.txt", wording(finding))


def test_with_nccl_a_moving_run_is_healthy():
    moving = calling(1, call(0, ago=0.2), backend="nccl")
    healthy(on_gpu(0, call(0, ago=200.0), call(1, ago=100.0)), moving)


# -- the loop over the data ----------------------------------------------------------------------


def in_backward(number, batches, **fields):
    wait = call(batches - 1, "DDP.backward", 33, is_open=True)
    given = {
        "loaders": (loader(),),
        "batches": batches,
        "batches_in_epoch": batches,
        "backwards": batches,
        "step": batches - 1,
        "models": (model(),),
        **fields,
    }
    return calling(number, wait, **given)


def at_barrier(number, events=(), *, backwards, **fields):
    wait = call(backwards, "barrier", 60, is_open=True)
    return calling(number, *events, wait, models=(model(),), backwards=backwards, **fields)


def test_one_rank_has_fewer_batches(golden):
    short = at_barrier(
        1,
        step=3,
        loaders=(loader(batches=3, finished=1, last_batches=3),),
        batches=3,
        batches_in_epoch=3,
        backwards=3,
    )
    finding = top(in_backward(0, 4), short)
    golden("diagnose/one_rank_has_fewer_batches.txt", wording(finding))
    assert finding.ranks == (1,)


def test_fewer_batches_are_found_after_the_rank_has_finished_too():
    short = rank(
        1,
        step=3,
        loaders=(loader(batches=3, finished=1, last_batches=3),),
        batches=3,
        backwards=3,
        exit=FINISHED,
        process=GONE,
    )
    assert top(in_backward(0, 4), short).code == "ran-out-of-data"


def test_a_rank_without_a_batch(golden):
    def waiting(number):
        return in_backward(number, 1, loaders=(loader(length=1, batches=1),), world=4)

    empty = at_barrier(
        3,
        step=0,
        world=4,
        loaders=(loader(length=0, batches=0, finished=1, trained=False),),
        batches=0,
        batches_in_epoch=0,
        backwards=0,
    )
    finding = top(waiting(0), waiting(1), waiting(2), empty)
    golden("diagnose/a_rank_without_a_batch.txt", wording(finding))


def test_a_rank_that_left_the_loop(golden):
    left = records.call(5, "left", 20, kind=LOADER, op="loader 0: 2 batches", group="")
    early = at_barrier(
        1, (left,), step=2, loaders=(loader(),), batches=2, batches_in_epoch=2, backwards=2
    )
    finding = top(in_backward(0, 3), early)
    golden("diagnose/a_rank_that_left_the_loop.txt", wording(finding))


def test_a_barrier_inside_the_loop_is_not_leaving_it():
    early = at_barrier(1, step=2, loaders=(loader(),), batches=2, batches_in_epoch=2, backwards=2)
    assert top(in_backward(0, 3), early).code == "collectives-parted"


def test_a_skipped_backward_and_why(golden):
    skip = records.call(
        1, "no backward", 20, kind=LOADER, op="loader 0: batch 2, loss nan", group="", step=1
    )
    short = at_barrier(
        1,
        (skip,),
        step=3,
        loaders=(loader(finished=1, last_batches=4),),
        batches=4,
        batches_in_epoch=4,
        backwards=3,
    )
    finding = top(in_backward(0, 4), short)
    golden("diagnose/a_skipped_backward_and_why.txt", wording(finding))


def test_a_batch_in_hand_is_not_skipped():
    """Rank 1 has its fourth batch and has not come to its backward: it is blocked, nothing else."""
    wait = in_backward(0, 4)
    busy = calling(1, loaders=(loader(),), batches=4, batches_in_epoch=4, backwards=3, step=3)
    assert top(wait, busy).code == "blocked"


def test_a_stopped_rank_is_stopped_whatever_its_counts():
    stopped = calling(
        1,
        loaders=(loader(batches=3, finished=1, last_batches=3),),
        batches=3,
        backwards=3,
        step=3,
        process=Process(True, "T", 1.0, 0, 3, 0),
    )
    assert top(in_backward(0, 4), stopped).code == "stopped"


def averaging(*steps, waits=False):
    """DDP's exchanges, one in each of these steps, the last one open."""
    return [
        call(n, "DDP.backward", 33, step=step, is_open=waits and n == len(steps) - 1)
        for n, step in enumerate(steps)
    ]


def test_a_backward_without_an_exchange(golden):
    """Four batches and four backwards on both; rank 1 was inside of no_sync() at step 2."""
    done = {"loaders": (loader(finished=1, last_batches=4),), "batches": 4, "step": 4}
    silent = at_barrier(1, averaging(0, 2, 3), backwards=4, **done)
    wait = calling(
        0,
        *averaging(0, 1, 2, 3, waits=True),
        models=(model(),),
        loaders=(loader(),),
        batches=4,
        batches_in_epoch=4,
        backwards=4,
        step=3,
    )
    finding = top(wait, silent)
    golden("diagnose/a_backward_without_an_exchange.txt", wording(finding))
    assert "no_sync" in finding.cause


def test_other_numbers_of_accumulation_steps(golden):
    """Rank 0 averages every fourth backward, rank 1 every second, and both step then."""
    done = at_barrier(0, averaging(0, 1), backwards=8, batches=8, step=2)
    waits = calling(
        1, *averaging(0, 1, 2, waits=True), models=(model(),), batches=6, backwards=6, step=2
    )
    finding = top(done, waits)
    golden("diagnose/other_numbers_of_accumulation_steps.txt", wording(finding))


def test_loops_of_different_lengths_without_a_loader():
    waits = dataclasses.replace(in_backward(0, 8, loaders=()), batches=0)
    done = at_barrier(1, averaging(*range(7)), backwards=7, step=7, batches=0)
    finding = top(waits, done)
    assert finding.code == "collectives-parted"
    assert "DDP" in finding.cause


def test_a_compiled_model_waits_in_backward_unseen(golden):
    """Its exchanges are no events: what tells is where autograd sleeps."""
    made = call(0, "DDP.__init__", 9)
    fields = {"models": (model(),), "loaders": (loader(),), "batches": 4, "backwards": 4}
    inside = dataclasses.replace(
        calling(0, made, batches_in_epoch=4, step=3, **fields),
        phase=Phase("backward", at(33), NOW - 300),
    )
    short = calling(
        1,
        made,
        call(1, "barrier", 60, is_open=True),
        step=3,
        models=(model(),),
        loaders=(loader(batches=3, finished=1, last_batches=3),),
        batches=3,
        backwards=3,
    )
    engine = Site("/x/site-packages/torch/autograd/graph.py", 9, "_engine_run_backward")
    shown = {0: (ThreadStack("0x1", "", True, (engine, at(33))),)}
    (finding,) = examine(run(inside, short), shown=shown).findings
    golden("diagnose/a_compiled_model_waits_in_backward_unseen.txt", wording(finding))


# -- coming together -----------------------------------------------------------------------------


def joining(number, world=2, **asked):
    """A rank in init_process_group, with what it asks for."""
    wait = call(0, "init_process_group", 5, kind=GROUP, group="", is_open=True)
    said = {"rank": number, "world_size": world, "place": "127.0.0.1:29500", **asked}
    return calling(number, wait, initialised=False, group_size=-1, notes={"asked": said})


@pytest.mark.parametrize(
    ("asked", "code", "title"),
    [
        (
            [{"world_size": 4}, {"world_size": 4}],
            "world-size",
            "init_process_group waits for 4 ranks, and 2 ranks started",
        ),
        (
            [{"rank": 0}, {"rank": 0}],
            "duplicate-rank",
            "ranks 0 and 1 call init_process_group with rank=0",
        ),
        (
            [{}, {"place": "127.0.0.1:29501"}],
            "places-differ",
            "the ranks meet at different places: rank 0 at 127.0.0.1:29500, rank 1 at "
            "127.0.0.1:29501",
        ),
    ],
)
def test_ranks_that_can_never_meet(asked, code, title):
    finding = top(*(joining(n, **said) for n, said in enumerate(asked)))
    assert (finding.code, finding.title, finding.severity.word) == (code, title, "STUCK")


def test_why_they_did_not_meet_comes_before_what_torch_says_of_it():
    taken = ended(type="DistNetworkError", message="EADDRINUSE, address already in use")
    late = dataclasses.replace(joining(1, rank=0), exit=taken, process=GONE)
    finding = top(joining(0), late)
    assert (finding.code, finding.severity.word) == ("duplicate-rank", "FAILED")


def test_ranks_that_agree_and_do_not_meet():
    assert top(joining(0), joining(1)).code == "does-not-complete"


# -- ends ----------------------------------------------------------------------------------------


def test_the_first_exception_is_the_cause_and_the_rest_follow(golden):
    broken = rank(1, exit=ended(at=NOW - 12), process=GONE)
    lost = rank(
        0,
        events=(call(3, "DDP.backward", ago=10.0, ended=NOW - 10),),
        exit=ended(
            type="RuntimeError",
            message="[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1",
            at=NOW - 10,
        ),
        process=GONE,
    )
    finding = top(lost, broken)
    golden("diagnose/the_first_exception_is_the_cause_and_the_rest_follow.txt", wording(finding))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConnectionRefusedError", "[Errno 111] Connection refused"),
        ("RuntimeError", "Connection closed by peer: the database timed out"),
        ("TimeoutError", "timed out"),
    ],
)
def test_a_connection_of_user_code_is_the_cause(kind, message):
    """Rank 0 waits in a collective for rank 1, whose last collective was a moment before."""
    lost = rank(
        1,
        events=(call(4, "DDP.backward", ago=10.2),),
        exit=ended(type=kind, message=message, at=NOW - 10),
        process=GONE,
    )
    finding = top(calling(0, call(5, "DDP.backward", is_open=True, ago=9.0)), lost)
    assert (finding.code, finding.ranks) == ("exception", (1,))


def test_a_late_exception_of_its_own_is_no_consequence(golden):
    one = rank(1, exit=ended(at=NOW - 12), process=GONE)
    two = rank(0, exit=ended(type="KeyError", message="x", at=NOW - 5), process=GONE)
    finding = top(one, two)
    assert finding.ranks == (1,)
    golden("diagnose/a_late_exception_of_its_own_is_no_consequence.txt", wording(finding))


def test_a_process_nobody_saw_end_is_not_the_cause_of_an_exception():
    """torchrun ends the others when one fails, and writes nothing down."""
    failed = rank(1, exit=ended(at=NOW - 10), process=GONE, heartbeat=NOW - 10.2)
    swept = rank(0, exit=ended("gone", code=None, at=None), process=GONE, heartbeat=NOW - 10.6)
    assert top(swept, failed).ranks == (1,)


def test_a_box_that_cannot_be_read_is_not_a_rank_that_never_started():
    waiting = calling(0, call(0, is_open=True))
    damaged = dataclasses.replace(run(waiting, world=2), damaged={"ranks/1.box": "cut short"})
    shown = examine(damaged).text()
    assert "ranks/1.box: cut short" in shown
    assert "[Rank 1/2]" not in shown


def test_the_same_exception_everywhere_is_one_finding(golden):
    finding = top(*(rank(n, exit=ended(at=NOW - 10 + n), process=GONE) for n in range(2)))
    golden("diagnose/the_same_exception_everywhere_is_one_finding.txt", wording(finding))


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"kind": "signal", "signal": "SIGKILL", "code": None}, "killed", "killed by SIGKILL"),
        ({"kind": "signal", "signal": "SIGSEGV", "code": None}, "killed", "crashed with SIGSEGV"),
        ({"kind": "gone", "code": None, "at": None}, "killed", "nobody saw it end"),
        ({"kind": "code", "code": 3}, "exit", "exited with code 3"),
        (
            {"kind": "exception", "type": "OutOfMemoryError", "message": "CUDA out of memory"},
            "out-of-memory",
            "ran out of memory at train.py:33 (100 MB resident, 120 MB at most)",
        ),
        (
            {"type": "RuntimeError", "message": "DataLoader worker (pid 7) is killed by signal"},
            "exception",
            "lost a loader's process: RuntimeError: DataLoader worker (pid 7) is killed",
        ),
    ],
)
def test_how_a_process_ended(given, code, words):
    dead = rank(1, exit=ended(**given), process=GONE)
    finding = top(calling(0, call(0, is_open=True, ago=2.0)), dead)
    assert (finding.code, finding.ranks) == (code, (1,))
    assert words in finding.title


def test_ranks_the_launcher_ended_are_not_the_cause(golden):
    """A hung run that was ended: the boxes still say who waited for whom."""
    by_launcher = ended("signal", signal="SIGTERM", code=None, by_launcher=True, at=NOW)
    waiting = calling(0, call(0, is_open=True), exit=by_launcher, process=GONE)
    stuck = calling(1, exit=by_launcher, process=GONE)
    finding = top(waiting, stuck)
    assert finding.severity.word == "STUCK"
    assert finding.ranks == (1,)
    golden("diagnose/ranks_the_launcher_ended_are_not_the_cause.txt", wording(finding))


def test_everybody_timed_out():
    timeout = ended(
        type="RuntimeError",
        message="[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv",
        at=NOW - 1,
    )
    one = calling(0, call(0, "all_gather", 5, ago=7.0, ended=NOW - 1), exit=timeout, process=GONE)
    two = calling(1, call(0, line=80, ago=7.0, ended=NOW - 1), exit=timeout, process=GONE)
    assert top(one, two).code == "collectives-parted"


def test_nothing_to_read():
    empty = dataclasses.replace(run(rank(0)), ranks={})
    diagnosis = examine(empty)
    assert diagnosis.exit_code == 2
    assert diagnosis.verdict.startswith("UNREADABLE")


def test_a_port_that_is_taken_is_nobodys_fault_but_the_ports():
    taken = ended(
        type="DistNetworkError", message="failed to listen: EADDRINUSE, address already in use"
    )
    waiting = call(0, "init_process_group", kind=GROUP, group="", is_open=True, ago=9.0)
    other = calling(1, waiting, initialised=False, group_size=-1)
    finding = top(rank(0, exit=taken, process=GONE, group_size=-1), other)
    assert finding.ranks == (0,)
    assert "MASTER_PORT" in finding.cause


def test_what_nobody_caused_is_the_cause(golden):
    """The only exception there is says "timed out", and everybody was where he should be."""
    lost = ended(
        type="RuntimeError",
        message="[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv",
        at=NOW - 9,
    )
    one = calling(0, call(0, ago=70.0, ended=NOW - 9), exit=lost, process=GONE)
    finding = top(one, calling(1, call(0, is_open=True, ago=70.0)))
    golden("diagnose/what_nobody_caused_is_the_cause.txt", wording(finding))


def test_a_crash_in_a_collective_that_does_not_match(golden):
    """gloo aborts the process: what it was about is in the records."""
    aborted = ended("signal", signal="SIGABRT", code=None)
    crashed = calling(1, call(0), call(1, shape=(8,), is_open=True), exit=aborted, process=GONE)
    finding = top(calling(0, call(0), call(1, shape=(4,), is_open=True, ago=2.0)), crashed)
    assert (finding.code, finding.severity.word) == ("mismatch", "FAILED")
    golden("diagnose/a_crash_in_a_collective_that_does_not_match.txt", wording(finding))


def test_groups_made_by_their_members_only(golden):
    def making(number, ranks, *after):
        made = call(0, "new_group", 3, op=f"ranks={ranks}", is_open=not after)
        return calling(number, made, *after, world=3)

    finding = top(
        making(0, [0, 1]),
        making(1, [0, 1], call(1, "barrier", 9, is_open=True)),
        making(2, [2], call(1, "barrier", 9, is_open=True)),
    )
    assert (finding.code, finding.ranks) == ("mismatch", (2,))
    golden("diagnose/groups_made_by_their_members_only.txt", wording(finding))


def test_an_error_in_a_loaders_worker_is_shown_as_it_was_raised_there(golden):
    message = "Caught KeyError in DataLoader worker process 1.\nOriginal Traceback"
    failed = ended(type="KeyError", message=message, traceback=f"{message}:\n{TRACEBACK}")
    finding = top(rank(0), rank(1, exit=failed, process=GONE))
    golden(
        "diagnose/an_error_in_a_loaders_worker_is_shown_as_it_was_raised_there.txt",
        wording(finding),
    )
    assert str(finding.site) == "train.py:28"


def test_what_a_script_says_when_it_exits_is_said(golden):
    left = ended("exit", message="no file conf.yaml", code=1)
    finding = top(rank(0), rank(1, exit=left, process=GONE))
    golden("diagnose/what_a_script_says_when_it_exits_is_said.txt", wording(finding))


# -- drivers -------------------------------------------------------------------------------------

HERE = {"host": socket.gethostname(), "state": "running", "process_started": 1.0}
BY_DRIVER = ended("signal", signal="SIGKILL", by_launcher=True)
TRACEBACK = """Traceback (most recent call last):
  File "/code/train.py", line 50, in <module>
    trainer.train(epochs=3)
  File "/code/train.py", line 28, in on_epoch_end
    print(result["accuracy"])
          ~~~~~~^^^^^^^^^^^^
KeyError: 'accuracy'
"""


def test_an_error_of_the_driver_is_the_cause_and_the_ranks_it_ended_are_consequences(golden):
    error = {"type": "KeyError", "message": "'accuracy'", "traceback": TRACEBACK}
    stopped = [rank(number, exit=BY_DRIVER, process=GONE) for number in range(2)]
    finding = top(*stopped, state="failed", error=error)
    golden(
        "diagnose/an_error_of_the_driver_is_the_cause_and_the_ranks_it_ended_are_consequences.txt",
        wording(finding),
    )
    assert str(finding.site) == "train.py:28"


def test_the_error_of_a_worker_comes_before_what_its_driver_said_about_it(golden):
    error = {"type": "TaskError(ValueError)", "message": "worker 1 in epoch 2", "traceback": ""}
    finding = top(
        rank(0, exit=BY_DRIVER, process=GONE),
        rank(1, exit=ended(message="bad row 7 (in epoch 2)"), process=GONE),
        state="failed",
        error=error,
    )
    golden(
        "diagnose/the_error_of_a_worker_comes_before_what_its_driver_said_about_it.txt",
        wording(finding),
    )
    assert finding.ranks == (1,)


def test_what_the_launcher_says_is_said_where_no_rank_knows_better(golden):
    error = {"type": None, "message": "the connection to machine 1 is lost", "traceback": None}
    stopped = [rank(number, exit=BY_DRIVER, process=GONE) for number in range(2)]
    finding = top(*stopped, state="failed", error=error)
    golden(
        "diagnose/what_the_launcher_says_is_said_where_no_rank_knows_better.txt", wording(finding)
    )


def test_ranks_that_went_down_with_their_driver_are_not_blamed():
    gone = [rank(number, exit=ended("gone"), process=GONE) for number in range(2)]
    with subprocess.Popen(["true"]) as process:
        process.wait()
    finding = top(*gone, **HERE, pid=process.pid)
    assert re.search(rf"\bdriver \(pid {process.pid}\)", finding.title)
    assert finding.ranks == ()
    # Ranks that finished do not need it any more.
    done = [rank(number, exit=FINISHED, process=GONE) for number in range(2)]
    healthy(*done, **HERE, pid=process.pid)
    # Where the run has no driver but rank 0, that rank is the one that is gone.
    driving = dataclasses.replace(gone[0], pid=process.pid)
    finding = top(driving, gone[1], **HERE, pid=process.pid)
    assert finding.ranks == (0,)
    assert "driver" not in finding.title


def test_a_run_that_was_interrupted_is_said_to_be():
    stopped = [rank(number, exit=BY_DRIVER, process=GONE) for number in range(2)]
    diagnosis = healthy(*stopped, state="interrupted")
    assert diagnosis.case.interrupted
    assert re.match(r"HEALTHY: 2 ranks at step 10\b.*\binterrupted$", diagnosis.verdict)


@pytest.mark.parametrize(("waited", "is_found"), [(0.5, False), (300.0, True)])
def test_ranks_that_wait_when_somebody_ends_the_run_are_stuck_only_after_the_limit(
    waited, is_found
):
    def waiting(number, *, in_it=True):
        calls = (call(0, is_open=True, ago=10 + waited),) if in_it else ()
        return calling(number, *calls, exit=BY_DRIVER, process=GONE)

    together = examine(run(waiting(0), waiting(1), state="interrupted"))
    for_one = examine(run(waiting(0), waiting(1, in_it=False), state="interrupted"))
    for found in (together, for_one):
        assert found.verdict.startswith("STUCK" if is_found else "HEALTHY"), found.verdict


def test_workers_without_torch_are_known_by_their_epochs(golden):
    plain = {"step": 0, "batch_size": 0, "batches": 0, "samples": 0, "loss": None}
    done = [
        rank(n, epoch=5, phase=Phase("start", at(1), NOW), exit=FINISHED, process=GONE, **plain)
        for n in range(2)
    ]
    shown = examine(run(*done)).text()
    golden("diagnose/workers_without_torch_are_known_by_their_epochs.txt", shown + "\n")
    assert "Step" not in shown
    going = [rank(n, epoch=5, phase=Phase("start", at(1), NOW), **plain) for n in range(2)]
    (first, _) = examine(run(*going)).case
    assert first.state == "running"  # not "starting": five epochs are behind it
    assert "trainer" in first.doing()
    (fresh, _) = examine(run(*(dataclasses.replace(r, epoch=-1) for r in going))).case
    assert fresh.state == "starting"
    assert "trainer" not in fresh.doing()
