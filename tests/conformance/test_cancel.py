"""Cancelling calls: queued, running, finished."""

import asyncio
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

    def block(self, gate):
        gate.announce()
        gate.wait()
        return "unblocked"


def test_cancelling_what_is_done_does_nothing(engine):
    actor = Actor.remote()
    ref = actor.call.remote()
    miniray.get(ref)
    miniray.cancel(ref)
    assert miniray.get(ref) == 1
    assert miniray.get(actor.call.remote()) == 2


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


def test_force_is_refused_for_actor_calls(engine, tmp_path):
    needs(engine, "concurrent")
    gate, actor = Gate(tmp_path), Actor.remote()
    ref = actor.block.remote(gate)
    eventually(gate.arrived)
    with pytest.raises(ValueError, match="force"):
        miniray.cancel(ref, force=True)
    gate.open()
    assert miniray.get(ref) == "unblocked"
