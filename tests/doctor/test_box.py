"""The box: what is written is read, whatever happens in between."""

import json
import math
import os
import random
import signal
import struct
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.doctor import layout, model
from miniray.doctor.box import Box
from miniray.doctor.history import StepHistory
from miniray.doctor.layout import Cell, Real
from miniray.doctor.reader import BoxReader, read_box, read_run
from miniray.errors import BoxError

MS = 10**6  # nanoseconds


@pytest.fixture
def box(tmp_path):
    (tmp_path / "ranks").mkdir()
    box = Box.create(tmp_path / "ranks" / "0.box")
    box.write_info({"rank": 0, "world_size": 2})
    yield box
    box.close()


def add_event(box, name="all_reduce", op="", sizes=(), **kwargs):
    return box.event(box.what(model.COLLECTIVE, name, op, sizes=sizes), **kwargs)


def test_events_come_back_as_written_in_order(box):
    site = "/code/train.py\x0080\x00main"
    box.ints[Cell.STEP] = 7
    what = box.what(model.COLLECTIVE, "all_reduce", "SUM", "0", "float32", site, (4, 8))
    box.event(what, sequence=3, is_open=True, blocking=True)
    add_event(box, "broadcast", sequence=4)
    first, second = read_box(box.path).events
    assert (first.number, first.kind, first.name, first.op) == (
        0,
        "collective",
        "all_reduce",
        "SUM",
    )
    assert (first.group, first.sequence, first.shape, first.dtype) == ("0", 3, (4, 8), "float32")
    assert first.site == model.Site("/code/train.py", 80, "main")
    assert first.step == 7
    assert first.is_open
    assert first.describe() == "all_reduce SUM (4, 8) float32 at train.py:80"
    assert (second.number, second.name, second.is_open) == (1, "broadcast", False)
    assert abs(second.at - time.time()) < 30


def test_the_blocking_call_is_what_the_rank_waits_in_until_it_ends(box):
    added = add_event(box, "barrier", is_open=True, blocking=True)
    assert read_box(box.path).waiting.name == "barrier"
    box.end_event(added, time.monotonic_ns())
    record = read_box(box.path)
    assert record.waiting is None
    assert record.events[0].ended >= record.events[0].at


def test_the_ring_keeps_the_last_512_events_and_forgets_ends_of_older_ones(box):
    first = add_event(box, "lost", is_open=True)
    for number in range(layout.EVENT_SLOTS + 10):
        add_event(box, f"op{number % 7}", sequence=number)
    box.end_event(first, time.monotonic_ns())  # its place is another event's now
    record = read_box(box.path)
    assert record.event_count == layout.EVENT_SLOTS + 11
    assert [event.sequence for event in record.events] == list(range(10, 10 + layout.EVENT_SLOTS))
    assert [event.number for event in record.events] == list(range(11, 11 + layout.EVENT_SLOTS))


def test_a_shape_of_more_than_six_dimensions_keeps_its_size(box):
    add_event(box, sizes=(2, 3, 4, 5, 6, 7, 8))
    assert read_box(box.path).events[0].shape == (2, 3, 4, 5, 6, 56)


def test_texts_beyond_the_table_are_said_to_have_no_room(box):
    for number in range(layout.TEXT_SLOTS + 5):
        last = box.intern(f"text {number}")
    assert last == layout.FULL_TEXT
    assert box.intern("text 3") == 5  # those that were there first still are
    with BoxReader(box.path) as reader:
        assert reader.text(5) == "text 3"
        assert reader.text(last) == "(no room)"


def test_a_step_without_a_loss_is_not_a_nan(box):
    history = StepHistory(box)
    history.add(1, 0, (500 * MS, 0, 0, 0), layout.NO_LOSS, 8, 0)
    history.add(2, 0, (500 * MS, 0, 0, 0), math.nan, 8, 0)
    without, nan = read_box(box.path).steps
    assert without.loss is None
    assert math.isnan(nan.loss)


def test_phase_and_its_time_are_one_cell(box):
    text = box.intern("forward\0/code/model.py\x0040\x00step")
    box.ints[layout.Cell.PHASE] = time.monotonic_ns() & layout.MOMENT | text
    phase = read_box(box.path).phase
    assert phase.name == "forward"
    assert phase.site == model.Site("/code/model.py", 40, "step")
    assert abs(phase.since - time.time()) < 30


def test_information_too_large_for_its_place_loses_its_last_entries(box):
    box.write_info({"rank": 3, "world_size": 4, "loaders": [], "notes": {"x": "y" * 40_000}})
    with BoxReader(box.path) as reader:
        info = reader.info()
    assert info["rank"] == 3
    assert info["dropped"] == ["notes"]


def test_a_blob_killed_in_the_middle_leaves_the_one_before(box):
    box.write_info({"rank": 0, "world_size": 2, "backend": "gloo"})
    # What a process killed in the next write leaves: new bytes under the old head.
    other = layout.INFO_AT + 1 * layout.INFO_SIZE
    assert struct.unpack_from("<Q", box.memory, other)[0] == 1
    box.memory[other + layout.BLOB_HEAD.size : other + layout.BLOB_HEAD.size + 4] = b"torn"
    assert read_box(box.path).backend == "gloo"


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, layout.EVENT.size))
def test_a_record_cut_at_any_byte_is_whole_or_not_there(tmp_path_factory, cut):
    """A newer record's bytes up to ``cut``, an older one's after it: as a kill leaves them."""
    path = tmp_path_factory.mktemp("cut") / "0.box"
    box = Box.create(path)
    box.write_info({"rank": 0})
    added = [add_event(box, "old", sequence=number) for number in range(layout.EVENT_SLOTS)]
    at = added[0][1]
    old = bytes(box.memory[at : at + layout.EVENT.size])
    number, over = add_event(box, "new", sequence=99)
    assert over == at  # the oldest one's place
    new = bytes(box.memory[at : at + layout.EVENT.size])
    mixed = new[:cut] + old[cut:]
    box.memory[at : at + layout.EVENT.size] = mixed
    names = {event.number: event.name for event in read_box(path).events}
    box.close()
    expected = dict.fromkeys(range(1, layout.EVENT_SLOTS), "old")
    if mixed == old:  # nothing of the new one was written, or nothing that differs
        assert names == expected | {0: "old"}
    elif mixed == new:
        assert names == expected | {number - 1: "new"}
    else:
        assert names == expected


