"""The pool stops workers it doesn't need, but none that another process depends on."""

import gc
import os
import signal

import numpy as np
import pytest

import miniray
from miniray.errors import ObjectLostError
from tests.conformance.helpers import Gate
from tests.faults.helpers import counts as books
from tests.faults.helpers import eventually, is_process, pids, settles_to


@miniray.remote
def make(number):
    """An object that this process owns."""
    return [os.getpid(), miniray.put(("made", number))]


@miniray.remote
def nest(depth):
    """One object of each of ``depth`` processes, all running at the same time."""
    inner = miniray.get(nest.remote(depth - 1)) if depth > 1 else []
    return [*inner, os.getpid(), miniray.put(depth)]


@miniray.remote
def relay(box, keeper):
    """Pass the refs in ``box`` on to an actor."""
    miniray.get(keeper.keep.remote(box))
    return os.getpid()


def surplus(engine):
    """How many pool workers run beyond the two that may stay."""
    return len(pids(engine)) - 1 - 2


def split(values):
    """(process ids, refs) of a flat list of both."""
    numbers = [value for value in values if isinstance(value, int)]
    return numbers, [value for value in values if not isinstance(value, int)]


def test_refs_stay_valid_when_the_pool_shrinks(engine):
    """Eight workers exist because seven of them wait; six are surplus then."""
    owners, refs = split(miniray.get(nest.remote(8)))
    assert len(set(owners)) == 8
    assert sorted(miniray.get(refs)) == list(range(1, 9))
    assert all(map(is_process, owners))
    del refs
    gc.collect()
    eventually(lambda: surplus(engine) <= 0, 10)


def test_a_ref_inside_another_object_keeps_its_owner(engine):
    owners, refs = split(miniray.get(nest.remote(4)))
    boxed = miniray.put([{"deep": refs}])
    del refs
    gc.collect()
    assert sorted(miniray.get(miniray.get(boxed)[0]["deep"])) == [1, 2, 3, 4]
    assert all(map(is_process, owners))
    del boxed
    gc.collect()
    eventually(lambda: surplus(engine) <= 0, 10)


@pytest.mark.parametrize("demand", [{"num_cpus": 2}, {"num_gpus": 1}], ids=["threads", "gpu"])
def test_workers_with_gpus_or_more_threads(own_directory, demand):
    miniray.init(num_workers=1, num_cpus=4, num_gpus=1)
    try:
        made = [miniray.get(make.options(**demand).remote(i)) for i in range(4)]
        eventually(lambda: miniray.available_resources()["CPU"] == 4)
        assert [miniray.get(ref) for _, ref in made] == [("made", i) for i in range(4)]
        # A GPU's memory is free when its process has ended: another task gets a new one.
        assert len({pid for pid, _ in made}) == (4 if "num_gpus" in demand else 1)
        owners = [pid for pid, _ in made]
        made.clear()
        gc.collect()
        eventually(lambda: sum(map(is_process, set(owners))) <= ("num_cpus" in demand), 10)
    finally:
        miniray.shutdown()


def test_a_worker_that_passed_a_ref_on(engine):
    """It isn't the owner, but the owner learns from it when the ref is dropped."""

    @miniray.remote
    class Keeper:
        def keep(self, box):
            self.box = box

        def read(self):
            return miniray.get(self.box)

    keeper, ref = Keeper.remote(), miniray.put("value")
    miniray.get(keeper.keep.remote([]))
    relayed = relay.options(num_cpus=2).remote([ref], keeper)
    del ref
    between = miniray.get(relayed)
    miniray.get(nest.remote(6))  # makes it surplus
    gc.collect()
    eventually(lambda: surplus(engine) <= 2, 10)  # the keeper and the worker in between
    assert miniray.get(keeper.read.remote()) == ["value"]
    assert is_process(between)
    miniray.get(keeper.keep.remote([]))
    eventually(lambda: not is_process(between), 10)


def test_calls_that_a_surplus_worker_made_run_to_their_end(engine, tmp_path):
    """Nobody waits for them: their caller has returned, and only they keep it."""
    gate, done = Gate(tmp_path), Gate(tmp_path, "done")

    @miniray.remote
    def slow():
        gate.announce()
        gate.wait()
        done.open()

    @miniray.remote(num_cpus=2)
    def start():
        slow.options(num_cpus=0).remote()

    miniray.get(start.remote())
    eventually(gate.arrived)
    miniray.get(nest.remote(6))  # makes the worker of `start` surplus
    gc.collect()
    gate.open()
    eventually(done.is_open)
    eventually(lambda: surplus(engine) <= 0, 10)


def test_a_killed_owner_loses_its_objects(engine):
    owner, ref = miniray.get(make.remote(1))
    os.kill(owner, signal.SIGKILL)
    eventually(lambda: not is_process(owner))
    with pytest.raises(ObjectLostError):
        miniray.get(ref, timeout=20)


def test_objects_of_surplus_workers_leave_nothing(engine):
    miniray.get(nest.remote(2))
    gc.collect()
    settles_to(engine, idle := books(engine))
    for _ in range(3):
        _, refs = split(miniray.get(nest.remote(5)))
        array = miniray.get(miniray.put(np.ones(200_000, np.uint8)))
        assert sorted(miniray.get(refs)) == [1, 2, 3, 4, 5]
    del refs, array
    gc.collect()
    eventually(lambda: surplus(engine) <= 0, 10)
    settles_to(engine, idle)


def test_shutdown_ends_workers_that_own_objects(own_directory):
    miniray.init(num_workers=1, num_cpus=4)
    owners, refs = split(miniray.get(nest.remote(4)))
    miniray.shutdown()
    assert not any(map(is_process, owners))
    del refs
