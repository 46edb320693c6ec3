"""Forks in the user's program and inside actors: the session stays the parent's own."""

import importlib.util
import multiprocessing
import os
import signal
import threading
import time

import numpy as np
import pytest

import miniray
from tests.faults.workers import Counter, double


def in_child(action):
    """Run ``action`` in a forked child that ends the way Python programs end; its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            miniray.shutdown()  # what atexit would do
            os._exit(status)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


def test_a_forked_child_leaves_the_parents_session_alone(engine):
    counter = Counter.remote()
    array = miniray.put(np.ones(1_000_000))
    large = miniray.get(array)
    refs = [counter.add.remote() for _ in range(100)]

    def child():
        assert not miniray.is_initialized()
        assert large.sum() == 1_000_000  # memory that is mapped can be read
        for use in (lambda: miniray.get(refs[0]), lambda: counter.add.remote()):
            with pytest.raises(RuntimeError, match="fork"):
                use()
        refs.clear()  # gives nothing back: they are the parent's

    for _ in range(5):
        assert in_child(child) == 0
    assert miniray.get(refs) == list(range(1, 101))
    assert miniray.get(counter.add.remote()) == 101
    assert miniray.get(array).sum() == 1_000_000
    assert miniray.get(double.remote(4)) == 8


def test_a_forked_child_can_have_its_own_session(engine):
    counter = Counter.remote()

    def child():
        miniray.init(num_workers=1)
        assert miniray.get(double.remote(21)) == 42
        other = Counter.remote()
        assert miniray.get([other.add.remote() for _ in range(10)]) == list(range(1, 11))

    assert in_child(child) == 0
    assert miniray.get(counter.add.remote()) == 1


def test_forks_while_threads_work(engine):
    """A fork may happen at any line of the other threads."""
    stop = threading.Event()
    counters = [Counter.remote() for _ in range(2)]
    failures = []

    def work(counter):
        try:
            while not stop.is_set():
                miniray.get([counter.echo.remote(np.ones(50_000)) for _ in range(5)])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(c,)) for c in counters]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            assert in_child(lambda: None) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert not failures
    assert miniray.get(double.remote(1)) == 2


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_in_the_driver(engine, method):
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, -2, -3]) == [1, 2, 3]
        assert miniray.get(double.remote(3)) == 6
    assert miniray.get(double.remote(4)) == 8


def test_multiprocessing_in_an_actor(engine):
    @miniray.remote
    class Parent:
        def map(self, method):
            with multiprocessing.get_context(method).Pool(2) as pool:
                return pool.map(abs, range(-5, 0))

        def fork(self):
            pid = os.fork()
            if pid == 0:
                os._exit(int(miniray.is_initialized()))
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    parent = Parent.remote()
    assert miniray.get(parent.map.remote("fork"), timeout=20) == [5, 4, 3, 2, 1]
    assert miniray.get(parent.map.remote("spawn"), timeout=20) == [5, 4, 3, 2, 1]
    assert miniray.get(parent.fork.remote(), timeout=20) == 0


def test_a_data_loader_in_an_actor(drivers):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    # In a driver of its own: once torch is loaded here, each engine of later tests loads it too.
    status, out, err = drivers.run(
        """
        import torch, miniray
        from torch.utils.data import DataLoader, TensorDataset

        @miniray.remote
        class Loader:
            def load(self):
                data = TensorDataset(torch.arange(100))
                batches = DataLoader(data, batch_size=10, num_workers=2)
                return [int(batch[0].sum()) for batch in batches]

        loader = Loader.remote()
        for _ in range(2):
            print(*miniray.get(loader.load.remote(), timeout=40))
        """
    )
    assert status == 0, err
    expected = " ".join(str(sum(range(i, i + 10))) for i in range(0, 100, 10))
    assert out == f"{expected}\n{expected}\n"
