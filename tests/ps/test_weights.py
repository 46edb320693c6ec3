"""What weights may be, what is checked, and the rule for counters."""

from collections import OrderedDict, namedtuple

import numpy as np
import pytest

from miniray.errors import WeightsMismatchError
from miniray.ps import ParameterServer
from miniray.ps.blocks import Range, split
from miniray.ps.leaves import combine_counts
from miniray.ps.weights import Layout, mean
from tests.ps.helpers import call, error_text, weights_of, workers

Pair = namedtuple("Pair", "left right")


def averaged(engine, *weights):
    handles = workers(*weights)
    call(ParameterServer.remote(), "sync_from_workers", handles)
    return weights_of(handles)[0]


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        ("float16", 2.5),
        ("float32", 2.5),
        ("float64", 2.5),
        (">f4", 2.5),
        (">c8", 2.5),
        (">i2", 3),
        ("complex64", 2.5),
        ("complex128", 2.5),
        ("int8", 3),
        ("int64", 3),
        ("uint16", 3),
    ],
)
def test_numpy_types(engine, dtype, want):
    result = averaged(engine, [np.full(3, 2, dtype)], [np.full(3, 3, dtype)])[0]
    assert result.dtype == np.dtype(dtype)
    assert result.tolist() == [want] * 3


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_torch_types(engine, name):
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name)
    result = averaged(engine, [torch.full((3, 2), 2, dtype=dtype)], [torch.ones(3, 2, dtype=dtype)])
    assert result[0].dtype == dtype
    assert result[0].shape == (3, 2)
    assert (result[0] == 1.5).all()


def test_narrow_floats_are_added_in_wider_ones(engine):
    """In bfloat16 256 + 1 is 256; in float16 60,000 + 60,000 is infinite."""
    torch = pytest.importorskip("torch")
    narrow = [torch.tensor([v], dtype=torch.bfloat16) for v in (256, 1, 1, 2)]
    assert averaged(engine, *([n] for n in narrow))[0].item() == 65  # 260 / 4
    halves = [np.full(2, 60_000, np.float16)] * 2
    assert averaged(engine, *([h] for h in halves))[0].tolist() == [60_000, 60_000]


def test_structures(engine):
    def make(v):
        return OrderedDict(a=(np.array([v]), [v * 1.0]), b=Pair(np.float32(v), None), c={"n": v})

    result = averaged(engine, make(2), make(4))
    assert isinstance(result, OrderedDict)
    assert result["a"][0].tolist() == [3]
    assert result["a"][1] == [3.0]
    assert type(result["b"]).__name__ == "Pair"
    assert isinstance(result["b"].left, np.float32)
    assert (result["b"].left, result["b"].right) == (3, None)
    assert (result["c"]["n"], type(result["c"]["n"])) == (3, int)


def test_odd_arrays(engine):
    def make(v):
        fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3) * v)
        return [fortran, np.arange(10.0)[::3] * v, np.zeros((0, 4)), np.array(v * 1.0)]

    fortran, strided, empty, none = averaged(engine, make(1), make(3))
    assert fortran.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert strided.tolist() == [0, 6, 12, 18]
    assert empty.shape == (0, 4)
    assert none.shape == ()
    assert none == 2


def test_a_module_with_batch_norm(engine):
    torch = pytest.importorskip("torch")

    def make(steps):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
        for _ in range(steps):
            module(torch.randn(8, 4))
        return module.state_dict()

    result = averaged(engine, make(2), make(5))
    assert list(result) == list(make(0))
    assert result["1.num_batches_tracked"].item() == 4  # 3.5, halves up
    assert result["1.num_batches_tracked"].dtype == torch.int64
    torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).load_state_dict(result)


def test_parameters_and_tied_weights(engine):
    torch = pytest.importorskip("torch")

    def make(v):
        tied = torch.nn.Parameter(torch.full((2,), float(v)))
        return {"in": tied, "out": tied}

    result = averaged(engine, make(1), make(3))
    assert result["in"].tolist() == result["out"].tolist() == [2, 2]


# -- counters --------------------------------------------------------------------------------------


def test_counts_are_rounded_means():
    def combined(values, weights, dtype=np.int64):
        return combine_counts([np.array([v], dtype) for v in values], weights)[0]

    assert combined([1, 2], [1, 1]) == 2  # halves up
    assert combined([-1, -2], [1, 1]) == -1
    assert combined([10, 20], [3, 1]) == 13  # 12.5
    assert combined([7, 7, 7], [1, 2, 3]) == 7
    assert combined([2**62 + 1] * 2, [1, 1]) == 2**62 + 1  # beyond what a float64 holds
    assert combined([2**63 - 1, 2**63 - 3], [1, 1]) == 2**63 - 2
    assert combined([-(2**63), 2**63 - 1], [1, 1]) in (-1, 0)
    assert combined([2**64 - 1, 0], [1, 0], np.uint64) == 2**64 - 1
    assert combined([-128, 127], [1, 1], np.int8) == 0  # -0.5


def test_booleans_follow_the_majority(engine):
    flags = [np.array(v) for v in ([1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 1, 0])]
    result = averaged(engine, *({"mask": f.astype(bool), "on": bool(f[0])} for f in flags))
    assert result["mask"].tolist() == [True, True, False]  # 3, 2 and 1 of 4
    assert result["on"] is True


# -- mismatches ------------------------------------------------------------------------------------

