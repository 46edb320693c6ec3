"""Cancelling calls: queued, running, finished."""

import asyncio
import itertools
import time

import pytest

import miniray
from miniray.errors import TaskCancelledError, WorkerCrashedError
from tests.conformance.helpers import Gate, eventually, needs


@miniray.remote
class Actor:
    def __init__(self):
        self.calls = 0

    def call(self):
        self.calls += 1
        return self.calls

    def take(self, value):
        return value

    def block(self, gate):
        gate.announce()
        gate.wait()
        return "unblocked"


@miniray.remote
def endless():
    for i in itertools.count():
        yield i
        time.sleep(0.01)


@miniray.remote
class Endless:
    def items(self):
        for i in itertools.count():
            yield i
            time.sleep(0.01)

    def ping(self):
        return "pong"


@miniray.remote
class AsyncEndless:
    async def items(self):
        for i in itertools.count():
            yield i
            await asyncio.sleep(0.01)

    async def ping(self):
        return "pong"


@pytest.mark.slow_on_ray
def test_cancelling_what_is_done_does_nothing(engine):
    actor = Actor.remote()
    ref = actor.call.remote()
    miniray.get(ref)
    miniray.cancel(ref)
    assert miniray.get(ref) == 1
    assert miniray.get(actor.call.remote()) == 2


@miniray.remote
def block(gate):
    gate.announce()
    gate.wait()


@miniray.remote
def borrow(gate):
    """Return refs that the process of this task owns."""
    return [miniray.put(3), block.remote(gate)]


@pytest.mark.slow_on_ray
def test_cancelling_by_a_ref_from_a_different_process(engine, tmp_path):
    needs(engine, "concurrent", "processes")
    gate = Gate(tmp_path)
    value, running = miniray.get(borrow.remote(gate))
    miniray.cancel(value)  # it is done: this changes nothing
    assert miniray.get(value) == 3
    miniray.cancel(value)
    eventually(gate.arrived)
    miniray.cancel(running)
    with pytest.raises(TaskCancelledError):
        miniray.get(running, timeout=20)
    gate.open()


def test_cancelling_a_running_task(engine, tmp_path):
    needs(engine, "concurrent", "processes")
    gate = Gate(tmp_path)

    @miniray.remote
    def blocked():
        gate.announce()
        gate.wait()

    ref = blocked.remote()
    eventually(gate.arrived)
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref)


def test_cancelling_a_running_task_by_force(engine, tmp_path):
    needs(engine, "concurrent", "processes")
    gate = Gate(tmp_path)

    @miniray.remote(max_retries=0)
    def stubborn():
        gate.announce()
        while True:
            try:
                time.sleep(0.01)
            except KeyboardInterrupt:
                pass

    ref = stubborn.remote()
    eventually(gate.arrived)
    miniray.cancel(ref, force=True)
    with pytest.raises((TaskCancelledError, WorkerCrashedError)):
        miniray.get(ref)


def test_cancelling_a_task_in_the_queue(engine, tmp_path):
    needs(engine, "concurrent")
    gate, ran = Gate(tmp_path), Gate(tmp_path, "ran")

    @miniray.remote(num_cpus=8)  # all there are
    def blocked():
        gate.announce()
        gate.wait()

    @miniray.remote(num_cpus=8)
    def queued():
        ran.open()

    first = blocked.remote()
    eventually(gate.arrived)
    second = queued.remote()
    miniray.cancel(second)
    with pytest.raises(TaskCancelledError):
        miniray.get(second)
    gate.open()
    miniray.get(first)
    assert not ran.is_open()


@pytest.mark.slow_on_ray
def test_calls_behind_a_cancelled_one_do_not_wait_for_its_argument(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def late():
        gate.wait()

    actor = Actor.remote()
    waiting = actor.take.remote(late.remote())
    behind = actor.call.remote()
    miniray.cancel(waiting)
    with pytest.raises(TaskCancelledError):
        miniray.get(waiting, timeout=20)
    assert miniray.get(behind, timeout=20) == 1
    gate.open()


def test_cancelling_an_async_method(engine, tmp_path):
    needs(engine, "concurrent")

    @miniray.remote
    class Waiter:
        def __init__(self):
            self.seen = "nothing"

        async def wait(self, gate):
            gate.announce()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.seen = "cancelled"
                raise

        async def what(self):
            return self.seen

    gate, waiter = Gate(tmp_path), Waiter.remote()
    ref = waiter.wait.remote(gate)
    eventually(gate.arrived)
    miniray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        miniray.get(ref)
    assert miniray.get(waiter.what.remote()) == "cancelled"


@pytest.mark.slow_on_ray
def test_cancelling_an_async_method_that_has_not_begun(engine):
    """At once, or while others have all the slots: it is told, and the others go on."""
    needs(engine, "concurrent")

    @miniray.remote(max_concurrency=1)
    class Sleeper:
        async def sleep(self, seconds):
            await asyncio.sleep(seconds)
            return seconds

    sleeper = Sleeper.remote()
    for _ in range(10):
        first, second = sleeper.sleep.remote(0.05), sleeper.sleep.remote(3600)
        miniray.cancel(second)
        with pytest.raises(TaskCancelledError):
            miniray.get(second, timeout=20)
        assert miniray.get(first, timeout=20) == 0.05


def test_force_is_refused_for_actor_calls(engine, tmp_path):
    needs(engine, "concurrent")
    gate, actor = Gate(tmp_path), Actor.remote()
    ref = actor.block.remote(gate)
    eventually(gate.arrived)
    with pytest.raises(ValueError, match="force"):
        miniray.cancel(ref, force=True)
    gate.open()
    assert miniray.get(ref) == "unblocked"


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("of", ["task", "method", "async method"])
def test_cancelling_a_stream(engine, of):
    """It ends with the error as its last item, and its worker is free again."""
    needs(engine, "concurrent")
    if engine.name == "ray" and of == "method":
        pytest.skip("Ray does not interrupt a method that is not async")
    source = {"task": None, "method": Endless, "async method": AsyncEndless}[of]
    actor = None if source is None else source.remote()
    stream = endless.remote() if actor is None else actor.items.remote()
    assert miniray.get(next(stream)) == 0
    miniray.cancel(stream)
    with pytest.raises(TaskCancelledError):
        for ref in stream:
            miniray.get(ref)
    assert next(stream, None) is None
    miniray.cancel(stream)  # it is over: nothing happens
    if actor is not None:
        assert miniray.get(actor.ping.remote(), timeout=30) == "pong"
