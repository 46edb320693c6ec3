"""Nothing accumulates: descriptors, threads, memory, processes; all is freed in the end."""

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest

import miniray
from miniray.core import session
from miniray.errors import ActorDiedError, EngineStartError, GetTimeoutError
from tests.faults.helpers import eventually, fails_soon, is_process, pids

LARGE = 200_000


@miniray.remote
class Worker:
    def __init__(self, *held):
        self.held = list(held)

    def pid(self):
        return os.getpid()

    def hold(self, *values):
        self.held.extend(values)

    def drop(self):
        self.held.clear()
        gc.collect()

    def echo(self, value):
        return value

    def box(self, size):
        return [miniray.put(np.ones(size, np.uint8)), {"deep": [miniray.put(size)]}]

    def fail(self, payload):
        raise ValueError(payload)

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def footprint(self):
        return footprint()


def footprint():
    """(descriptors, threads, resident bytes) of this process."""
    gc.collect()
    process = psutil.Process()
    return process.num_fds(), threading.active_count(), process.memory_info().rss


def counts(engine):
    """What the driver's node keeps track of; all zero when nothing is in use."""
    node = engine.node
    return {
        "shared": len(node.shared),
        "borrowed": len(node.borrowed),
        "asked": len(node._asked),
        "awaited": len(node.awaited),
    }


def settles_to(engine, expected):
    """The node's books come back to ``expected``; actors and refs of the test must be gone."""
    gc.collect()
    try:
        eventually(lambda: counts(engine) == expected, 10)
    except AssertionError:
        assert counts(engine) == expected  # shows both
        raise


def used(engine):
    """Bytes in shared memory apart from segments kept warm for the next use."""
    engine.node.store.trim()
    return engine.node.usage.total() - sum(s.size for s in engine.node.store._free)


def start_and_stop(rounds):
    for _ in range(rounds):
        miniray.init(num_workers=1)
        worker = Worker.remote()
        ref = miniray.put(np.ones(LARGE, np.uint8))
        assert miniray.get(worker.echo.remote(ref)).sum() == LARGE
        assert miniray.get(miniray.remote(abs).remote(-1)) == 1
        miniray.shutdown()


