"""Objects: put, get, wait, and what a value looks like where it arrives."""

import concurrent.futures
import copy
import math

import numpy as np
import pytest

import miniray
from tests.conformance.helpers import Gate, needs


@miniray.remote
def identity(value):
    return value


@miniray.remote
class Cell:
    def ping(self):
        return "pong"


@miniray.remote
def fail():
    raise ValueError("no")


def test_put_and_get(engine):
    assert miniray.get(miniray.put({"a": [1, 2]})) == {"a": [1, 2]}


def test_get_of_a_list(engine):
    assert miniray.get([miniray.put(1), miniray.put(2)]) == [1, 2]


def test_get_of_nothing(engine):
    assert miniray.get([]) == []


def test_get_of_the_same_ref_twice_in_a_list(engine):
    ref = miniray.put("x")
    assert miniray.get([ref, ref]) == ["x", "x"]


def test_each_get_gives_an_object_of_its_own(engine):
    ref = miniray.put([1])
    miniray.get(ref).append(2)
    assert miniray.get(ref) == [1]


def test_put_takes_a_copy(engine):
    value = [1]
    ref = miniray.put(value)
    value.append(2)
    assert miniray.get(ref) == [1]


def test_put_of_a_ref_is_refused(engine):
    with pytest.raises(TypeError, match="ObjectRef"):
        miniray.put(miniray.put(1))


def test_get_of_something_else_is_refused(engine):
    with pytest.raises(TypeError, match=r"get\(\).*ObjectRef.*3"):
        miniray.get(3)
    with pytest.raises(TypeError, match="element 1"):
        miniray.get([miniray.put(1), 2])


def test_refs_are_hashable_and_comparable(engine):
    ref, other = miniray.put(1), miniray.put(1)
    assert ref == ref
    assert ref != other
    assert len({ref, other, ref}) == 2


def test_a_ref_has_a_printable_id(engine):
    ref = miniray.put(1)
    assert ref.hex() in repr(ref)
    assert bytes.fromhex(ref.hex()) == ref.binary()


def test_a_large_value(engine):
    blob = bytes(range(256)) * 8192  # 2 MB
    assert miniray.get(identity.remote(blob)) == blob


def test_many_objects_at_once(engine):
    refs = [miniray.put(i * i) for i in range(500)]
    assert miniray.get(refs) == [i * i for i in range(500)]


def test_a_value_that_contains_itself(engine):
    loop = [1]
    loop.append(loop)
    back = miniray.get(identity.remote(loop))
    assert back[0] == 1
    assert back[1] is back


def test_functions_and_classes_are_values(engine):
    offset = 2

    class Point:
        def __init__(self, x):
            self.x = x

    function, point = miniray.get(miniray.put((lambda x: x + offset, Point(3))))
    assert function(point.x) == 5


def test_refs_nested_in_a_put_stay_refs(engine):
    inner = miniray.put("inner")
    outer = miniray.get(miniray.put({"deep": [inner]}))
    assert isinstance(outer["deep"][0], miniray.ObjectRef)
    assert miniray.get(outer["deep"][0]) == "inner"


def test_an_object_lives_as_long_as_a_ref_inside_another(engine):
    outer = miniray.put([miniray.put("kept")])  # the inner ref has no other holder
    assert miniray.get(miniray.get(outer)[0]) == "kept"


def test_a_returned_ref_is_not_resolved(engine):
    @miniray.remote
    def make():
        return miniray.put("made")

    ref = miniray.get(make.remote())
    assert isinstance(ref, miniray.ObjectRef)
    assert miniray.get(ref) == "made"


def test_wait_with_everything_ready(engine):
    refs = [miniray.put(i) for i in range(3)]
    ready, rest = miniray.wait(refs, num_returns=3)
    assert ready == refs
    assert rest == []


def test_wait_gives_no_more_than_asked_for(engine):
    refs = [miniray.put(i) for i in range(4)]
    ready, rest = miniray.wait(refs, num_returns=2, fetch_local=False)
    assert len(ready) == 2
    assert sorted(r.hex() for r in ready + rest) == sorted(r.hex() for r in refs)


def test_wait_counts_a_failed_call_as_ready(engine):
    ref = fail.remote()
    assert miniray.wait([ref], timeout=30) == ([ref], [])


def test_wait_returns_what_is_ready_after_the_timeout(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def blocked():
        gate.wait()

    slow, quick = blocked.remote(), miniray.put(1)
    assert miniray.wait([slow, quick], num_returns=2, timeout=0.1) == ([quick], [slow])
    gate.open()
    assert miniray.wait([slow, quick], num_returns=2) == ([slow, quick], [])


@pytest.mark.slow_on_ray
def test_wait_returns_as_soon_as_enough_are_ready(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def blocked():
        gate.wait()

    slow, quick = blocked.remote(), identity.remote(1)
    assert miniray.wait([slow, quick], num_returns=1) == ([quick], [slow])
    gate.open()
    miniray.get(slow)


def test_wait_of_nothing(engine):
    assert miniray.wait([]) == ([], [])


def test_wait_refuses_what_makes_no_sense(engine):
    ref = miniray.put(1)
    with pytest.raises(ValueError, match="twice"):
        miniray.wait([ref, ref])
    with pytest.raises(ValueError, match="num_returns"):
        miniray.wait([ref], num_returns=2)
    with pytest.raises(TypeError, match="list"):
        miniray.wait(ref)


def test_get_with_a_timeout_of_something_ready(engine):
    assert miniray.get(miniray.put(1), timeout=0) == 1


def test_get_timeout_is_a_timeout_error_and_harmless(engine, tmp_path):
    needs(engine, "concurrent")
    gate = Gate(tmp_path)

    @miniray.remote
    def blocked():
        gate.wait()
        return "late"

    ref = blocked.remote()
    with pytest.raises(TimeoutError) as caught:
        miniray.get(ref, timeout=0.05)
    assert isinstance(caught.value, miniray.errors.GetTimeoutError)
    gate.open()
    assert miniray.get(ref) == "late"


@pytest.mark.parametrize("timeout", ["5", float("nan"), True, [1]], ids=repr)
def test_a_time_limit_is_a_number(engine, timeout):
    ref = miniray.put(1)
    with pytest.raises(ValueError, match="timeout"):
        miniray.get(ref, timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        miniray.wait([ref], timeout=timeout)


@pytest.mark.parametrize("timeout", [math.inf, 1e9, np.float32(60)], ids=repr)
def test_any_time_limit_in_any_thread(engine, timeout):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for call in (identity, identity):  # the second is known to be short
            assert pool.submit(miniray.get, call.remote(1), timeout=timeout).result(30) == 1


def test_a_copy_of_a_ref_or_handle_is_the_same(engine):
    ref, cell = miniray.put([1]), Cell.remote()
    for duplicate in (copy.copy, copy.deepcopy):
        assert duplicate({"ref": ref, "handle": cell}) == {"ref": ref, "handle": cell}
    assert miniray.get(copy.deepcopy(cell).ping.remote()) == "pong"


def test_threads_may_get_at_once(engine):
    from concurrent.futures import ThreadPoolExecutor

    refs = [identity.remote(i) for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(miniray.get, refs)) == list(range(20))