WRITER = """
import sys
from miniray.doctor.box import Box
from miniray.doctor.history import StepHistory
from miniray.doctor.layout import Cell
from miniray.doctor.samples import PassWriter

box = Box.create(sys.argv[1])
box.write_info({"rank": 0, "world_size": 1})
step = 0
history = StepHistory(box)
writer = PassWriter(box, 0, 0)
print("ready", flush=True)
while True:
    step += 1
    box.ints[Cell.STEP] = step
    # Everything in a record follows from its number: a mixture would show.
    sizes = (step, step + 1)
    box.event(box.what("collective", f"op{step % 10}", sizes=sizes), sequence=step)
    parts = [step * factor * 10**6 for factor in (2, 3, 4, 5)]
    history.add(step, step, parts, step * 6.0, step, 0)
    writer.add([step * 2, step * 2 + 1])
    if step % 50 == 0:
        box.write_info({"rank": 0, "world_size": 1, "notes": {"step": step, "twice": [step] * 500}})
    if step % 3000 == 0:
        writer = PassWriter(box, 0, step)
"""


def check_consistent(record):
    for event in record.events:
        assert event.name == f"op{event.sequence % 10}"
        assert event.shape == (event.sequence, event.sequence + 1)
    for s in record.steps:
        total = sum(range(s.step - s.count + 1, s.step + 1))
        assert (s.seconds, s.data) == pytest.approx((total * 0.002, total * 0.003))
        assert (s.backward, s.collective) == pytest.approx((total * 0.004, total * 0.005))
        assert (s.loss, s.batch_size, s.epoch) == (s.step * 6.0, s.step, s.step)
    if record.notes:
        assert record.notes["twice"] == [record.notes["step"]] * 500
    for one in record.passes:
        if one.ids:
            assert list(one.ids) == list(range(one.ids[0], one.ids[0] + len(one.ids)))


def test_a_reader_never_sees_a_mixture_and_a_kill_leaves_a_readable_box(tmp_path):
    path = tmp_path / "0.box"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout.readline() == "ready\n"
        steps = set()
        with BoxReader(path) as reader:
            deadline = time.monotonic() + 40
            while len(steps) < 60 and time.monotonic() < deadline:
                record = reader.record()
                check_consistent(record)
                steps.add(record.step)
        assert len(steps) == 60  # it was being written all the time
        time.sleep(random.random() * 0.05)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
        writer.stdout.close()
    record = read_box(path)
    check_consistent(record)
    assert record.step >= max(steps)


def test_what_is_no_box_is_refused_by_name(tmp_path):
    (tmp_path / "ranks").mkdir()
    for name, content in (("0.box", b""), ("1.box", b"x" * layout.BOX_SIZE)):
        (tmp_path / "ranks" / name).write_bytes(content)
    with pytest.raises(BoxError):
        read_box(tmp_path / "ranks" / "0.box")
    run = read_run(tmp_path)
    assert sorted(run.damaged) == ["ranks/0.box", "ranks/1.box"]
    assert len(run) == 0
    with pytest.raises(BoxError):
        read_box(tmp_path / "ranks" / "2.box")
    with pytest.raises(FileNotFoundError):
        read_run(tmp_path / "nowhere")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_damage_is_never_an_unexpected_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damage")
    (folder / "ranks").mkdir()
    path = folder / "ranks" / "0.box"
    box = Box.create(path)
    box.write_info({"rank": 0, "world_size": 1, "notes": {}})
    for number in range(20):
        add_event(box, sequence=number)
    box.close()
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 20))):
        at = data.draw(st.integers(layout.CELLS_AT, layout.EVENTS_AT + 40 * layout.EVENT.size))
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    run = read_run(folder)
    assert len(run) + len(run.damaged) == 1


def test_a_run_is_read_with_what_the_launcher_wrote(tmp_path):
    (tmp_path / "ranks").mkdir()
    for rank in (0, 2):
        box = Box.create(tmp_path / "ranks" / f"{rank}.box")
        box.write_info({"rank": rank, "world_size": 3, "pid": os.getpid()})
        box.floats[Real.LOSS] = 0.25
        box.ints[Cell.LOSS_STEP] = 4
        box.close()
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 4, "state": "running"}))
    seen = {"code": None, "signal": "SIGKILL", "at": 5.0, "by_launcher": False}
    (tmp_path / "ranks" / "2.exit").write_text(json.dumps(seen))
    run = read_run(tmp_path)
    assert run.world_size == 4
    assert run.missing == (1, 3)
    assert [record.rank for record in run] == [0, 2]
    assert run.ranks[0].loss == 0.25
    assert run.ranks[0].label == "[Rank 0/3]"
    assert run.ranks[0].exit is None
    assert (run.ranks[2].exit.kind, run.ranks[2].exit.signal) == ("signal", "SIGKILL")
    assert not run.ranks[2].alive
