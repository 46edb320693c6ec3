"""State for checkpoints: complete, plain, and refused where it does not belong."""

from collections import OrderedDict

import numpy as np
import pytest

from miniray.ps import create_parameter_server
from tests.ps.helpers import call, weights_of, workers

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


def test_what_is_not_its_state_is_refused(engine):
    server = create_parameter_server("momentum")
    call(server, "set_weights", weights(1))
    state = call(server, "get_state")
    for change, text in (
        ({"format": 99}, "not the state of a parameter server"),
        ({"strategy": "ema"}, "the state is of strategy 'ema', this server has 'momentum'"),
        ({"buffers": {}}, r"the state has buffers \[\], strategy 'momentum' has \['momentum'\]"),
        ({"buffers": {"momentum": [np.zeros(2)]}}, "does not fit its weights"),
    ):
        with pytest.raises(ValueError, match=text):
            call(server, "set_state", {**state, **change})
    assert call(server, "get_weights")["w"][0].tolist() == [1, 1, 1]
