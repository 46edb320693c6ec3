"""Forks, threads and interrupts in the user's program, while the engine runs."""

import asyncio
import concurrent.futures
import importlib.util
import multiprocessing
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import miniray
from miniray.errors import TaskError
from tests.faults.helpers import SOON, eventually, is_process, pids


@miniray.remote
class Counter:
    def __init__(self):
        self.value = 0

    def add(self, n=1):
        self.value += n
        return self.value

    def echo(self, value):
        return value

    def sleep(self, seconds):
        time.sleep(seconds)
        return seconds

    def pid(self):
        return os.getpid()


@miniray.remote
def double(x):
    return 2 * x


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


def test_many_threads_at_once(engine):
    counters = [Counter.remote() for _ in range(3)]
    shared = counters[0]
    failures = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for i in range(30):
                if i % 15 == 0:
                    own = Counter.remote()  # and the one before goes
                kind = rng.randrange(5)
                if kind == 0:
                    array = rng.randrange(1000) + np.arange(rng.choice((10, 60_000)))
                    assert (miniray.get(miniray.put(array)) == array).all()
                elif kind == 1:
                    refs = [double.remote(n) for n in range(5)]
                    assert miniray.get(refs, timeout=30) == [0, 2, 4, 6, 8]
                elif kind == 2:
                    actor = rng.choice(counters)
                    assert miniray.get(actor.echo.remote(seed), timeout=30) == seed
                elif kind == 3:
                    refs = [shared.add.remote() for _ in range(10)]
                    values = miniray.get(refs, timeout=30)
                    assert values == sorted(values)
                else:
                    refs = [own.echo.remote(n) for n in range(5)]
                    ready, rest = miniray.wait(refs, num_returns=3, timeout=30)
                    assert (len(ready), len(rest)) == (3, 2)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert not failures


def test_threads_waiting_for_the_same_ref(engine):
    counter = Counter.remote()
    for _ in range(20):
        ref = counter.sleep.remote(0.02)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _, ref=ref: miniray.get(ref, timeout=10), range(8)))
        assert results == [0.02] * 8


def test_a_thread_gets_while_main_waits_for_another_call(engine):
    counter, other = Counter.remote(), Counter.remote()
    slow = counter.sleep.remote(0.5)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(miniray.get(counter.add.remote())))
    thread.start()
    assert miniray.get([slow, other.add.remote()], timeout=10) == [0.5, 1]
    thread.join(SOON)
    assert answers == [1]


def test_asyncio_and_threads(engine):
    counter = Counter.remote()

    async def main():
        refs = [counter.echo.remote(i) for i in range(50)]
        in_thread = asyncio.to_thread(miniray.get, double.remote(5))
        return await asyncio.gather(*refs, in_thread)

    for _ in range(3):
        assert asyncio.run(main()) == [*range(50), 10]


def test_a_result_that_comes_after_its_loop_has_closed(engine):
    counter = Counter.remote()
    ref = counter.sleep.remote(0.3)

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ref, 0.05)

    asyncio.run(give_up())
    assert miniray.get(ref, timeout=SOON) == 0.3
    assert miniray.get(counter.add.remote(), timeout=SOON) == 1


def test_a_future_that_is_cancelled_and_one_whose_callback_raises(engine):
    counter = Counter.remote()
    ref = counter.sleep.remote(0.1)
    cancelled, noisy = ref.future(), ref.future()
    assert cancelled.cancel()
    noisy.add_done_callback(lambda _: 1 / 0)
    assert noisy.result(SOON) == 0.1
    assert miniray.get(counter.add.remote(), timeout=SOON) == 1


def test_a_callback_that_waits(engine):
    """It runs in the engine's own thread and would wait for that: refused, at once and clearly."""
    counter = Counter.remote()
    outcome = []

    def callback(future):
        try:
            outcome.append(miniray.get(counter.sleep.remote(future.result())))
        except BaseException as error:
            outcome.append(error)

    counter.sleep.remote(0.1).future().add_done_callback(callback)
    eventually(lambda: outcome, 2 * SOON)
    assert isinstance(outcome[0], RuntimeError)
    assert "thread" in str(outcome[0])
    assert miniray.get(counter.add.remote(), timeout=SOON) == 1


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


def test_a_task_may_wait_for_tasks_queued_behind_it(engine, tmp_path):
    """Short tasks are sent ahead to a worker; one that then waits for them gives them back."""

    @miniray.remote
    class Box:
        refs = None

        def set(self, refs):
            self.refs = refs

        def get(self):
            return self.refs

    @miniray.remote
    def total(box):
        while (refs := miniray.get(box.get.remote())) is None:
            pass
        return sum(miniray.get(refs))

    miniray.get([double.remote(1) for _ in range(300)])  # they are known to be short now
    for _ in range(5):
        boxes = [Box.remote() for _ in range(3)]
        totals = [total.remote(box) for box in boxes]
        for box in boxes:
            box.set.remote([double.remote(1) for _ in range(40)])
        assert miniray.get(totals, timeout=20) == [80] * 3


def test_errors_in_many_threads(engine):
    @miniray.remote
    def fail(n):
        raise ValueError(n)

    def expect(n):
        with pytest.raises(ValueError) as caught:
            miniray.get(fail.remote(n))
        assert isinstance(caught.value, TaskError)
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(expect, range(100)))
