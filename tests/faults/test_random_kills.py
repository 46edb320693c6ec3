"""Kills at random moments, seeded: every ``get`` ends in a value or the right error."""

import contextlib
import os
import random
import signal
import threading

import numpy as np
import pytest

import miniray
from miniray.errors import ActorDiedError, ObjectLostError, WorkerCrashedError
from tests.faults.helpers import eventually, pids

SIZES = (0, 10, 5_000, 90_000, 200_000, 3_000_000)
ROUNDS = 30


@miniray.remote
class Echo:
    def __init__(self, friend=None):
        self.friend = friend

    def pid(self):
        return os.getpid()

    def echo(self, array):
        return array

    def forward(self, array):
        if self.friend is None:
            return array
        return miniray.get(self.friend.echo.remote(array))


@miniray.remote(max_retries=1)
def total(array):
    return array.sum()


def check(ref, size, errors):
    """``ref`` holds what was sent, or says why it cannot; never neither within the limit."""
    try:
        value = miniray.get(ref, timeout=10)
    except errors:
        return 0
    expected = size * (size - 1) // 2
    assert int(np.sum(value)) == expected
    return 1


@pytest.mark.parametrize("seed", range(3))
def test_actors(engine, seed):
    rng = random.Random(seed)
    survivors = 0
    for _ in range(ROUNDS // 3):
        first = Echo.remote()
        second = Echo.options(max_restarts=1, max_task_retries=rng.choice((0, 1))).remote(first)
        victims = miniray.get([first.pid.remote(), second.pid.remote()])
        killer = threading.Timer(
            rng.random() * 0.05, os.kill, (rng.choice(victims), signal.SIGKILL)
        )
        killer.start()
        calls = []
        for _ in range(30):
            size = rng.choice(SIZES)
            array = np.arange(size)
            actor = rng.choice((first, second))
            method = rng.choice(("echo", "forward"))
            argument = miniray.put(array) if rng.random() < 0.5 else array
            calls.append((getattr(actor, method).remote(argument), size))
            if rng.random() < 0.2:
                del calls[rng.randrange(len(calls))]
        rng.shuffle(calls)
        for ref, size in calls:
            survivors += check(ref, size, (ActorDiedError, ObjectLostError))
        killer.join()
        del calls, ref, argument, first, second, actor
    assert survivors
    eventually(lambda: not engine.node.shared, 5)
    eventually(lambda: len(pids(engine)) == 1, 5)


@pytest.mark.parametrize("seed", range(2))
def test_tasks(engine, seed):
    rng = random.Random(seed)
    stop = threading.Event()

    def kill_now_and_then():
        rng = random.Random(seed)
        while not stop.wait(rng.random() * 0.2):
            workers = pids(engine)[1:]
            if workers:
                with contextlib.suppress(ProcessLookupError):  # not known to be dead yet
                    os.kill(rng.choice(workers), signal.SIGKILL)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        done = 0
        for _ in range(10):
            sizes = [rng.choice(SIZES) for _ in range(40)]
            refs = [total.remote(np.arange(size)) for size in sizes]
            for ref, size in zip(refs, sizes, strict=True):
                done += check(ref, size, WorkerCrashedError)
    finally:
        stop.set()
        killer.join()
    assert done > 100
    assert miniray.get(total.options(max_retries=5).remote(np.arange(10)), timeout=10) == 45


def test_callers_die(engine):
    """The process that waits is killed; the one that works is not disturbed."""
    rng = random.Random(7)
    worker = Echo.remote()
    miniray.get(worker.pid.remote())
    for _ in range(10):
        caller = Echo.remote(worker)
        pid = miniray.get(caller.pid.remote())
        refs = [caller.forward.remote(np.arange(rng.choice(SIZES))) for _ in range(10)]
        miniray.wait(refs, timeout=rng.random() * 0.03)
        os.kill(pid, signal.SIGKILL)
        assert miniray.wait(refs, num_returns=len(refs), timeout=5)[1] == []
        assert miniray.get(worker.echo.remote(5), timeout=5) == 5
    del refs, caller
    eventually(lambda: len(pids(engine)) == 2, 5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_actors_many_seeds(engine, seed):
    test_actors(engine, seed)
