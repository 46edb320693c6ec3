"""Order: calls from one caller run in submission order if the actor runs one call at a time.

On async and threaded actors, calls overtake those that wait for an argument.
"""

import asyncio
import os
import threading

import pytest

import miniray
from miniray.errors import ActorDiedError, TaskCancelledError
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
class AsyncDoor:
    def __init__(self):
        self.opened = asyncio.Event()

    async def wait(self):
        await self.opened.wait()
        return "through"

    async def open(self):
        self.opened.set()

    async def take(self, value):
        return value


@miniray.remote(max_concurrency=2)
class ThreadedDoor:
    def __init__(self):
        self.opened = threading.Event()

    def wait(self):
        self.opened.wait()
        return "through"

    def open(self):
        self.opened.set()

    def take(self, value):
        return value


@miniray.remote
def identity(value):
    return value


@miniray.remote
def late(gate):
    gate.wait()
    return "late"


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
    gate, log = Gate(tmp_path), Log.remote()
    log.add.remote("first")
    log.add.remote(late.remote(gate))
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


concurrent_actors = pytest.mark.parametrize("Door", [AsyncDoor, ThreadedDoor])


@concurrent_actors
def test_a_later_call_produces_the_argument_of_an_earlier_one(engine, Door):
    needs(engine, "concurrent")
    door = Door.remote()
    taken = door.take.remote(door.wait.remote())
    door.open.remote()
    assert miniray.get(taken, timeout=30) == "through"


@concurrent_actors
def test_calls_overtake_one_that_waits_for_its_argument(engine, tmp_path, Door):
    needs(engine, "concurrent")
    gate, door = Gate(tmp_path), Door.remote()
    waiting = [door.take.remote(late.remote(gate)) for _ in range(3)]
    assert miniray.get([door.take.remote(i) for i in range(10)], timeout=30) == list(range(10))
    assert miniray.wait(waiting, timeout=0)[0] == []
    gate.open()
    assert miniray.get(waiting) == ["late"] * 3


@concurrent_actors
def test_overtaken_calls_fail_with_their_argument(engine, Door):
    @miniray.remote
    def fail():
        raise ValueError("no")

    door = Door.remote()
    failing, passing = door.take.remote(fail.remote()), door.take.remote(1)
    assert miniray.get(passing) == 1
    with pytest.raises(ValueError, match="no"):
        miniray.get(failing)


@concurrent_actors
def test_cancelling_an_overtaken_call(engine, tmp_path, Door):
    needs(engine, "concurrent")
    gate, door = Gate(tmp_path), Door.remote()
    argument = late.remote(gate)
    waiting = door.take.remote(argument)
    assert miniray.get(door.take.remote(1)) == 1
    miniray.cancel(waiting)
    with pytest.raises(TaskCancelledError):
        miniray.get(waiting, timeout=30)
    gate.open()
    assert miniray.get(door.take.remote(argument)) == "late"


@concurrent_actors
def test_an_actor_that_is_killed_fails_overtaken_calls(engine, tmp_path, Door):
    needs(engine, "concurrent")
    gate, door = Gate(tmp_path), Door.remote()
    waiting = door.take.remote(late.remote(gate))
    assert miniray.get(door.take.remote(1)) == 1
    miniray.kill(door)
    with pytest.raises(ActorDiedError):
        miniray.get(waiting, timeout=30)
    gate.open()


@concurrent_actors
def test_an_overtaken_call_keeps_its_actor_alive(engine, tmp_path, Door):
    needs(engine, "concurrent")
    gate, door = Gate(tmp_path), Door.remote()
    waiting = door.take.remote(late.remote(gate))
    assert miniray.get(door.take.remote(1)) == 1
    del door
    gate.open()
    assert miniray.get(waiting, timeout=30) == "late"


@miniray.remote
class Fragile:
    """Ends in its ``__init__`` if ``fails``."""

    def __init__(self, fails=False):
        if fails:
            raise ValueError("no such file")

    def take(self, value):
        return value

    def crash(self):
        os._exit(1)


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_first_call_fails_if_the_actor_dies_before_its_argument_is_ready(
    engine, tmp_path, concurrency
):
    """The caller had no connection to the actor yet, so it didn't notice that the actor died."""
    needs(engine, "processes")
    gate = Gate(tmp_path)
    argument = late.remote(gate)
    fragile = Fragile.options(max_concurrency=concurrency)
    killed, broken = fragile.remote(), fragile.remote(fails=True)
    calls = [killed.take.remote(argument), broken.take.remote(argument)]
    miniray.kill(killed)
    for call in calls:
        with pytest.raises(ActorDiedError):
            miniray.get(call, timeout=20)
    gate.open()


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_waiting_call_fails_if_the_actor_dies_after_a_restart(engine, tmp_path, concurrency):
    needs(engine, "processes")
    gate = Gate(tmp_path)
    actor = Fragile.options(max_restarts=1, max_concurrency=concurrency).remote()
    with pytest.raises(ActorDiedError):
        miniray.get(actor.crash.remote())
    call = actor.take.remote(late.remote(gate))
    miniray.kill(actor, no_restart=False)
    miniray.kill(actor)
    with pytest.raises(ActorDiedError):
        miniray.get(call, timeout=20)
    gate.open()
