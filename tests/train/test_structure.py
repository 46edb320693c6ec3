"""Nested state to JSON and arrays and back: type for type, bit for bit."""

import collections
import contextlib
import datetime
import enum
import json
import math
import random
import tempfile
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniray.errors import CheckpointError
from miniray.train import CheckpointStore
from miniray.train.run.tensors import tensorfile
from miniray.train.run.tensors.encoding import Encoder, decode


def through(value, **options):
    """``value`` encoded, its JSON and its arrays written and read, and decoded."""
    encoder = Encoder(**options)
    text = json.dumps(encoder.encode(value, "g"), allow_nan=False)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        groups = {}
        for group, entries in encoder.groups.items():
            tensorfile.write(Path(folder) / group, entries, None)
            groups[group] = stack.enter_context(tensorfile.TensorFile(Path(folder) / group))
        return decode(json.loads(text), groups, allow_pickle=options.get("allow_pickle", False))


def identical(a, b):
    """The same types and the same bits, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            identical(k, m) and identical(v, w)
            for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float):
        return a.hex() == b.hex()
    if isinstance(a, complex):
        return identical((a.real, a.imag), (b.real, b.imag))
    return a == b


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters())
    | st.text(st.characters(categories=["Cs"]), max_size=3)
    | st.binary(max_size=600)
)
keys = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["$tensor", "$", "__metadata__", "a.b", "a"]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.binary(max_size=3),
)
numpy_types = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?"),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
)
arrays = hnp.arrays(numpy_types, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
TORCH_TYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(TORCH_TYPES))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    count = math.prod(shape) * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        data = bytes(b % 2 for b in data)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


leaves = scalars | arrays | tensors() | arrays.filter(lambda a: a.size).map(lambda a: a.flat[0])
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=300, deadline=None)
def test_any_state_comes_back_bit_for_bit(state):
    assert identical(through(state), state)
    assert identical(through(state, copy=True), state)


@given(st.dictionaries(keys, states, max_size=3))
@settings(max_examples=60, deadline=None)
def test_any_state_comes_back_from_disk(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("state")
    CheckpointStore(directory).save(0, state)
    assert identical(CheckpointStore(directory).load(), (0, state))


def test_sets_and_special_values():
    state = {"s": {1, "a"}, "f": frozenset({(1, 2)}), "b": bytearray(b"x" * 1000), "": None}
    assert through(state) == state
    assert type(through(state)["b"]) is bytearray
    assert through(10**6000) == 10**6000  # Python can't convert it to decimal
    assert math.isnan(through({"x": math.nan})["x"])


def test_random_number_generators_come_back():
    generator = np.random.default_rng(3)
    state = {
        "python": random.Random(5).getstate(),
        "numpy": np.random.RandomState(5).get_state(),
        "generator": generator.bit_generator.state,
        "torch": torch.Generator().manual_seed(5).get_state(),
    }
    back = through(state)
    assert identical(back, state)
    other = np.random.default_rng(4)
    other.bit_generator.state = back["generator"]
    assert other.random() == generator.random()


def test_an_optimizer_comes_back():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = through(state)
    other = torch.nn.Linear(3, 2)
    other.load_state_dict(back["model"])
    again = torch.optim.Adam(other.parameters(), lr=0.5)
    again.load_state_dict(back["optimizer"])
    assert identical(back["optimizer"], optimizer.state_dict())
    assert identical(again.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_an_array_that_occurs_twice_is_stored_once_and_comes_back_as_one(make):
    shared = make(1000)
    state = {"a": shared, "b": [shared, shared.reshape(1000)], "c": make(1000)}
    encoder = Encoder()
    encoder.encode(state, "g")
    assert len(encoder.groups["g"]) == 2
    back = through(state)
    assert back["a"] is back["b"][0] is back["b"][1]
    assert back["a"] is not back["c"]


def test_tied_weights_stay_tied_and_views_keep_their_values():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    back = through(dict(model.state_dict()))
    assert back["0.weight"] is back["1.weight"]
    base = torch.arange(6.0).reshape(2, 3)
    views = {"t": base.t(), "row": base[1], "conj": torch.complex(base, base).conj(), "base": base}
    back = through(views)
    for name, view in views.items():
        assert back[name].tolist() == view.tolist()
    both = torch.complex(base, base)
    back = through(
        {"plain": both, "conj": both.conj(), "negative": both.imag, "n": both.conj().imag}
    )
    assert back["conj"].tolist() == both.conj().tolist()
    assert back["plain"].tolist() == both.tolist()
    assert back["n"].tolist() == (-base).tolist()


def test_views_of_numpy_arrays_keep_their_values():
    base = np.arange(6.0).reshape(2, 3)
    views = {
        "t": base.T,
        "every": base[:, ::2],
        "back": base[::-1],
        "wide": np.broadcast_to(1.5, (2, 2)),
    }
    back = through(views)
    for name, view in views.items():
        np.testing.assert_array_equal(back[name], view)


def test_temporary_arrays_are_not_taken_for_one_another():
    class Fresh(list):
        """A new array at each look: the memory of one may be that of the next."""

        def __iter__(self):
            return (np.full(1000, float(i)) for i in range(20))

    encoder = Encoder()
    skeleton = [encoder.encode(array, "g") for array in Fresh()]
    entries = encoder.groups["g"]
    assert len({ref["$array"][1] for ref in skeleton}) == 20
    assert [e.value[0] for e in entries.values()] == [float(i) for i in range(20)]


def test_parameters_come_back_as_plain_tensors():
    back = through(torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


def test_a_copy_is_not_changed_with_the_original():
    state = {"n": np.zeros(2), "t": torch.zeros(2)}
    encoder = Encoder(copy=True)
    encoder.encode(state, "g")
    state["n"][:] = 1
    state["t"][:] = 1
    assert all(not entry.in_memory().any() for entry in encoder.groups["g"].values())


class Color(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "odd",
    [
        object(), open, Color.RED, Point(1, 2), collections.defaultdict(int),
        np.array([object()]), np.zeros(2, dtype=[("a", "f4")]), np.ma.array([1]),
        torch.ones(2).to_sparse(), torch.ones(2, device="meta"), datetime.date(2026, 1, 1),
        range(3),
    ],
    ids=lambda odd: type(odd).__name__,
)  # fmt: skip
def test_what_has_no_form_is_refused_with_the_way_to_it(odd):
    with pytest.raises(CheckpointError, match=r"\['workers'\]\[1\]\['loader'\].*allow_pickle"):
        through({"workers": [1, {"loader": odd}]})


def test_a_state_inside_itself_is_refused(raises):
    state = {"a": [1]}
    state["a"].append(state)
    with raises(CheckpointError) as caught:
        through(state)
    assert caught.value.entry == "state['a'][1]"


def test_a_state_too_deep_is_refused(raises):
    state = []
    for _ in range(5000):
        state = [state]
    with raises(CheckpointError):
        through(state)


def test_a_state_of_sixty_levels_comes_back_equal():
    state = 1
    for i in range(60):
        state = {i: (state,)} if i % 2 else [state]
    assert through(state) == state


def test_the_same_container_twice_is_no_cycle():
    inner = [1, 2]
    assert through({"a": inner, "b": inner}) == {"a": [1, 2], "b": [1, 2]}


def test_pickle_only_by_choice():
    date = datetime.date(2026, 1, 1)
    assert through({"d": date}, allow_pickle=True) == {"d": date}
    encoder = Encoder(allow_pickle=True)
    skeleton = encoder.encode({"d": date}, "g")
    with pytest.raises(CheckpointError, match="allow_pickle=True") as caught:
        decode(skeleton, {})
    assert caught.value.entry == "d"


def test_what_pickle_cannot_store_either_is_said_so():
    with pytest.raises(CheckpointError, match=r"state\['f'\].*<lambda>"):
        through({"f": lambda: 1}, allow_pickle=True)
