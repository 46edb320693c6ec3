"""Objects and actors end with their last user, whoever that is and however he ends."""

import contextlib
import gc

import numpy as np
import pytest

import miniray
from miniray.errors import ActorDiedError, GetTimeoutError, TaskCancelledError
from tests.conformance.helpers import Gate
from tests.faults.helpers import counts, eventually, fails_soon, is_process, pids, settles_to, used
from tests.faults.workers import Worker

LARGE = 200_000


def test_memory_is_freed_with_the_last_user_anywhere(engine):
    first, second = Worker.remote(), Worker.remote()
    ref = miniray.put(np.ones(5_000_000, np.uint8))
    miniray.get([first.hold.remote([ref]), second.hold.remote(ref)])
    array = miniray.get(ref)
    del ref
    for release in (
        lambda: miniray.get(first.drop.remote()),
        lambda: miniray.get(second.drop.remote()),
    ):
        gc.collect()
        assert used(engine) >= 5_000_000
        release()
    assert used(engine) >= 5_000_000
    assert array.sum() == 5_000_000
    part = array[10:20]
    del array
    assert used(engine) >= 5_000_000
    del part
    eventually(lambda: used(engine) == 0, 5)


def test_idle_memory_goes_back_to_the_system(engine, monkeypatch):
    monkeypatch.setattr("miniray.core.local.store.IDLE_SECONDS", 0.1)
    for _ in range(3):
        miniray.put(np.ones(5_000_000, np.uint8))
    eventually(lambda: engine.node.store.trim() or engine.node.usage.total() == 0, 10)


def test_refs_held_by_an_actor_that_dies(engine):
    idle = counts(engine)
    for _ in range(5):
        worker = Worker.remote()
        refs = [miniray.put(np.ones(LARGE, np.uint8)) for _ in range(20)]
        miniray.get(worker.hold.remote(*refs[:10]))
        miniray.get(worker.hold.remote(refs[10:]))
        fails_soon(worker.die.remote(), ActorDiedError)
        del refs, worker
    settles_to(engine, idle)
    eventually(lambda: used(engine) == 0, 5)


def test_refs_returned_nested(engine):
    worker = Worker.remote()
    miniray.get(worker.pid.remote())
    settles_to(engine, idle := counts(engine))
    for _ in range(50):
        ref, inner = miniray.get(worker.box.remote(LARGE))
        assert miniray.get(ref).nbytes == LARGE
        assert miniray.get(inner["deep"][0]) == LARGE
    del ref, inner
    settles_to(engine, idle)
    eventually(lambda: miniray.get(worker.echo.remote(0)) == 0 and used(engine) <= 20 * LARGE, 5)


def test_errors_keep_nothing_alive(engine):
    worker = Worker.remote()
    miniray.get(worker.pid.remote())
    settles_to(engine, idle := counts(engine))
    for _ in range(50):
        array = np.ones(LARGE, np.uint8)
        with pytest.raises(ValueError):
            miniray.get(worker.fail.remote(array))
        with contextlib.suppress(GetTimeoutError):
            miniray.get(worker.echo.remote(array), timeout=0)
    del array
    settles_to(engine, idle)
    eventually(
        lambda: used(engine) <= 20 * LARGE, 20
    )  # the worker, too, keeps some warm for a while


def test_an_actor_ends_with_its_last_handle(engine):
    worker = Worker.remote()
    pid = miniray.get(worker.pid.remote())
    boxed = [{"handle": worker}]
    ref = miniray.put(boxed)
    del worker
    assert is_process(pid)
    boxed.clear()
    assert miniray.get(miniray.get(ref)[0]["handle"].pid.remote()) == pid
    del ref
    gc.collect()
    eventually(lambda: not is_process(pid), 5)


@pytest.mark.parametrize("how", ["failed", "cancelled"])
def test_an_actor_ends_after_a_call_that_was_never_sent(engine, tmp_path, how):
    gate = Gate(tmp_path)

    @miniray.remote
    def late():
        gate.wait()
        raise KeyError("no")

    worker = Worker.remote()
    pid = miniray.get(worker.pid.remote())
    argument = late.remote()
    ref = worker.echo.remote(argument)
    if how == "cancelled":
        miniray.cancel(ref)
    else:
        gate.open()
    with pytest.raises((KeyError, TaskCancelledError)):
        miniray.get(ref, timeout=20)
    del worker, ref
    gc.collect()
    eventually(lambda: not is_process(pid), 5)
    gate.open()
    with pytest.raises(KeyError):
        miniray.get(argument, timeout=20)


def test_an_actor_whose_handle_is_dropped_at_once(engine):
    class Plain:
        def ping(self):
            return 1

    class Async:
        async def ping(self):
            return 1

    for _ in range(10):
        for cls in (Plain, Async):
            miniray.remote(cls).remote()
            assert miniray.get(miniray.remote(cls).remote().ping.remote(), timeout=10) == 1
            miniray.remote(cls).options(max_concurrency=4).remote()
    eventually(lambda: len(pids(engine)) == 1, 10)


def test_an_actor_held_by_one_that_dies(engine):
    held = Worker.remote()
    holder = Worker.remote(held)
    second = Worker.remote()
    miniray.get(second.hold.remote([held]))
    pid = miniray.get(held.pid.remote())
    del held
    fails_soon(holder.die.remote(), ActorDiedError)
    assert is_process(pid)
    del second
    gc.collect()
    eventually(lambda: not is_process(pid), 5)


def test_handles_in_a_cycle(engine):
    """Two actors that hold each other live until the end of the session, as in Ray; not longer.

    A cycle within one process is collected.
    """
    first, second = Worker.remote(), Worker.remote()
    miniray.get([first.hold.remote(second), second.hold.remote(first)])
    processes = miniray.get([first.pid.remote(), second.pid.remote()])

    class Node:
        pass

    node = Node()
    node.self, node.worker = node, Worker.remote()
    alone = miniray.get(node.worker.pid.remote())
    del node, first, second
    gc.collect()
    eventually(lambda: not is_process(alone), 5)
    miniray.shutdown()
    assert not any(is_process(pid) for pid in processes)


def test_streams_that_nobody_reads_to_the_end(engine):
    @miniray.remote
    class Source:
        def items(self, count):
            for _ in range(count):
                yield np.ones(LARGE, np.uint8)

    source = Source.remote()
    stream = source.items.options(num_returns="streaming")
    idle = None
    for _ in range(5):
        generator = stream.remote(20)
        assert miniray.get(next(generator)).nbytes == LARGE
        del generator
        assert len(list(stream.remote(3))) == 3
        if idle is None:
            settles_to(engine, idle := counts(engine))
    settles_to(engine, idle)
