"""State for checkpoints: complete, plain, and refused where it does not belong."""

import json
from collections import OrderedDict, namedtuple
from typing import NamedTuple

import numpy as np
import pytest

from miniray.ps import Strategy, create_parameter_server
from tests.ps.helpers import call, error_text, weights_of, workers

PLAIN = (dict, list, str, int, float, bool, type(None), np.ndarray)


def weights(v):
    return OrderedDict(w=(np.full(3, float(v)), [v]), x={"y": np.float32(v), "z": None})


def assert_plain(node):
    torch = pytest.importorskip("torch")
    assert type(node) in (*PLAIN, torch.Tensor), type(node)
    if isinstance(node, dict):
        assert all(isinstance(key, str) for key in node)
    for child in node.values() if isinstance(node, dict) else node if type(node) is list else ():
        assert_plain(child)


@pytest.mark.parametrize("name", ["momentum", "fedadam", "diloco", "weighted"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_going_on_from_a_state(engine, name, mode):
    def fresh():
        return workers(weights(1), weights(4))

    server = create_parameter_server(name, mode=mode)
    call(server, "set_weights", weights(0))
    call(server, "set_worker_weight", 1, 3)
    for _ in range(3):
        call(server, "sync_from_workers", fresh())
    state = call(server, "get_state")
    assert_plain(state)
    other = create_parameter_server(name, mode=mode)
    call(other, "set_state", state)
    results = []
    for each in (server, other):
        handles = fresh()
        report = call(each, "sync_from_workers", handles)
        results.append((weights_of(handles)[0], report["version"], report["change_norm"]))
    (one, *figures), (two, *other_figures) = results
    assert figures == other_figures == [5, figures[1]]
    assert type(two) is OrderedDict
    assert np.array_equal(one["w"][0], two["w"][0])
    assert one["w"][1] == two["w"][1]
    assert one["x"]["y"] == two["x"]["y"]
    assert isinstance(two["x"]["y"], np.float32)


def test_torch_tensors_stay_tensors(engine):
    torch = pytest.importorskip("torch")
    server = create_parameter_server("momentum")
    call(server, "set_weights", [torch.ones(3, dtype=torch.bfloat16)])
    other = create_parameter_server("momentum")
    call(other, "set_state", call(server, "get_state"))
    assert call(other, "get_weights")[0].dtype == torch.bfloat16


def test_an_empty_server(engine):
    server = create_parameter_server("momentum")
    state = call(server, "get_state")
    call(server, "set_state", state)
    assert call(server, "get_stats")["version"] == 0


SIZES = (3, 1, 1)  # of the entries of ``weights`` with numbers
INVALID = {
    "format": {"format": 99},
    "strategy": {"strategy": "ema"},
    "version": {"version": "new"},
    "no_buffers": {"buffers": {}},
    "buffer_length": {"buffers": {"momentum": [np.zeros(2)] * 3}},
    "buffer_dtype": {"buffers": {"momentum": [np.array(["a"] * n) for n in SIZES]}},
    "buffer_array": {"buffers": {"momentum": None}},
    "buffer_list": {"buffers": [np.zeros(2)]},
    "strategy_state": {"strategy_state": {"step": 3}},
    "strategy_list": {"strategy_state": 1},
    "worker_weight": {"worker_weights": [[0, -1]]},
    "worker_pairs": {"worker_weights": [0, 1]},
    "too_few_arrays": {"weights": [np.zeros(3)]},
    "too_many_arrays": {"weights": [np.zeros(3)] * 5},
    "text": {"weights": [np.array(["a"])] * 4},
    "structure": {"structure": {"kind": "dict"}},
}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_invalid_state_raises_and_changes_nothing(engine, mode, golden):
    server = create_parameter_server("momentum", mode=mode)
    call(server, "set_weights", weights(1))
    call(server, "sync_from_workers", workers(weights(3)))
    call(server, "set_worker_weight", 1, 5)
    before = call(server, "get_state")
    other = create_parameter_server("momentum", mode=mode)
    call(other, "set_weights", weights(8))
    state = call(other, "get_state")
    invalid = [{**state, **change} for change in INVALID.values()]
    invalid += [{k: v for k, v in state.items() if k != missing} for missing in state]
    texts = []
    for each in invalid:
        with pytest.raises(ValueError, match=r"\w") as caught:
            call(server, "set_state", each)
        texts.append(error_text(caught.value))
        assert_equal_states(call(server, "get_state"), before)
    golden("invalid_states.txt", "".join(texts))


def assert_equal_states(one, other):
    plain = [{k: v for k, v in s.items() if k not in ("weights", "buffers")} for s in (one, other)]
    assert plain[0] == plain[1]
    for name in ("momentum", "sums"):
        for a, b in zip(one["buffers"].get(name, ()), other["buffers"].get(name, ()), strict=True):
            assert np.array_equal(a, b)
    for a, b in zip(one["weights"], other["weights"], strict=True):
        assert np.array_equal(a, b)


class Picky(Strategy):
    """Counts syncs, and rejects a state after it took over a part of it."""

    name = "picky"

    def __init__(self):
        self.seen = []

    def combine(self, global_weights, worker_weights, weights):
        return self.mean(worker_weights, weights, self.out)

    def state_dict(self):
        return {"seen": list(self.seen), "rest": 1}

    def load_state_dict(self, state):
        self.seen[:] = state["seen"]
        if state["rest"] != 1:
            raise ValueError("the rest must be 1")


def test_strategy_that_rejects_its_state_is_unchanged(engine):
    server = create_parameter_server(Picky())
    call(server, "set_weights", weights(1))
    before = call(server, "get_state")
    wrong = {**before, "version": 9, "strategy_state": {"seen": [1, 2], "rest": 2}}
    with pytest.raises(ValueError, match="rest"):
        call(server, "set_state", {**wrong, "weights": [np.full(3, 9.0), 9.0, np.float32(9), None]})
    assert_equal_states(call(server, "get_state"), before)
    call(server, "set_state", {**before, "strategy_state": {"seen": [1, 2], "rest": 1}})
    assert call(server, "get_state")["strategy_state"]["seen"] == [1, 2]


class Pair(NamedTuple):
    w: np.ndarray
    b: float

    def total(self):
        return float(self.w.sum()) + self.b


def test_named_tuples_stay_named_tuples(engine):
    """In JSON the state has neither tuples nor types."""
    local = namedtuple("Local", ["u", "v"])
    server = create_parameter_server()
    call(server, "set_weights", {"a": Pair(np.ones(2), 3.0), "b": [local(np.float32(1), None)]})
    state = call(server, "get_state")
    assert_plain(state)
    state["structure"] = json.loads(json.dumps(state["structure"]))
    other = create_parameter_server()
    call(other, "set_state", state)
    got = call(other, "get_weights")
    assert (type(got["a"]).__name__, got["a"].w.tolist(), got["a"].b) == ("Pair", [1, 1], 3.0)
    assert got["a"].total() == 5
    assert (got["b"][0].u, got["b"][0].v, len(got["b"][0])) == (1.0, None, 2)
    handles = workers(got, got)
    call(other, "sync_from_workers", handles)
    assert weights_of(handles)[0]["a"].total() == 5


def test_tuple_ids_survive_json(engine):
    ids = [("node", 3), ("node", ("a", 1)), "b", 4]
    server = create_parameter_server("weighted")
    call(server, "set_weights", {("layer", 0): np.ones(2)})
    for i, worker in enumerate(ids):
        call(server, "set_worker_weight", worker, i)
    state = call(server, "get_state")
    for key in ("worker_weights", "structure"):
        state[key] = json.loads(json.dumps(state[key]))
    other = create_parameter_server("weighted")
    call(other, "set_state", state)
    assert call(other, "get_stats")["worker_weights"] == {w: i for i, w in enumerate(ids)}
    assert list(call(other, "get_weights")) == [("layer", 0)]
