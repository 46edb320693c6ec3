"""What is wrong with the arguments is said by the call, before anything is started."""

import pickle

import pytest

import miniray
from miniray.ps import ParameterServer, create_parameter_server

WRONG = [
    ({"strategy": "avg"}, ValueError, "unknown strategy 'avg'; there are average"),
    ({"strategy": 3}, ValueError, "unknown strategy 3"),
    ({"strategy": "momentum", "mometum": 0.9}, TypeError, "no option 'mometum'; it takes momentum"),
    (
        {"num_server": 2},
        TypeError,
        "no option 'num_server'; it takes none; did you mean 'num_servers'",
    ),
    ({"strategy": "momentum", "momentum": 2}, ValueError, "momentum must be"),
    ({"mode": "semi"}, ValueError, "mode must be one of 'sync', 'async'"),
    ({"compression": "zip"}, ValueError, "compression must be one of None, 'bf16', 'int8'"),
    ({"on_nonfinite": "ignore"}, ValueError, "on_nonfinite must be one of 'error', 'skip'"),
    ({"num_servers": 0}, ValueError, "num_servers must be an int >= 1"),
    ({"num_workers": 0}, ValueError, "num_workers"),
    ({"threads": 0}, ValueError, "threads"),
    ({"max_staleness": 1}, ValueError, 'need mode="async"'),
    ({"mode": "async", "max_staleness": -1}, ValueError, "max_staleness"),
    ({"mode": "async", "staleness_power": -1}, ValueError, "staleness_power"),
    ({"mode": "async", "num_servers": 2}, ValueError, 'needs mode="sync"'),
    ({"mode": "async", "strategy": "median"}, ValueError, "'median' compares workers"),
    ({"strategy": "krum", "num_workers": 4}, ValueError, "needs at least 5 workers, not 4"),
    ({"strategy": "trimmed_mean", "num_workers": 2}, ValueError, "leaves none of 2 workers"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
@pytest.mark.parametrize("make", [create_parameter_server, ParameterServer.remote])
def test_wrong_arguments(make, options, error, text):
    miniray.shutdown()
    with pytest.raises(error, match=text):
        make(**options)
    assert not miniray.is_initialized()  # not even the engine was started


def test_the_class_is_an_actor_class():
    assert isinstance(ParameterServer, miniray.ActorClass)
    copy = pickle.loads(pickle.dumps(ParameterServer))
    assert type(copy) is type(ParameterServer)
    with pytest.raises(ValueError, match="unknown strategy"):
        copy.options(name="x").remote("nothing")


def test_all_methods_exist_in_each_mode(engine):
    methods = [
        *("sync_from_workers", "push_weights", "pull_weights", "get_weights", "set_weights"),
        *("set_worker_weight", "get_stats", "get_state", "set_state"),
    ]
    for options in ({}, {"num_servers": 2}, {"mode": "async"}):
        server = create_parameter_server("weighted", **options)
        assert [m for m in methods if not hasattr(server, m)] == []
        stats = miniray.get(server.get_stats.remote())
        assert {"version", "num_syncs", "strategy"} <= set(stats)
