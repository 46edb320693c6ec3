"""Tasks: functions that run somewhere else."""

import asyncio
import os

import pytest

import miniray
from tests.conformance.helpers import Gate, needs


@miniray.remote
def add(a, b=10, *rest, scale=1, **named):
    """Add up."""
    return (a + b + sum(rest) + sum(named.values())) * scale


@miniray.remote
def identity(value):
    return value


@miniray.remote
def three():
    return 1, 2, 3


@miniray.remote
def pid():
    return os.getpid()


@miniray.remote(num_returns=2)
def half():
    yield "first"
    raise ArithmeticError("no second")


@miniray.remote
class Half:
    @miniray.method(num_returns=2)
    def half(self):
        yield "first"
        raise ArithmeticError("no second")


@miniray.remote
class AsyncHalf(Half.__wrapped__):
    async def nothing(self):
        pass


@miniray.remote
def fibonacci(n):
    if n < 2:
        return n
    return sum(miniray.get([fibonacci.remote(n - 1), fibonacci.remote(n - 2)]))


def test_a_task_returns_a_value(engine):
    assert miniray.get(add.remote(1, 2)) == 3


def test_remote_returns_a_ref(engine):
    assert isinstance(add.remote(1), miniray.ObjectRef)


def test_default_arguments_apply(engine):
    assert miniray.get(add.remote(1)) == 11


def test_keyword_arguments(engine):
    assert miniray.get(add.remote(b=2, a=1, scale=3)) == 9


def test_variable_arguments(engine):
    assert miniray.get(add.remote(1, 2, 3, 4, x=5, y=6)) == 21


def test_none_is_a_result(engine):
    assert miniray.get(identity.remote(None)) is None


@pytest.mark.slow_on_ray
def test_results_come_in_the_order_of_the_refs(engine):
    refs = [identity.remote(i) for i in range(30)]
    assert miniray.get(refs[::-1]) == list(range(29, -1, -1))


def test_several_returns_are_several_refs(engine):
    refs = three.options(num_returns=3).remote()
    assert len(refs) == 3
    assert miniray.get(refs[2]) == 3
    assert miniray.get(refs) == [1, 2, 3]


def test_several_returns_need_not_be_declared(engine):
    assert miniray.get(three.remote()) == (1, 2, 3)


def test_no_returns_gives_none_and_runs(engine, tmp_path):
    gate = Gate(tmp_path)

    @miniray.remote(num_returns=0)
    def touch():
        gate.open()

    assert touch.remote() is None
    gate.wait()


def test_wrong_number_of_returns_is_a_value_error(engine):
    refs = three.options(num_returns=2).remote()
    with pytest.raises(ValueError, match="num_returns=2"):
        miniray.get(refs[0])


def test_yield_may_give_a_fixed_number_of_returns(engine):
    @miniray.remote(num_returns=2)
    def pair():
        yield "first"
        yield "second"

    assert miniray.get(pair.remote()) == ["first", "second"]


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("actor", ["task", "plain", "threaded", "async"])
def test_a_generator_that_fails_fails_its_returns(engine, actor):
    """What it raises is the call's error, and its worker lives on."""
    if actor == "task":
        call = half.remote
    else:
        threads = 2 if actor == "threaded" else None
        maker = (AsyncHalf if actor == "async" else Half).options(max_concurrency=threads).remote()
        call = maker.half.remote
    for _ in range(2):
        _, second = call()
        with pytest.raises(ArithmeticError, match="no second"):
            miniray.get(second, timeout=30)


def test_async_generators_of_tasks(engine):
    @miniray.remote
    async def stream(n):
        for i in range(n):
            await asyncio.sleep(0)
            yield i

    assert [miniray.get(ref) for ref in stream.remote(3)] == [0, 1, 2]


def test_a_ref_argument_is_replaced_by_its_value(engine):
    assert miniray.get(add.remote(identity.remote(5), 1)) == 6


def test_a_ref_keyword_argument_is_replaced_by_its_value(engine):
    assert miniray.get(add.remote(1, b=miniray.put(7))) == 8


