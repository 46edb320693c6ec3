"""Shared buffers outlive the processes that write to them, and are freed with the last holder."""

import contextlib
import gc
import os
import resource
import signal

import numpy as np
import pytest

import miniray
from miniray import limits
from miniray.core import SharedBuffer
from miniray.errors import ActorDiedError, ObjectStoreFullError, SessionEndedError
from tests.faults.helpers import GONE, counts, eventually, fails_soon, settles_to, shared_names

WORDS = 100_000


@miniray.remote
class Writer:
    def __init__(self, buffer=None):
        self.buffer = buffer

    def pid(self):
        return os.getpid()

    def hold(self, buffer):
        self.buffer = buffer

    def drop(self):
        self.buffer = None
        gc.collect()

    def pass_on(self, other):
        miniray.get(other.hold.remote(self.buffer))

    def count(self):
        """Write rounds forever: all words of the data first, then their number as the header."""
        words = np.frombuffer(self.buffer.map(), np.int64)
        while True:
            round_number = words[0] + 1
            words[1 + round_number % 2 :: 2] = round_number
            words[0] = round_number

    def first(self):
        return int(np.frombuffer(self.buffer.map(), np.int64)[0])

    def first_without_descriptors(self, buffers):
        """Read buffers that arrived while this process could open no descriptor."""
        outcomes = []
        for buffer in buffers:
            try:
                outcomes.append(buffer.map()[0])
            except ObjectStoreFullError as error:
                outcomes.append(type(error.__cause__).__name__)
        return outcomes

    def limit_descriptors(self, count):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (count or hard, hard))


def inode(buffer):
    return os.fstat(buffer._memory.fd).st_ino


