"""Generators: a ref an item, as soon as the item was yielded."""

import os

import pytest

import miniray
from tests.conformance.helpers import Gate, needs


@miniray.remote
def count(n):
    for i in range(n):
        yield i


@miniray.remote
def fail_after(n):
    for i in range(n):
        yield i
    raise ValueError("enough")


@miniray.remote
def total(values):
    return sum(miniray.get(values))


@miniray.remote
class Producer:
    def __init__(self):
        self.produced = 0

    def produce(self, n):
        for i in range(n):
            self.produced += 1
            yield i * 10

    def how_many(self):
        return self.produced


def values(stream):
    return [miniray.get(ref) for ref in stream]


def test_a_generator_function_streams(engine):
    stream = count.remote(4)
    assert isinstance(stream, miniray.ObjectRefGenerator)
    assert values(stream) == [0, 1, 2, 3]


def test_items_are_refs(engine):
    assert all(isinstance(ref, miniray.ObjectRef) for ref in count.remote(3))


def test_an_empty_stream(engine):
    assert values(count.remote(0)) == []


def test_next_raises_stop_iteration_at_the_end_and_after(engine):
    stream = count.remote(1)
    assert miniray.get(next(stream)) == 0
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)


def test_streaming_said_explicitly(engine):
    assert values(count.options(num_returns="streaming").remote(2)) == [0, 1]


def test_a_generator_method_streams(engine):
    assert values(Producer.remote().produce.remote(3)) == [0, 10, 20]


def test_the_next_call_runs_after_the_stream(engine):
    producer = Producer.remote()
    stream = producer.produce.remote(5)
    assert miniray.get(producer.how_many.remote()) == 5
    assert values(stream) == [0, 10, 20, 30, 40]


@pytest.mark.slow_on_ray
def test_a_stream_nobody_reads_is_produced_all_the_same(engine):
    producer = Producer.remote()
    producer.produce.remote(5)
    assert miniray.get(producer.how_many.remote()) == 5


def test_an_error_comes_with_the_item_where_it_happened(engine):
    stream = fail_after.remote(2)
    assert [miniray.get(next(stream)), miniray.get(next(stream))] == [0, 1]
    failed = next(stream)
    with pytest.raises(ValueError, match="enough"):
        miniray.get(failed)
    with pytest.raises(StopIteration):
        next(stream)


def test_an_error_before_the_first_item(engine):
    stream = fail_after.remote(0)
    with pytest.raises(ValueError, match="enough"):
        miniray.get(next(stream))


def test_items_are_passed_on(engine):
    assert miniray.get(total.remote(list(count.remote(4)))) == 6


def test_items_outlive_the_stream(engine):
    refs = list(count.remote(3))
    assert miniray.get(refs[::-1]) == [2, 1, 0]


def test_items_arrive_while_the_generator_runs(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def blocked_after_one():
        yield "early"
        gate.wait()
        yield "late"

    stream = blocked_after_one.remote()
    assert miniray.get(next(stream)) == "early"
    gate.open()
    assert values(stream) == ["late"]


def test_large_items(engine):
    np = pytest.importorskip("numpy")

    @miniray.remote
    def arrays(n):
        for i in range(n):
            yield np.full(100_000, i)

    assert [int(miniray.get(ref).sum()) for ref in arrays.remote(3)] == [0, 100_000, 200_000]


def test_a_hundred_items(engine):
    assert values(count.remote(100)) == list(range(100))


def test_a_stream_is_not_an_argument(engine):
    stream = count.remote(1)
    with pytest.raises(TypeError):
        total.remote(stream)


def test_two_streams_side_by_side(engine):
    one, other = count.remote(3), count.remote(3)
    pairs = [(miniray.get(a), miniray.get(b)) for a, b in zip(one, other, strict=True)]
    assert pairs == [(0, 0), (1, 1), (2, 2)]


def counted(n, read, died):
    """0 .. n-1; in its first run the process ends after 2, once somebody has read so far."""
    for i in range(n):
        yield i
        if i == 2 and not died.is_open():
            read.wait()
            died.open()
            os._exit(3)


@miniray.remote(max_restarts=1, max_task_retries=1)
class Counter:
    def counted(self, *args):
        yield from counted(*args)


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("where", ["task", "actor"])
def test_a_stream_that_is_run_again_repeats_no_item(engine, tmp_path, where):
    needs(engine, "processes", "concurrent")
    read, died = Gate(tmp_path, "read"), Gate(tmp_path, "died")
    actor = Counter.remote()
    call = miniray.remote(counted) if where == "task" else actor.counted
    stream = call.remote(5, read, died)
    first = [miniray.get(next(stream)) for _ in range(3)]
    read.open()
    assert first + values(stream) == [0, 1, 2, 3, 4]
    assert died.is_open()
