"""Ctrl-C and shutdown in the middle of waiting: nobody hangs, nothing is lost."""

import os
import random
import signal
import threading
import time

import pytest

import miniray
from tests.faults.helpers import SOON, is_process, pids
from tests.faults.workers import Counter, double


def test_an_interrupt_in_get(engine):
    """Ctrl-C while waiting: the program may catch it and go on."""
    counter = Counter.remote()
    for wait in (
        lambda: miniray.get(counter.sleep.remote(0.5)),
        lambda: miniray.get([counter.sleep.remote(0.5), double.remote(1)]),
        lambda: miniray.wait([counter.sleep.remote(0.5)]),
    ):
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert miniray.get(double.remote(2), timeout=5) == 4
    assert miniray.get(counter.add.remote(), timeout=5) == 1


def test_interrupts_at_any_line(engine):
    """Hundreds of interrupts while calls come and go: no result is lost, and no call is stuck."""
    counter = Counter.remote()
    miniray.get(counter.add.remote(0))
    rng = random.Random(1)
    ring, rung = threading.Event(), threading.Event()
    stop = False

    def interrupt():
        main = threading.main_thread().ident
        while ring.wait() and not stop:
            ring.clear()
            until = time.perf_counter() + rng.random() * 0.0003
            while time.perf_counter() < until:
                pass
            signal.pthread_kill(main, signal.SIGINT)
            rung.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    interrupted = 0
    refs = []
    try:
        for i in range(500):
            ref = counter.echo.remote(i)
            refs.append(ref)
            try:
                rung.clear()
                ring.set()
                miniray.get(ref)
                rung.wait()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        stop = True
        ring.set()
        thread.join()
    assert interrupted == 500
    for i, ref in enumerate(refs):
        assert miniray.get(ref, timeout=5) == i
    assert miniray.get(counter.add.remote(), timeout=5) == 1
    assert miniray.get(double.remote(2), timeout=5) == 4


def test_shutdown_while_threads_wait(engine):
    """They are told instead of waiting for ever."""
    counter = Counter.remote()
    generator = miniray.remote(_never).options(num_returns="streaming").remote()
    outcomes = []

    def wait(action):
        try:
            outcomes.append(action())
        except BaseException as error:
            outcomes.append(error)

    actions = [
        lambda: miniray.get(counter.sleep.remote(600)),
        lambda: miniray.get([counter.sleep.remote(600), counter.add.remote()]),
        lambda: miniray.wait([counter.add.remote()]),
        lambda: miniray.get(next(generator)),
        lambda: counter.sleep.remote(600).future().result(),
    ]
    threads = [threading.Thread(target=wait, args=(a,), daemon=True) for a in actions]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # let them come to wait: there is no condition to poll for that
    processes = pids(engine)
    miniray.shutdown()
    for thread in threads:
        thread.join(SOON)
    assert len(outcomes) == len(actions)
    assert all(isinstance(o, (RuntimeError, miniray.errors.MinirayError)) for o in outcomes)
    assert not any(is_process(pid) for pid in processes)


def _never():
    time.sleep(600)
    yield 1


def test_shutdown_in_a_thread(engine):
    counter = Counter.remote()
    assert miniray.get(counter.add.remote()) == 1
    thread = threading.Thread(target=miniray.shutdown)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        miniray.get(counter.add.remote())
    miniray.init(num_workers=1)
    assert miniray.get(double.remote(2)) == 4