def holders(number):
    """Return pids of processes that have the memory with this inode open or mapped."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or the descriptor is closed
            with open(f"/proc/{pid}/maps") as maps:
                lines = [line.split() for line in maps if "memfd:miniray" in line]
            if any(int(line[4]) == number for line in lines):
                found.add(int(pid))
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    link = f"/proc/{pid}/fd/{fd}"
                    if "memfd:miniray" in os.readlink(link) and os.stat(link).st_ino == number:
                        found.add(int(pid))
    return found


def test_content_survives_a_writer_killed_in_a_write(engine):
    """The slot that the header names is complete, and a restarted actor finds it."""
    buffer = SharedBuffer(8 * (1 + WORDS))
    words = np.frombuffer(buffer.map(), np.int64)
    writer = Writer.options(max_restarts=1).remote(buffer)
    ref = writer.count.remote()
    eventually(lambda: words[0] > 2)
    (pid,) = holders(inode(buffer)) - {os.getpid()}
    os.kill(pid, signal.SIGKILL)
    fails_soon(ref, ActorDiedError, "SIGKILL")
    done = int(words[0])
    assert done > 2
    assert (words[1 + done % 2 :: 2] == done).all()
    assert miniray.get(writer.first.remote()) == done
    assert miniray.get(writer.pid.remote()) != pid


def test_memory_is_freed_with_the_last_holder(engine):
    idle = counts(engine)
    names = shared_names()
    buffer = SharedBuffer(1_000_000)
    number = inode(buffer)
    first, second = Writer.remote(), Writer.remote()
    pid = miniray.get(second.pid.remote())
    miniray.get(first.hold.remote(buffer))
    miniray.get(first.pass_on.remote(second))
    assert shared_names() <= names
    buffer.close()
    miniray.get(first.drop.remote())
    assert pid in holders(number)
    assert miniray.get(second.first.remote()) == 0
    miniray.get(second.drop.remote())
    eventually(lambda: not holders(number), GONE)
    del first, second
    settles_to(engine, idle)


def test_memory_is_freed_when_its_holders_are_killed(engine):
    idle = counts(engine)
    buffer = SharedBuffer(1_000_000)
    number = inode(buffer)
    first, second = Writer.remote(), Writer.remote()
    miniray.get(first.hold.remote(buffer))
    miniray.get(first.pass_on.remote(second))
    buffer.close()
    for writer in (first, second):
        assert holders(number)
        os.kill(miniray.get(writer.pid.remote()), signal.SIGKILL)
        fails_soon(writer.first.remote(), ActorDiedError)
    eventually(lambda: not holders(number), GONE)
    del first, second, writer
    settles_to(engine, idle)


def test_a_view_keeps_the_memory_after_shutdown(engine):
    buffer = SharedBuffer(8 * WORDS)
    writer = Writer.remote(buffer)
    writer.count.remote()
    view = buffer.map().cast("q")
    eventually(lambda: view[0])
    number = inode(buffer)
    miniray.shutdown()
    assert holders(number) == {os.getpid()}
    assert buffer.map().cast("q")[0] == view[0] > 0
    miniray.init(num_workers=1)
    other = Writer.remote()
    with pytest.raises(SessionEndedError):
        other.hold.remote(buffer)
    buffer.close()
    assert holders(number) == {os.getpid()}
    view.release()
    assert not holders(number)


def test_a_killed_driver_leaves_no_process_and_no_memory(drivers):
    names = shared_names()
    driver = drivers.start(
        """
        import time
        import miniray
        from miniray.core import SharedBuffer
        from tests.faults.test_shared_buffer import Writer, inode

        buffer = SharedBuffer(1_000_000)
        writers = [Writer.remote(buffer) for _ in range(2)]
        calls = [writer.count.remote() for writer in writers]
        while not buffer.map()[0]:
            time.sleep(0.001)
        print("ready", inode(buffer), flush=True)
        time.sleep(600)
        """
    )
    (number,) = map(int, driver.expect("ready"))
    assert len(holders(number)) >= 2
    assert shared_names() <= names
    driver.process.kill()
    driver.process.wait()
    driver.assert_nothing_left()
    eventually(lambda: not holders(number), GONE)


def test_a_limit_that_shrinks_fails_only_new_buffers(engine, tmp_path, monkeypatch):
    """The control group's limit is read at each allocation."""
    own, group = tmp_path / "self", tmp_path / "group"
    own.mkdir()
    group.mkdir()
    (own / "cgroup").write_text("0::/\n")
    (own / "mountinfo").write_text(f"31 23 0:28 / {group} rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "meminfo").write_text("MemAvailable: 40000000 kB\n")
    monkeypatch.setattr(limits, "_PROC", tmp_path)
    (group / "memory.current").write_text("1000000")
    (group / "memory.max").write_text("3000000")
    buffer = SharedBuffer(2_000_000)
    (group / "memory.max").write_text("2000000")
    with pytest.raises(ObjectStoreFullError):
        SharedBuffer(2_000_000)
    SharedBuffer(1_000_000)
    (group / "memory.max").write_text("500000")
    with pytest.raises(ObjectStoreFullError):
        SharedBuffer(1)
    assert miniray.get(Writer.remote(buffer).first.remote()) == 0


def test_a_failed_reservation_raises_object_store_full(engine):
    """The kernel's own answer: here a limit on the size of files, which counts for memory too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(ObjectStoreFullError) as caught:
            SharedBuffer(2_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert isinstance(caught.value.__cause__, OSError)


def test_a_lost_descriptor_raises_and_the_next_one_works(engine):
    writer, buffer = Writer.remote(), SharedBuffer(1_000)
    miniray.get(writer.limit_descriptors.remote(1))
    assert miniray.get(writer.first_without_descriptors.remote([buffer])) == ["OSError"]
    ref = writer.hold.remote(buffer)  # still none, and it is kept
    miniray.get([ref, writer.limit_descriptors.remote(0)])
    fails_soon(writer.first.remote(), ObjectStoreFullError)
    assert miniray.get(writer.first_without_descriptors.remote([buffer])) == [0]
    assert miniray.get(writer.first.remote()) == 0
