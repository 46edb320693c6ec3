"""Arrays, tensors and tables: their values, who may write to them, and whether they are copied."""

import dataclasses
from collections import namedtuple

import numpy as np
import pytest

import miniray
from tests.conformance.helpers import needs

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Batch:
    inputs: np.ndarray
    names: list


@miniray.remote
def identity(value):
    return value


@miniray.remote
def write(array):
    array[0] = 99
    return array


@miniray.remote
def ones(n):
    return np.ones(n)


@miniray.remote
class Holder:
    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value

    def first(self):
        return float(self.value.reshape(-1)[0])


ARRAYS = {
    "small": np.arange(10),
    "large": np.arange(300_000, dtype=np.float64),
    "fortran order": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "not contiguous": np.arange(20)[::2],
    "empty": np.zeros((0, 3)),
    "no dimensions": np.array(3.5),
    "booleans": np.array([True, False]),
    "half": np.array([1.5, 2.5], dtype=np.float16),
    "complex": np.array([1 + 2j]),
    "big endian": np.array([1, 2], dtype=">i4"),
    "dates": np.array(["2026-01-02"], dtype="datetime64[D]"),
    "text": np.array(["a", "bcd"]),
    "records": np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_numpy_arrays_arrive_as_they_were(engine, kind):
    array = ARRAYS[kind]
    back = miniray.get(identity.remote(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert np.array_equal(back, array)


def test_an_array_of_objects(engine):
    back = miniray.get(identity.remote(np.array([1, "two", None], dtype=object)))
    assert back.tolist() == [1, "two", None]


@pytest.mark.parametrize("n", [10, 300_000], ids=["small", "large"])
def test_a_got_array_is_read_only(engine, n):
    array = miniray.get(miniray.put(np.zeros(n)))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


@pytest.mark.parametrize("n", [10, 300_000], ids=["small", "large"])
def test_a_returned_array_is_read_only(engine, n):
    array = miniray.get(ones.remote(n))
    assert not array.flags.writeable
    assert array.sum() == n


@pytest.mark.parametrize("n", [10, 300_000], ids=["small", "large"])
def test_an_array_argument_is_read_only(engine, n):
    with pytest.raises(ValueError, match="read-only"):
        miniray.get(write.remote(np.zeros(n)))


def test_the_callers_array_stays_writable_and_its_own(engine):
    array = np.zeros(300_000)
    holder = Holder.remote(array)
    assert miniray.get(holder.first.remote()) == 0
    array[0] = 7
    assert miniray.get(holder.first.remote()) == 0


@pytest.mark.slow_on_ray
def test_an_actors_own_array_stays_writable(engine):
    @miniray.remote
    class Accumulator:
        def __init__(self):
            self.total = np.zeros(50_000)

        def add(self, delta):
            self.total += delta
            return self.total

    actor = Accumulator.remote()
    first = miniray.get(actor.add.remote(np.ones(50_000)))
    second = miniray.get(actor.add.remote(np.ones(50_000)))
    assert (first[0], second[-1]) == (1, 2)


def test_a_large_array_is_not_copied_at_the_receiver(engine):
    needs(engine, "zero_copy")
    array = miniray.get(miniray.put(np.zeros(1_000_000)))
    assert not array.flags.owndata


def test_an_array_outlives_its_ref(engine):
    array = miniray.get(miniray.put(np.arange(200_000)))
    churn = [miniray.put(np.full(200_000, -1)) for _ in range(10)]
    assert array[-1] == 199_999
    assert int(array.sum()) == 199_999 * 200_000 // 2
    assert len(churn) == 10


def test_arrays_inside_structures(engine):
    batch = Batch(np.arange(60_000), ["x"])
    value = {"batch": batch, "pair": Pair(np.ones(3), (np.zeros(2),)), "n": 1}
    back = miniray.get(identity.remote(value))
    assert np.array_equal(back["batch"].inputs, batch.inputs)
    assert back["batch"].names == ["x"]
    assert type(back["pair"]).__name__ == "Pair"
    assert back["pair"].left.tolist() == [1, 1, 1]
    assert back["pair"].right[0].tolist() == [0, 0]


def test_one_array_twice_in_a_value_is_one_array(engine):
    array = np.arange(5)
    first, second = miniray.get(miniray.put((array, array)))
    assert first is second


# -- torch -----------------------------------------------------------------------------------------


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("n", [10, 300_000], ids=["small", "large"])
def test_a_tensor_may_be_written_to_by_its_receiver_alone(engine, n):
    torch = pytest.importorskip("torch")
    ref = miniray.put(torch.zeros(n))
    mine = miniray.get(ref)
    mine[0] = 5
    assert mine[0] == 5
    assert miniray.get(ref)[0] == 0
    assert miniray.get(write.remote(ref))[0] == 99
    assert miniray.get(ref)[0] == 0


@pytest.mark.slow_on_ray
def test_a_tensor_returned_by_an_actor_is_not_the_actors(engine):
    torch = pytest.importorskip("torch")
    holder = Holder.remote(torch.zeros(100_000))
    mine = miniray.get(holder.get.remote())
    mine.fill_(3)
    assert miniray.get(holder.first.remote()) == 0


def test_tensor_types_and_shapes(engine):
    torch = pytest.importorskip("torch")
    tensors = [
        torch.arange(6).reshape(2, 3).t(),
        torch.arange(6.0)[::2],
        torch.arange(60_000.0)[1::2],
        torch.ones(1).expand(3),
        torch.tensor(2.5),
        torch.zeros(0, 4),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor([1 + 1j]),
        torch.tensor([True]),
    ]
    for tensor, back in zip(tensors, miniray.get(identity.remote(tensors)), strict=True):
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert torch.equal(back, tensor)


def test_parameters_keep_what_they_are(engine):
    torch = pytest.importorskip("torch")
    parameter, leaf = miniray.get(
        identity.remote([torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)])
    )
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.requires_grad
    assert leaf.requires_grad


def test_a_module_with_its_weights(engine):
    torch = pytest.importorskip("torch")
    layer = torch.nn.Linear(3, 2)
    back = miniray.get(identity.remote(layer))
    x = torch.ones(1, 3)
    assert torch.equal(back(x), layer(x))
    back.weight.data.fill_(0)
    assert not torch.equal(back.weight, layer.weight)


# -- pyarrow ---------------------------------------------------------------------------------------


@pytest.mark.slow_on_ray
def test_an_arrow_table(engine):
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"id": list(range(50_000)), "text": [str(i) for i in range(50_000)]})
    back = miniray.get(identity.remote(table))
    assert back.equals(table)
