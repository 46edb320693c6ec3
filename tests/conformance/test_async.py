"""asyncio on both sides: refs are awaitable, methods may be async, calls may overlap."""

import asyncio
import concurrent.futures
import threading

import pytest

import miniray
from tests.conformance.helpers import Gate, needs


@miniray.remote
def identity(value):
    return value


@miniray.remote
def fail():
    raise KeyError("no")


@miniray.remote
class Async:
    def __init__(self):
        self.count = 0
        self.event = asyncio.Event()

    async def add(self, n):
        await asyncio.sleep(0)
        self.count += n
        return self.count

    async def fail(self):
        await asyncio.sleep(0)
        raise KeyError("no")

    def plain(self):
        return self.count

    async def wait_for_event(self):
        await self.event.wait()
        return "set"

    async def set_event(self):
        self.event.set()

    async def ask(self, other):
        return await other.add.remote(5)

    async def ask_many(self, refs):
        return await asyncio.gather(*refs[0])

    async def items(self, n):
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    async def same_loop(self):
        return id(asyncio.get_running_loop())

    def loop_in_plain_method(self):
        return id(asyncio.get_running_loop())


def run(coroutine):
    """``asyncio.run`` with a deadline of its own, so that a lost wake-up is a failure here."""

    async def limited():
        return await asyncio.wait_for(coroutine, 30)

    return asyncio.run(limited())


def test_a_ref_is_awaitable(engine):
    async def main():
        return await identity.remote(3)

    assert run(main()) == 3


def test_awaiting_raises_the_users_exception(engine):
    async def main():
        with pytest.raises(KeyError):
            await fail.remote()
        return "raised"

    assert run(main()) == "raised"


def test_refs_are_gathered(engine):
    async def main():
        return await asyncio.gather(*[identity.remote(i) for i in range(10)])

    assert run(main()) == list(range(10))


def test_a_ref_may_be_awaited_twice(engine):
    async def main():
        ref = identity.remote([1])
        return await ref, await ref

    assert run(main()) == ([1], [1])


@pytest.mark.slow_on_ray
def test_the_loop_goes_on_while_a_ref_is_awaited(engine):
    needs(engine, "concurrent")

    async def main():
        actor = Async.remote()
        waiting = asyncio.ensure_future(_await(actor.wait_for_event.remote()))
        await actor.set_event.remote()
        return await waiting

    async def _await(ref):
        return await ref

    assert run(main()) == "set"


def test_future_gives_the_value(engine):
    future = identity.remote(4).future()
    assert isinstance(future, concurrent.futures.Future)
    assert future.result(timeout=30) == 4


def test_future_gives_the_error(engine):
    future = fail.remote().future()
    assert isinstance(future.exception(timeout=30), KeyError)


def test_futures_work_with_concurrent_wait(engine):
    futures = [identity.remote(i).future() for i in range(5)]
    done, pending = concurrent.futures.wait(futures, timeout=30)
    assert not pending
    assert sorted(f.result() for f in done) == [0, 1, 2, 3, 4]


def test_async_methods(engine):
    actor = Async.remote()
    assert miniray.get([actor.add.remote(1), actor.add.remote(2)]) in ([1, 3], [3, 2])
    assert miniray.get(actor.plain.remote()) == 3


def test_an_error_in_an_async_method(engine):
    actor = Async.remote()
    with pytest.raises(KeyError):
        miniray.get(actor.fail.remote())
    assert miniray.get(actor.add.remote(1)) == 1


@pytest.mark.slow_on_ray
def test_async_methods_called_from_a_running_loop(engine):
    async def main():
        actor = Async.remote()
        first = await actor.add.remote(2)
        return first, miniray.get(actor.add.remote(3)), await actor.plain.remote()

    assert run(main()) == (2, 5, 5)


@pytest.mark.slow_on_ray
def test_an_async_actor_awaits_another(engine):
    one, other = Async.remote(), Async.remote()
    assert miniray.get(one.ask.remote(other)) == 5
    assert miniray.get(other.plain.remote()) == 5


@pytest.mark.slow_on_ray
def test_an_async_actor_gathers_refs(engine):
    actor = Async.remote()
    refs = [identity.remote(i) for i in range(4)]
    assert miniray.get(actor.ask_many.remote([refs])) == [0, 1, 2, 3]


def test_all_methods_of_an_async_actor_share_its_loop(engine):
    actor = Async.remote()
    loops = [
        actor.same_loop.remote(),
        actor.same_loop.remote(),
        actor.loop_in_plain_method.remote(),
    ]
    assert len(set(miniray.get(loops))) == 1


@pytest.mark.slow_on_ray
def test_calls_of_an_async_actor_overlap(engine):
    needs(engine, "concurrent")
    actor = Async.remote()
    waiting = [actor.wait_for_event.remote() for _ in range(5)]
    assert miniray.wait(waiting, num_returns=5, timeout=0.1)[0] == []
    miniray.get(actor.set_event.remote())
    assert miniray.get(waiting) == ["set"] * 5


@pytest.mark.slow_on_ray
def test_max_concurrency_limits_an_async_actor(engine):
    needs(engine, "concurrent")

    @miniray.remote(max_concurrency=2)
    class Limited:
        def __init__(self):
            self.inside = self.most = 0

        async def enter(self):
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0.01)
            self.inside -= 1
            return self.most

    actor = Limited.remote()
    assert max(miniray.get([actor.enter.remote() for _ in range(10)])) == 2


def test_async_generators_stream(engine):
    actor = Async.remote()
    assert [miniray.get(ref) for ref in actor.items.remote(4)] == [0, 1, 2, 3]


def test_giving_up_on_a_stream_leaves_its_loop_alone(engine, tmp_path):
    """Nothing waits on in its place: the loop ends, and the next item is for whoever comes next."""
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def slow():
        yield 1
        gate.wait()
        yield 2

    async def read(stream):
        got = [await (await anext(stream))]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.2)
        return got

    stream = slow.remote()
    got = asyncio.run(read(stream))
    gate.open()
    assert got + [miniray.get(ref) for ref in stream] == [1, 2]


def test_streams_are_read_with_async_for(engine):
    async def main():
        actor = Async.remote()
        return [await ref async for ref in actor.items.remote(3)]

    assert run(main()) == [0, 1, 2]


@pytest.mark.slow_on_ray
def test_max_concurrency_threads(engine):
    needs(engine, "concurrent")

    @miniray.remote(max_concurrency=3)
    class Threaded:
        def __init__(self):
            self.barrier = threading.Barrier(3)

        def meet(self):
            self.barrier.wait(20)  # only three threads at once get through
            return True

    actor = Threaded.remote()
    assert miniray.get([actor.meet.remote() for _ in range(3)]) == [True] * 3


@pytest.mark.slow_on_ray
def test_a_threaded_actor_can_be_asked_while_it_works(engine, tmp_path):
    needs(engine, "concurrent")

    @miniray.remote(max_concurrency=2)
    class Busy:
        def __init__(self):
            self.released = threading.Event()

        def work(self):
            self.released.wait(20)
            return "released"

        def release(self):
            self.released.set()

    actor = Busy.remote()
    work = actor.work.remote()
    miniray.get(actor.release.remote())
    assert miniray.get(work) == "released"