def test_a_nested_ref_stays_a_ref(engine):
    @miniray.remote
    def look(values):
        return isinstance(values[0], miniray.ObjectRef), miniray.get(values[0])

    assert miniray.get(look.remote([miniray.put(4)])) == (True, 4)


def test_a_chain_of_tasks(engine):
    ref = identity.remote(0)
    for _ in range(10):
        ref = add.remote(ref, 1)
    assert miniray.get(ref) == 10


def test_one_ref_feeds_many_tasks(engine):
    base = miniray.put(100)
    assert miniray.get([add.remote(base, i) for i in range(5)]) == [100, 101, 102, 103, 104]


@pytest.mark.slow_on_ray
def test_tasks_call_tasks(engine):
    assert miniray.get(fibonacci.remote(5)) == 5


def test_a_closure_travels(engine):
    offset = [3]

    @miniray.remote
    def shifted(x):
        return x + offset[0]

    assert miniray.get(shifted.remote(4)) == 7


def test_remote_as_a_plain_function(engine):
    assert miniray.get(miniray.remote(lambda x: x * 2).remote(21)) == 42


def test_later_changes_by_the_caller_are_not_seen(engine, tmp_path):
    gate = Gate(tmp_path)

    @miniray.remote
    def length_later(values):
        if engine_is_concurrent:
            gate.wait()
        return len(values)

    engine_is_concurrent = engine.capabilities.concurrent
    values = [1, 2, 3]
    ref = length_later.remote(values)
    values.append(4)
    gate.open()
    assert miniray.get(ref) == 3


def test_changes_by_the_callee_are_not_seen(engine):
    @miniray.remote
    def grow(values):
        values.append(99)
        return values

    values = [1]
    assert miniray.get(grow.remote(values)) == [1, 99]
    assert values == [1]


def test_options_leave_the_original_alone(engine):
    two = three.options(num_returns=3)
    assert two is not three
    assert isinstance(three.remote(), miniray.ObjectRef)


def test_name_doc_and_plain_function_are_kept(engine):
    assert add.__name__ == "add"
    assert add.__doc__ == "Add up."
    assert add.__wrapped__(1, 2) == 3


def test_an_async_function_is_awaited(engine):
    @miniray.remote
    async def answer(x):
        import asyncio

        await asyncio.sleep(0)
        return x + 1

    assert miniray.get(answer.remote(41)) == 42


def test_a_task_runs_in_another_process(engine):
    needs(engine, "processes")
    assert miniray.get(pid.remote()) != os.getpid()


def test_remote_returns_before_the_task_is_done(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def blocked():
        gate.wait()
        return "done"

    ref = blocked.remote()
    assert miniray.wait([ref], timeout=0)[0] == []
    gate.open()
    assert miniray.get(ref) == "done"


def test_tasks_run_at_the_same_time(engine, tmp_path):
    needs(engine, "concurrent")
    gates = Gate(tmp_path, "a"), Gate(tmp_path, "b")

    @miniray.remote
    def meet(mine, other):
        gates[mine].open()
        gates[other].wait()
        return mine

    assert miniray.get([meet.remote(0, 1), meet.remote(1, 0)]) == [0, 1]


def test_short_tasks_do_not_wait_behind_a_long_one(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def waits():
        gate.wait()
        return "done"

    miniray.get([identity.remote(i) for i in range(200)])  # known to be short by now
    long = waits.remote()
    assert miniray.get(identity.remote(1)) == 1
    gate.open()
    assert miniray.get(long) == "done"


def test_tasks_do_not_wait_behind_one_that_was_short_before(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def sometimes_long(is_long):
        if is_long:
            gate.wait()
        return is_long

    miniray.get([sometimes_long.remote(False) for _ in range(200)])
    refs = [sometimes_long.remote(i == 0) for i in range(10)]
    assert miniray.get(refs[1:]) == [False] * 9
    gate.open()
    assert miniray.get(refs[0])