@pytest.mark.parametrize(
    "rounds", [40, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_init_and_shutdown_in_a_loop(own_directory, rounds):
    start_and_stop(5)
    fds, threads, memory = footprint()
    children = psutil.Process().children()
    start_and_stop(rounds)
    after = footprint()
    assert after[0] <= fds
    assert after[1] <= threads
    assert after[2] - memory < 20_000_000
    assert psutil.Process().children() == children


def test_a_failed_start_leaves_nothing(own_directory, monkeypatch):
    start_and_stop(1)
    before = footprint()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    for _ in range(3):
        with pytest.raises(EngineStartError):
            miniray.init()
    assert not miniray.is_initialized()
    after = footprint()
    assert after[0] <= before[0]
    assert after[1] == before[1]


def test_refs_dropped_at_random(engine):
    """Ten thousand of them, of every origin, while calls are in flight."""
    rng = random.Random(3)
    worker, other = Worker.remote(), Worker.remote()
    miniray.get([worker.pid.remote(), other.pid.remote()])
    miniray.get([worker.box.remote(LARGE) for _ in range(20)])
    settles_to(engine, idle := counts(engine))
    before = footprint()
    kept = []
    for _ in range(10_000):
        kind = rng.randrange(100)
        if kind < 2:
            kept.append(miniray.put(np.ones(LARGE, np.uint8)))
        elif kind < 4:
            kept.append(worker.echo.remote(np.ones(LARGE, np.uint8)))
        elif kind < 5:
            kept.extend(miniray.get(worker.box.remote(LARGE)))
        elif kind < 30:
            kept.append(miniray.put(kind))
        elif kind < 60 and kept:
            kept.append(rng.choice((worker, other)).echo.remote([rng.choice(kept)]))
        else:
            kept.append(rng.choice((worker, other)).echo.remote(kind))
        while len(kept) > rng.randrange(1, 200):
            del kept[rng.randrange(len(kept))]
    kept.clear()
    settles_to(engine, idle)
    eventually(lambda: used(engine) <= 40 * LARGE, 5)  # what the workers keep warm
    after = footprint()
    assert after[0] - before[0] < 200  # segments kept warm hold two each
    assert after[1] == before[1]
    assert after[2] - before[2] < 100_000_000


@pytest.mark.timeout(120)
def test_a_hundred_thousand_queued_calls(engine):
    worker = Worker.remote()
    miniray.get([worker.echo.remote(i) for i in range(1000)])
    before = miniray.get(worker.footprint.remote())
    mine = footprint()
    refs = [worker.echo.remote(i) for i in range(100_000)]
    assert miniray.get(refs) == list(range(100_000))
    del refs
    after = miniray.get(worker.footprint.remote())
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 60_000_000
    now = footprint()
    assert now[0] - mine[0] <= 2
    assert now[1] == mine[1]
    assert now[2] - mine[2] < 60_000_000
    assert counts(engine)["asked"] == 0


def test_a_thousand_large_objects(engine):
    """Memory in use is that of those alive, not of those that were."""
    worker = Worker.remote()
    miniray.get(worker.pid.remote())
    peak = 0
    for i in range(1000):
        ref = miniray.put(np.full(2_000_000, i % 256, np.uint8))
        if i % 10 == 0:
            assert miniray.get(worker.echo.remote(ref))[-1] == i % 256
        peak = max(peak, engine.node.usage.total())
    assert peak < 20_000_000
    assert footprint()[0] < 100
    assert miniray.get(worker.footprint.remote())[0] < 100


def test_a_thousand_large_objects_alive_at_once(engine):
    refs = [miniray.put(np.full(LARGE, i % 256, np.uint8)) for i in range(1000)]
    assert engine.node.usage.total() >= 1000 * LARGE
    for i, ref in enumerate(refs):
        assert miniray.get(ref)[7] == i % 256
    del refs, ref
    eventually(lambda: used(engine) == 0, 5)


def test_memory_is_freed_with_the_last_user_anywhere(engine):
    first, second = Worker.remote(), Worker.remote()
    ref = miniray.put(np.ones(5_000_000, np.uint8))
    miniray.get([first.hold.remote([ref]), second.hold.remote(ref)])
    array = miniray.get(ref)
    del ref
    for release in (
        lambda: miniray.get(first.drop.remote()),
        lambda: miniray.get(second.drop.remote()),
    ):
        gc.collect()
        assert used(engine) >= 5_000_000
        release()
    assert used(engine) >= 5_000_000
    assert array.sum() == 5_000_000
    part = array[10:20]
    del array
    assert used(engine) >= 5_000_000
    del part
    eventually(lambda: used(engine) == 0, 5)


def test_idle_memory_goes_back_to_the_system(engine, monkeypatch):
    monkeypatch.setattr("miniray.core.local.store.IDLE_SECONDS", 0.1)
    for _ in range(3):
        miniray.put(np.ones(5_000_000, np.uint8))
    eventually(lambda: engine.node.store.trim() or engine.node.usage.total() == 0, 10)


def test_refs_held_by_an_actor_that_dies(engine):
    idle = counts(engine)
    for _ in range(5):
        worker = Worker.remote()
        refs = [miniray.put(np.ones(LARGE, np.uint8)) for _ in range(20)]
        miniray.get(worker.hold.remote(*refs[:10]))
        miniray.get(worker.hold.remote(refs[10:]))
        fails_soon(worker.die.remote(), ActorDiedError)
        del refs, worker
    settles_to(engine, idle)
    eventually(lambda: used(engine) == 0, 5)


def test_refs_returned_nested(engine):
    worker = Worker.remote()
    miniray.get(worker.pid.remote())
    settles_to(engine, idle := counts(engine))
    for _ in range(50):
        ref, inner = miniray.get(worker.box.remote(LARGE))
        assert miniray.get(ref).nbytes == LARGE
        assert miniray.get(inner["deep"][0]) == LARGE
    del ref, inner
    settles_to(engine, idle)
    eventually(lambda: miniray.get(worker.echo.remote(0)) == 0 and used(engine) <= 20 * LARGE, 5)


def test_errors_keep_nothing_alive(engine):
    worker = Worker.remote()
    miniray.get(worker.pid.remote())
    settles_to(engine, idle := counts(engine))
    for _ in range(50):
        array = np.ones(LARGE, np.uint8)
        with pytest.raises(ValueError):
            miniray.get(worker.fail.remote(array))
        with contextlib.suppress(GetTimeoutError):
            miniray.get(worker.echo.remote(array), timeout=0)
    del array
    settles_to(engine, idle)
    eventually(lambda: used(engine) <= 20 * LARGE, 5)


def test_waiting_again_and_again(engine):
    """Polling with a time-out leaves nothing behind on a call that takes long."""
    sleeper = miniray.remote(time.sleep)
    refs = [sleeper.remote(600) for _ in range(2)]
    before = footprint()
    for _ in range(20_000):
        miniray.wait(refs, timeout=0)
    with contextlib.suppress(GetTimeoutError):
        miniray.get(refs, timeout=0)
    assert all(not ref._entry.waiters for ref in refs)
    assert footprint()[2] - before[2] < 5_000_000


def test_an_actor_ends_with_its_last_handle(engine):
    worker = Worker.remote()
    pid = miniray.get(worker.pid.remote())
    boxed = [{"handle": worker}]
    ref = miniray.put(boxed)
    del worker
    assert is_process(pid)
    boxed.clear()
    assert miniray.get(miniray.get(ref)[0]["handle"].pid.remote()) == pid
    del ref
    gc.collect()
    eventually(lambda: not is_process(pid), 5)


def test_an_actor_whose_handle_is_dropped_at_once(engine):
    class Plain:
        def ping(self):
            return 1

    class Async:
        async def ping(self):
            return 1

    for _ in range(10):
        for cls in (Plain, Async):
            miniray.remote(cls).remote()
            assert miniray.get(miniray.remote(cls).remote().ping.remote(), timeout=10) == 1
            miniray.remote(cls).options(max_concurrency=4).remote()
    eventually(lambda: len(pids(engine)) == 1, 10)


def test_an_actor_held_by_one_that_dies(engine):
    held = Worker.remote()
    holder = Worker.remote(held)
    second = Worker.remote()
    miniray.get(second.hold.remote([held]))
    pid = miniray.get(held.pid.remote())
    del held
    fails_soon(holder.die.remote(), ActorDiedError)
    assert is_process(pid)
    del second
    gc.collect()
    eventually(lambda: not is_process(pid), 5)


def test_handles_in_a_cycle(engine):
    """Two actors that hold each other live until the end of the session, as in Ray; not longer.

    A cycle within one process is collected.
    """
    first, second = Worker.remote(), Worker.remote()
    miniray.get([first.hold.remote(second), second.hold.remote(first)])
    processes = miniray.get([first.pid.remote(), second.pid.remote()])

    class Node:
        pass

    node = Node()
    node.self, node.worker = node, Worker.remote()
    alone = miniray.get(node.worker.pid.remote())
    del node, first, second
    gc.collect()
    eventually(lambda: not is_process(alone), 5)
    miniray.shutdown()
    assert not any(is_process(pid) for pid in processes)


def test_many_actors_come_and_go(engine):
    miniray.get([Worker.remote().pid.remote() for _ in range(3)])
    eventually(lambda: len(pids(engine)) == 1, 10)
    before, books = footprint(), counts(engine)
    for _ in range(15):
        workers = [Worker.remote() for _ in range(4)]
        miniray.get([w.pid.remote() for w in workers])
        del workers
    gc.collect()
    eventually(lambda: len(pids(engine)) == 1, 10)
    settles_to(engine, books)
    eventually(lambda: footprint()[0] <= before[0], 5)
    after = footprint()
    assert after[1] == before[1]
    assert not engine.node._given_to
    assert sum(map(bool, engine.node.channels.values())) == 0
    assert after[2] - before[2] < 10_000_000


def test_streams_that_nobody_reads_to_the_end(engine):
    @miniray.remote
    class Source:
        def items(self, count):
            for _ in range(count):
                yield np.ones(LARGE, np.uint8)

    source = Source.remote()
    stream = source.items.options(num_returns="streaming")
    idle = None
    for _ in range(5):
        generator = stream.remote(20)
        assert miniray.get(next(generator)).nbytes == LARGE
        del generator
        assert len(list(stream.remote(3))) == 3
        if idle is None:
            settles_to(engine, idle := counts(engine))
    settles_to(engine, idle)


def test_the_session_is_forgotten(own_directory):
    """After a shutdown neither its segments nor its threads are there, whatever the user kept."""
    start_and_stop(1)
    before = footprint()
    miniray.init(num_workers=1)
    worker = Worker.remote()
    refs = [miniray.put(np.ones(LARGE, np.uint8)) for _ in range(10)]
    miniray.get([worker.hold.remote(ref) for ref in refs])
    miniray.shutdown()
    del refs
    assert session._engine is None
    after = footprint()
    assert after[0] <= before[0]
    assert after[1] == before[1]
    assert worker is not None
