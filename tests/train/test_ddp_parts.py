"""Pulses, barriers, marked output, the bar of steps: the parts of a DDP run, alone."""

import io
import re
import sys
import time
import traceback
from pathlib import Path

import pytest

import miniray
from miniray.errors import BarrierTimeoutError, WeightsMismatchError
from miniray.train.ddp.checks import RankSettings, check_agreement
from miniray.train.lockstep.health.status import (
    HeartbeatSender,
    RankPosition,
    read_positions,
    select_readable,
)
from miniray.train.lockstep.process_group import GroupHost
from miniray.train.run.progress import StepBar
from miniray.train.workers.process import RankStream

torch = pytest.importorskip("torch")


@pytest.fixture
def host():
    host = GroupHost(2, name="parts", timeout=30)
    yield host
    host.close()


@pytest.mark.parametrize(
    ("parameters", "entry"),
    [
        ([("model.w", (2, 3), "float32"), ("model.b", (3,), "float32")], "model.b"),
        ([("model.w", (2, 3), "float32")], None),
    ],
)
def test_models_that_differ_name_the_rank_and_the_entry(parameters, entry, golden):
    first = [("model.w", (2, 3), "float32"), ("model.b", (2,), "float32")]
    facts = [{"models": models, "device": "cpu"} for models in (first, first, parameters)]
    with pytest.raises(WeightsMismatchError) as caught:
        check_agreement(facts, RankSettings())
    error = caught.value
    assert (error.rank, error.worker, error.entry) == (2, 2, entry)
    golden(f"models_differ_{'count' if entry is None else 'shape'}.txt", str(error))


def test_a_barrier_names_who_is_missing_and_where(host, check_message):
    pulses = [HeartbeatSender(host.spec, rank, host.spec.connect()) for rank in range(2)]
    try:
        first, second = pulses
        first.epoch, first.limit = second.epoch, second.limit = 4, 0.2
        second.set_phase("forward", step=3)
        second._where = ("forward", second._where[1] - 5)  # five seconds ago
        second.post()
        with pytest.raises(BarrierTimeoutError) as failure:
            first.barrier("before-iteration")
        text = str(failure.value)
        seconds = re.search(r"forward, .* (\d+) s", text)[1]
        assert int(seconds) >= 5
        check_message("\n".join(text.splitlines()[:2]).replace(f"{seconds} s", "5 s"))
        assert "test_ddp_parts.py" in text  # its stack: here, one thread is both
        error = failure.value
        assert (error.name, error.missing) == ("before-iteration", (1,))
        assert (error.rank, error.epoch, error.step) == (0, 4, None)
        second.barrier("before-iteration")  # rank 0 has reached it
        second.post()
        assert read_positions(host.store, host.spec)[1].phase == "after barrier 'before-iteration'"
    finally:
        for pulse in pulses:
            pulse.close()


def test_a_stack_shows_the_users_line_however_deep_a_library_is_below_it():
    def frames(*names):
        return [traceback.FrameSummary(name, 1, "f", line="") for name in names]

    ours = str(Path(miniray.__file__).parent / "train" / "ranks" / "member.py")
    library = torch.__file__
    found = select_readable(
        frames("<frozen runpy>", ours, "/home/me/train.py", ours, *[library] * 20)
    )
    assert [frame.filename for frame in found] == ["/home/me/train.py", *[library] * 11]
    found = select_readable(
        frames(ours, "/home/me/train.py", library, ours, "/home/me/model.py", ours)
    )
    assert [frame.filename for frame in found] == [
        "/home/me/train.py",
        library,
        "/home/me/model.py",
    ]
    assert select_readable(frames(*[ours] * 9)) == frames(*[ours] * 3)  # there is nothing else


def test_the_cpu_time_of_a_place_is_counted_from_the_last_move_on(host):
    """However busy a phase was before: what counts is what its last piece has used."""
    pulse = HeartbeatSender(host.spec, 0, host.spec.connect())
    try:
        pulse.set_phase("evaluation")
        pulse.post()
        began = time.process_time()
        while time.process_time() < began + 0.2:
            pass
        pulse.touch()
        pulse.post()
        place = read_positions(host.store, host.spec)[0]
        assert place.phase == "evaluation"
        assert place.cpu < 0.1
    finally:
        pulse.close()


def test_a_rank_that_never_came_is_missing_too(host, raises):
    pulse = HeartbeatSender(host.spec, 1, host.spec.connect())
    pulse.limit = 0.1
    try:
        with raises(BarrierTimeoutError) as caught:
            pulse.barrier("start")
        assert (caught.value.name, caught.value.missing) == ("start", (0,))
    finally:
        pulse.close()


def test_every_line_is_marked_and_flushed():
    class Terminal(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed += 1

    terminal, log = Terminal(), io.StringIO()
    stream = RankStream(terminal, "[Rank 1/4]", log)
    print("one\ntwo", file=stream)
    stream.write("half")
    assert terminal.flushed == 2  # a text with a line end in it, and the end that print adds
    stream.writelines([" a line\n", "\n"])
    wanted = "[Rank 1/4] one\n[Rank 1/4] two\n[Rank 1/4] half a line\n[Rank 1/4] \n"
    assert terminal.getvalue() == log.getvalue() == wanted
    assert stream.encoding == terminal.encoding  # all else is the stream's own
    stream.write(":actor_name:Worker\n")  # as Ray does, for its own eyes
    assert (terminal.getvalue(), log.getvalue()) == (f"{wanted}:actor_name:Worker\n", wanted)


def places(*steps):
    return [RankPosition(rank, epoch=2, step=step) for rank, step in enumerate(steps)]


def test_the_bar_of_steps_comes_when_all_ranks_are_in_the_loop(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    bar = StepBar(epoch=2, steps=10, enabled=True)
    bar.update(places(0, -1))  # rank 1 is still before the barrier
    assert terminal.getvalue() == ""
    bar.update(places(3, 3))
    assert "epoch 3" in terminal.getvalue()
    assert "/10" in terminal.getvalue()
    bar.close()
    bar.close()
    quiet = StepBar(epoch=2, steps=10, enabled=False)
    quiet.update(places(3, 3))
    assert quiet._bar is None
