"""Many threads, event loops and callbacks that use the engine at once."""

import asyncio
import concurrent.futures
import random
import threading

import numpy as np
import pytest

import miniray
from miniray.errors import SessionEndedError, TaskError
from tests.conformance.helpers import Gate
from tests.faults.helpers import SOON, eventually
from tests.faults.workers import Counter, double


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
    """Callbacks have a thread of their own, so that one may wait for another call."""
    counter = Counter.remote()
    outcome = []

    def callback(future):
        try:
            outcome.append(miniray.get(counter.sleep.remote(future.result())))
        except BaseException as error:
            outcome.append(error)

    counter.sleep.remote(0.1).future().add_done_callback(callback)
    eventually(lambda: outcome, 2 * SOON)
    assert outcome[0] == 0.1
    assert miniray.get(counter.add.remote(), timeout=SOON) == 1


@miniray.remote
def in_a_thread():
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(miniray.get, double.remote(2)).result()


@miniray.remote
def in_a_stream():
    return [miniray.get(ref) for ref in numbers.remote()]


@miniray.remote
async def in_a_loop():
    return await asyncio.gather(double.remote(2), double.remote(3))


@miniray.remote
async def in_a_loop_over_a_stream():
    return [await ref async for ref in numbers.remote()]


@miniray.remote
def numbers():
    yield 1
    yield 2


def test_a_task_may_wait_for_tasks_however_it_waits(own_directory):
    """With one worker in the pool, they need the CPU of the one that waits."""
    with miniray.init(num_workers=1, num_cpus=1):
        for task, expected in (
            (in_a_thread, 4),
            (in_a_stream, [1, 2]),
            (in_a_loop, [4, 6]),
            (in_a_loop_over_a_stream, [1, 2]),
        ):
            assert miniray.get(task.remote(), timeout=30) == expected
        # What they lent comes back on other ways than their results.
        eventually(lambda: miniray.available_resources()["CPU"] == 1)


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


def test_a_task_that_waits_for_a_future_lends_its_cpu():
    @miniray.remote
    def down(n):
        return n if n == 0 else down.remote(n - 1).future().result() + 1

    with miniray.init(num_workers=1, num_cpus=1):
        assert miniray.get(down.remote(2), timeout=60) == 2
        eventually(lambda: miniray.available_resources()["CPU"] == 1)


def test_who_asked_the_driver_learns_that_another_thread_ended_the_session(engine):
    actor = Counter.remote()
    engine.node.answers["kill"] = lambda *_: None  # too late to be answered
    failures = []

    def kill():
        try:
            miniray.kill(actor)
        except SessionEndedError as error:
            failures.append(error)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    eventually(lambda: engine.node.asked)
    miniray.shutdown()
    thread.join(30)
    assert not thread.is_alive()
    assert len(failures) == 1


@pytest.mark.parametrize("how", ["a task is cancelled", "a method is cancelled", "an actor dies"])
def test_those_who_wait_for_a_call_that_failed_go_on_with_no_lock_held(engine, tmp_path, how):
    """Else two threads could each hold what the other one waits for."""
    gate, counter = Gate(tmp_path), Counter.remote()

    @miniray.remote
    def blocked():
        gate.wait()

    argument = blocked.remote()
    if how == "a task is cancelled":
        call, ref = double, double.options(num_cpus=4).remote(1)
    else:
        miniray.get(counter.add.remote())
        call, ref = counter.add, counter.add.remote(argument)
    free = []

    def callback():
        other = threading.Thread(target=call.remote, args=(1,), daemon=True)
        other.start()
        other.join(10)
        free.append(not other.is_alive())

    engine.on_ready(ref, callback)
    if how == "an actor dies":
        miniray.kill(counter)
    else:
        miniray.cancel(ref)
    assert eventually(lambda: free) == [True]
    gate.open()
