"""Records that are truncated and damaged while other processes read them.

The readers run in forked processes: one that maps a record dies with SIGBUS, which is an exit
status here and not the end of the tests.
"""

import gc
import os
import random
import threading

import pytest

from miniray.cli import top
from miniray.dashboard.access import ServedDirectory
from miniray.dashboard.monitor import RunMonitor
from miniray.doctor import layout, recorder
from miniray.doctor.barriers import barrier
from miniray.doctor.box import Box
from miniray.doctor.diagnose import examine
from miniray.doctor.launch_watch import Watched
from miniray.doctor.reader import BoxReader, read_run
from miniray.errors import BarrierTimeoutError, BoxError
from tests.doctor.helpers import Ranks, wait_until
from tests.runs import damage


@pytest.fixture
def ranks():
    found = Ranks()
    yield found
    found.end()


def live_record(path):
    """The record of a rank whose process is this one, and which isn't written to."""
    path.parent.mkdir(exist_ok=True)
    damage.write_record(path, {**damage.INFO, "rank": 1, "pid": os.getpid(), "started": None})
    with open(path, "r+b") as file:  # it has not ended
        file.seek(layout.CELLS_AT + layout.Cell.EXITED * 8)
        file.write(bytes(8))


def spoil(path, random):
    """Truncate the record, damage it and restore it, again and again."""
    whole = path.read_bytes()
    while True:
        kind = random.randrange(3)
        if kind == 0:
            os.truncate(path, random.choice((0, 64, 4096, layout.BOX_SIZE // 2)))
        elif kind == 1:
            damaged = bytearray(whole)
            for _ in range(200):
                damaged[random.randrange(len(whole))] = random.randrange(256)
            path.write_bytes(damaged)
        else:
            path.write_bytes(whole)


def read_with_every_tool(run_dir):
    # A process group among the garbage of earlier tests waits for threads that aren't forked.
    gc.freeze()
    watched = Watched(1, os.getpid(), run_dir / "ranks" / "1.box")
    page = RunMonitor(ServedDirectory(run_dir.parent), run_dir.name)
    path = run_dir / "ranks" / "1.box"
    threading.Thread(target=spoil, args=(path, random.Random(0)), daemon=True).start()
    before, read = None, 0
    while read < 60:
        watched.look(0.001)
        assert watched.waiting in (True, False)
        run = read_run(run_dir)
        examine(run, before).text()
        top.frame(run, before, 80)
        if read % 20 == 0:
            page.poll()
            assert page.state["damaged"].keys() <= {"ranks/1.box"}
        before, read = run, read + 1


def test_truncated_records_end_no_reader(ranks, tmp_path):
    damage.write_run(tmp_path / "x")
    live_record(tmp_path / "x" / "ranks" / "1.box")
    ranks.start(read_with_every_tool, tmp_path / "x")
    assert ranks.wait() == [0]


def test_a_truncated_record_is_read_again_when_it_is_whole(ranks, tmp_path):
    path = tmp_path / "1.box"

    def watch():
        live_record(path)
        whole = path.read_bytes()
        watched = Watched(1, os.getpid(), path)
        watched.look(60.0)
        assert watched.waiting
        os.truncate(path, 100)
        watched.look(60.0)
        assert not watched.waiting
        path.write_bytes(whole)
        assert watched.waiting

    ranks.start(watch)
    assert ranks.wait() == [0]


def wait_in_a_barrier(run_dir):
    recorder.start(run_dir, 0, 2)
    with pytest.raises(BarrierTimeoutError) as caught:
        barrier("save", timeout=1.0)
    assert caught.value.missing == (1,)
    assert "1.box" in str(caught.value)


def test_a_barrier_outlives_a_truncated_record(ranks, tmp_path):
    path = tmp_path / "ranks" / "1.box"
    live_record(path)
    ranks.start(wait_in_a_barrier, tmp_path)
    wait_until(lambda: in_barrier(tmp_path / "ranks" / "0.box"))
    os.truncate(path, 100)
    assert ranks.wait() == [0]


def in_barrier(path):
    try:
        with BoxReader(path) as reader:
            return reader.ints[layout.Cell.BARRIER]
    except BoxError:
        return 0


def test_a_record_that_shrinks_raises_box_error(ranks, tmp_path):
    def run():
        path = tmp_path / "1.box"
        Box.create(path).close()
        with BoxReader(path) as reader:
            os.truncate(path, 100)
            for part in (BoxReader.record, BoxReader.info, lambda r: r.ints):
                with pytest.raises(BoxError):
                    part(reader)

    ranks.start(run)
    assert ranks.wait() == [0]