MISMATCHES = {
    "shape": (
        {"layer1.weight": np.zeros((4, 4))},
        {"layer1.weight": np.zeros((3, 4))},
        "['layer1.weight']",
    ),
    "dtype": ([np.zeros(2)], [np.zeros(2, "f4")], "[0]"),
    "count": ([np.zeros(1)] * 2, [np.zeros(1)], None),
    "nested count": ({"a": [1.0, 2.0]}, {"a": [1.0]}, "['a']"),
    "keys": ({"a": 1.0}, {"b": 1.0}, None),
    "order": ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}, None),
    "missing": ({"a": 1.0, "b": 2.0}, {"a": 1.0}, None),
    "kind": ([1.0], (1.0,), None),
    "number": ([1.0], [1], "[0]"),
    "began whole": ([0], [np.float64(1)], "[0]"),
    "none": ([None], [1.0], "[0]"),
    "array": ([np.zeros(1)], [0.0], "[0]"),
}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1.0, np.float64(3), 2.0),
        (1.0, np.float32(3), 2.0),
        (1.0, np.array(3.0), 2.0),
        (np.float32(1), 3.0, np.float32(2)),
        (np.float64(1), np.array(3.0), np.float64(2)),
        (2, np.int32(4), 3),
        (True, np.bool_(True), True),
    ],
)
def test_a_number_is_a_number_whatever_arithmetic_made_of_it(engine, first, second, expected):
    """``b = 0.0`` is a float of numpy's after the first step of a worker."""
    assert repr(mean([[first], [second]])) == repr([expected])
    assert repr(averaged(engine, [first], [second])) == repr([expected])


@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_names_worker_and_entry(engine, kind, golden):
    first, second, entry = MISMATCHES[kind]
    server = ParameterServer.remote()
    handles = workers(first, second)
    with pytest.raises(WeightsMismatchError) as caught:
        call(server, "sync_from_workers", handles)
    assert (caught.value.worker, caught.value.entry) == (1, entry)
    golden(f"mismatch_{kind.replace(' ', '_')}.txt", error_text(caught.value))
    stats = call(server, "get_stats")
    assert (stats["version"], stats["num_syncs"], stats["failed_syncs"]) == (0, 0, 1)
    assert "worker 1" in stats["last_error"]


def test_torch_against_numpy(engine):
    torch = pytest.importorskip("torch")
    with pytest.raises(WeightsMismatchError) as caught:
        averaged(engine, [np.zeros(2)], [torch.zeros(2)])
    assert (caught.value.worker, caught.value.entry) == (1, "[0]")


def test_the_servers_own_weights_must_fit_too(engine):
    server = ParameterServer.remote()
    call(server, "set_weights", [np.zeros(3)])
    with pytest.raises(WeightsMismatchError) as caught:
        call(server, "sync_from_workers", workers([np.zeros(2)], [np.zeros(2)]))
    assert (caught.value.worker, caught.value.entry) == (0, "[0]")
    assert call(server, "get_weights")[0].shape == (3,)


UNUSABLE = {
    "text": ([np.zeros(2), "text"], TypeError),
    "object": ({"a": {"b": object()}}, TypeError),
    "text_array": ([np.array(["x"])], TypeError),
    "array": (np.zeros(3), TypeError),
    "empty": ([], ValueError),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_weights_that_cannot_be_combined_raise(engine, kind, golden):
    weights, error = UNUSABLE[kind]
    with pytest.raises(error) as caught:
        averaged(engine, weights, weights)
    golden(f"unusable_{kind}.txt", error_text(caught.value))


@pytest.mark.parametrize("kind", ["empty", "text", "array"])
def test_set_weights_names_the_entry_only(engine, kind, golden):
    """Callers know the owner of the weights, and put it before the message."""
    weights, kind_of_error = UNUSABLE[kind]
    server = ParameterServer.remote()
    with pytest.raises(kind_of_error) as caught:
        call(server, "set_weights", weights)
    golden(f"set_weights_{kind}.txt", error_text(caught.value.cause))


def test_sparse_tensors_raise(golden):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError) as caught:
        Layout([torch.eye(3).to_sparse()])
    golden("unusable_sparse.txt", error_text(caught.value))


def test_mean_of_a_list():
    assert mean([{"a": np.array([1.0]), "n": 3}, {"a": np.array([2.0]), "n": 4}]) == {
        "a": 1.5,
        "n": 4,
    }
    with pytest.raises(WeightsMismatchError) as caught:
        mean([[1.0], [2.0, 3.0]])
    assert caught.value.worker == 1


# -- cutting for several servers -------------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_splitting_keeps_every_number_once(parts):
    layout = Layout([np.zeros(n) for n in (1, 1000, 3, 50_000, 17)])
    ranges = [Range(i, 0, leaf.size) for i, leaf in enumerate(layout.leaves)]
    shares = split(ranges, layout.leaves, parts)
    seen = [(r.leaf, i) for share in shares for r in share for i in range(r.start, r.stop)]
    assert sorted(seen) == [(r.leaf, i) for r in ranges for i in range(r.stop)]
    sizes = [sum(r.stop - r.start for r in share) for share in shares]
    assert max(sizes) - min(sizes) <= 2


def test_complex_numbers_may_lie_apart():
    apart = np.arange(6, dtype=complex)[::2] * (1 + 1j)
    assert mean([[apart], [apart + 2]])[0].tolist() == [1, 3 + 2j, 5 + 4j]
