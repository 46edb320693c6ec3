"""Any value made of what Python programs use arrives as it was sent, whatever its shape."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import miniray

# Ray takes milliseconds a call, so few examples; hypothesis starts with the simple ones anyway.
FEW = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclasses.dataclass(frozen=True)
class Node:
    label: str
    children: tuple


@miniray.remote
def identity(value):
    return value


@miniray.remote
class Echo:
    def echo(self, *args, **kwargs):
        return args, kwargs


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**63, max_value=2**70)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=50)
    | st.dates()
    | st.decimals(allow_nan=False)
    | st.uuids()
)
hashable = st.none() | st.booleans() | st.integers() | st.text(max_size=10) | st.binary(max_size=10)


def _containers(inner):
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
        | st.builds(Node, st.text(max_size=5), st.lists(inner, max_size=3).map(tuple))
    )


values = st.recursive(scalars, _containers, max_leaves=12)

arrays = st.builds(
    lambda shape, kind, order: np.arange(int(np.prod(shape))).reshape(shape).astype(kind, order),
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.sampled_from(["i1", "u2", "i4", "f4", "f8", "c8", "?", "S3"]),
    st.sampled_from(["C", "F"]),
)


def same(left, right):
    """Equal, and of the same types all the way down: 1, 1.0 and True are equal to Python."""
    assert type(left) is type(right)
    assert left == right
    assert repr(left) == repr(right) or isinstance(left, (set, frozenset, dict, list, tuple, Node))


@pytest.mark.slow_on_ray
def test_values_survive_put_and_get(engine):
    @FEW
    @given(values)
    def check(value):
        same(miniray.get(miniray.put(value)), value)

    check()


def test_values_survive_as_argument_and_result_of_a_task(engine):
    @FEW
    @given(values)
    def check(value):
        same(miniray.get(identity.remote(value)), value)

    check()


@pytest.mark.slow_on_ray
def test_arguments_of_a_method_arrive_in_place(engine):
    echo = Echo.remote()

    @FEW
    @given(
        st.lists(values, max_size=4),
        st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), values, max_size=3),
    )
    def check(args, kwargs):
        back_args, back_kwargs = miniray.get(echo.echo.remote(*args, **kwargs))
        same(back_args, tuple(args))
        same(back_kwargs, kwargs)

    check()


def test_refs_anywhere_in_a_value_stay_refs_to_the_same(engine):
    refs = [miniray.put(i) for i in range(3)]

    @FEW
    @given(st.recursive(st.sampled_from(range(3)), _containers, max_leaves=8))
    def check(shape):
        value = _with_refs(shape, refs)
        assert miniray.get(identity.remote([value]))[0] == value

    check()
    assert miniray.get(refs) == [0, 1, 2]


def _with_refs(shape, refs):
    """``shape`` with each number in a list, tuple or dict value replaced by a ref."""
    if isinstance(shape, int) and not isinstance(shape, bool):
        return refs[shape % 3]
    if isinstance(shape, (list, tuple)):
        return type(shape)(_with_refs(part, refs) for part in shape)
    if isinstance(shape, dict):
        return {key: _with_refs(part, refs) for key, part in shape.items()}
    return shape


def test_arrays_survive(engine):
    @FEW
    @given(st.lists(arrays, max_size=3))
    def check(batch):
        for sent, got in zip(batch, miniray.get(identity.remote(batch)), strict=True):
            assert got.dtype == sent.dtype
            assert got.shape == sent.shape
            assert np.array_equal(got, sent)

    check()
