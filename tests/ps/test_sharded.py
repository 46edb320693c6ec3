"""Several servers give what one gives."""

import numpy as np
import pytest

from miniray.ps import create_parameter_server
from tests.ps.helpers import call, weights_of, workers


def weights(seed):
    random = np.random.default_rng(seed)
    big = random.normal(size=(300, 1000)).astype(np.float32)
    return {"big": big, "small": random.normal(size=5), "n": seed, "s": float(seed)}


@pytest.mark.parametrize("name", ["average", "momentum", "fedadam", "median", "krum"])
@pytest.mark.parametrize("servers", [2, 5])
def test_the_same_result_and_state(engine, name, servers):
    results = []
    for options in ({}, {"num_servers": servers}):
        server = create_parameter_server(name, **options)
        handles = workers(*map(weights, range(5)))
        call(server, "set_weights", weights(9))
        reports = [call(server, "sync_from_workers", handles) for _ in range(2)]
        results.append((weights_of(handles)[3], call(server, "get_state"), reports))
    (one, state, reports), (many, sharded_state, sharded_reports) = results
    for key in one:
        assert np.array_equal(one[key], many[key]), key
    assert set(state["buffers"]) == set(sharded_state["buffers"])
    for buffer, arrays in state["buffers"].items():
        for a, b in zip(arrays, sharded_state["buffers"][buffer], strict=True):
            assert np.array_equal(a, b)
    for a, b in zip(reports, sharded_reports, strict=True):
        assert a["change_norm"] == pytest.approx(b["change_norm"], rel=1e-6)
        assert a["divergence"] == pytest.approx(b["divergence"], rel=1e-4)
    assert call(server, "get_stats")["num_servers"] == servers


def test_bfloat16_cut_in_parts(engine):
    torch = pytest.importorskip("torch")
    handles = workers(*([torch.full((1001,), v, dtype=torch.bfloat16)] for v in (1.0, 2.0)))
    server = create_parameter_server(num_servers=3)
    call(server, "sync_from_workers", handles)
    call(server, "sync_from_workers", handles)
    result = weights_of(handles)[0][0]
    assert result.dtype == torch.bfloat16
    assert (result == 1.5).all()


def test_state_moves_between_numbers_of_servers(engine):
    handles = workers(*map(weights, range(3)))
    first = create_parameter_server("momentum", num_servers=3)
    call(first, "set_weights", weights(9))
    call(first, "sync_from_workers", handles)
    second = create_parameter_server("momentum")
    call(second, "set_state", call(first, "get_state"))
    third = create_parameter_server("momentum", num_servers=2)
    call(third, "set_state", call(second, "get_state"))
    outcomes = []
    for server in (first, second, third):
        fresh = workers(*map(weights, range(3)))
        call(server, "sync_from_workers", fresh)
        outcomes.append(weights_of(fresh)[0]["big"])
    assert np.array_equal(outcomes[0], outcomes[1])
    assert np.array_equal(outcomes[0], outcomes[2])


def test_pushes(engine):
    server = create_parameter_server(num_servers=2, num_workers=2)
    call(server, "push_weights", 0, [np.zeros(10)])
    call(server, "push_weights", 1, [np.full(10, 4.0)])
    assert call(server, "pull_weights")[0].tolist() == [2] * 10
