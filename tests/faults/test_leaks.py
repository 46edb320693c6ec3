"""Nothing accumulates: descriptors, threads, memory, processes."""

import contextlib
import gc
import random
import sys
import time

import numpy as np
import psutil
import pytest

import miniray
from miniray.core import session
from miniray.errors import EngineStartError, GetTimeoutError
from tests.faults.helpers import counts, eventually, pids, settles_to, used
from tests.faults.workers import Worker, footprint

LARGE = 200_000


def start_and_stop(rounds):
    for _ in range(rounds):
        miniray.init(num_workers=1)
        worker = Worker.remote()
        ref = miniray.put(np.ones(LARGE, np.uint8))
        assert miniray.get(worker.echo.remote(ref)).sum() == LARGE
        assert miniray.get(miniray.remote(abs).remote(-1)) == 1
        miniray.shutdown()


@pytest.mark.parametrize(
    "rounds", [15, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
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
    eventually(lambda: used(engine) <= 40 * LARGE, 20)  # what the workers keep warm, for a while
    after = footprint()
    assert after[0] - before[0] < 200  # segments kept warm hold two each
    assert after[1] == before[1]
    assert after[2] - before[2] < 100_000_000


@pytest.mark.parametrize(
    "number",
    [20_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(120)])],
)
def test_queued_calls_leave_nothing_behind(engine, number):
    worker = Worker.remote()
    miniray.get([worker.echo.remote(i) for i in range(1000)])
    before = miniray.get(worker.footprint.remote())
    mine = footprint()
    refs = [worker.echo.remote(i) for i in range(number)]
    assert miniray.get(refs) == list(range(number))
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
    idle = counts(engine)
    peak = 0
    for i in range(1000):
        ref = miniray.put(np.full(2_000_000, i % 256, np.uint8))
        if i % 10 == 0:
            assert miniray.get(worker.echo.remote(ref))[-1] == i % 256
            # The worker says in its own time that it is done with it.
            eventually(lambda: counts(engine) == idle, 30)
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
