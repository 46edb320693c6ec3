"""Order: calls from one caller to one actor run in the order they were made."""

import threading

import pytest

import miniray
from tests.conformance.helpers import Gate, needs


@miniray.remote
class Log:
    def __init__(self):
        self.entries = []

    def add(self, entry):
        self.entries.append(entry)

    def read(self):
        return self.entries


@miniray.remote
def identity(value):
    return value


@pytest.mark.slow_on_ray
def test_calls_run_in_order(engine):
    log = Log.remote()
    for i in range(200):
        log.add.remote(i)
    assert miniray.get(log.read.remote()) == list(range(200))


@pytest.mark.slow_on_ray
def test_calls_made_before_the_actor_is_up_run_in_order(engine):
    @miniray.remote
    class Slow(Log.__wrapped__):
        def __init__(self):
            threading.Event().wait(0.1)
            super().__init__()

    log = Slow.remote()
    for i in range(20):
        log.add.remote(i)
    assert miniray.get(log.read.remote()) == list(range(20))


def test_a_call_waiting_for_its_argument_holds_up_those_after_it(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def late():
        gate.wait()
        return "late"

    log = Log.remote()
    log.add.remote("first")
    log.add.remote(late.remote())
    log.add.remote("last")
    entries = log.read.remote()
    assert miniray.wait([entries], timeout=0.1)[0] == []
    gate.open()
    assert miniray.get(entries) == ["first", "late", "last"]


@pytest.mark.slow_on_ray
def test_arguments_from_tasks_keep_the_order(engine):
    log = Log.remote()
    for i in range(20):
        log.add.remote(identity.remote(i) if i % 2 else i)
    assert miniray.get(log.read.remote()) == list(range(20))


def test_a_failed_argument_leaves_the_order_of_the_others(engine):
    @miniray.remote
    def fail():
        raise ValueError("no")

    log = Log.remote()
    log.add.remote(1)
    log.add.remote(fail.remote())
    log.add.remote(2)
    assert miniray.get(log.read.remote()) == [1, 2]


@pytest.mark.slow_on_ray
def test_calls_through_copies_of_a_handle_keep_the_order(engine, unique):
    log = Log.options(name=unique).remote()
    handles = [log, miniray.get_actor(unique), miniray.get(miniray.put([log]))[0]]
    for i in range(30):
        handles[i % 3].add.remote(i)
    assert miniray.get(log.read.remote()) == list(range(30))


@pytest.mark.slow_on_ray
def test_an_actors_calls_to_another_run_in_order(engine):
    @miniray.remote
    class Writer:
        def write(self, log, n):
            for i in range(n):
                log.add.remote(i)
            return miniray.get(log.read.remote())

    assert miniray.get(Writer.remote().write.remote(Log.remote(), 50)) == list(range(50))


@pytest.mark.slow_on_ray
def test_several_callers_each_keep_their_order(engine):
    @miniray.remote
    def write(log, name):
        miniray.get([log.add.remote((name, i)) for i in range(20)])

    log = Log.remote()
    miniray.get([write.remote(log, name) for name in "ab"])
    entries = miniray.get(log.read.remote())
    for name in "ab":
        assert [i for who, i in entries if who == name] == list(range(20))


@pytest.mark.slow_on_ray
def test_large_and_small_arguments_keep_the_order(engine):
    log = Log.remote()
    for i in range(20):
        log.add.remote(i if i % 2 else [i] * 50_000)
    entries = miniray.get(log.read.remote())
    assert [entry if isinstance(entry, int) else entry[0] for entry in entries] == list(range(20))
