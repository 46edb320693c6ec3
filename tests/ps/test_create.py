"""What is wrong with the arguments is said by the call, before anything is started."""

import pickle

import pytest

import miniray
from miniray.ps import ParameterServer, create_parameter_server
from tests.ps.helpers import error_text

WRONG = [
    ({"strategy": "avg"}, ValueError),
    ({"strategy": 3}, ValueError),
    ({"strategy": "momentum", "mometum": 0.9}, TypeError),
    ({"num_worker": 2}, TypeError),
    ({"strategy": "momentum", "momentum": 2}, ValueError),
    ({"mode": "semi"}, ValueError),
    ({"on_nonfinite": "ignore"}, ValueError),
    ({"num_workers": 0}, ValueError),
    ({"threads": 0}, ValueError),
    ({"max_staleness": 1}, ValueError),
    ({"mode": "async", "max_staleness": -1}, ValueError),
    ({"mode": "async", "staleness_power": -1}, ValueError),
    ({"mode": "async", "strategy": "median"}, ValueError),
    ({"strategy": "krum", "num_workers": 4}, ValueError),
    ({"strategy": "trimmed_mean", "num_workers": 2}, ValueError),
]


@pytest.mark.parametrize("make", [create_parameter_server, ParameterServer.remote])
def test_wrong_arguments_raise_before_anything_starts(make, golden):
    miniray.shutdown()
    texts = []
    for options, kind in WRONG:
        with pytest.raises(kind) as caught:
            make(**options)
        texts.append(f"{options}\n    {error_text(caught.value)}")
        assert not miniray.is_initialized()  # not even the engine was started
    golden("create_arguments.txt", "".join(texts))


def test_the_class_is_an_actor_class():
    assert isinstance(ParameterServer, miniray.ActorClass)
    copy = pickle.loads(pickle.dumps(ParameterServer))
    assert type(copy) is type(ParameterServer)
    with pytest.raises(ValueError, match="nothing"):
        copy.options(name="x").remote("nothing")


def test_all_methods_exist_in_each_mode(engine):
    methods = [
        *("sync_from_workers", "push_weights", "pull_weights", "get_weights", "set_weights"),
        *("set_worker_weight", "get_stats", "get_state", "set_state"),
    ]
    for options in ({}, {"mode": "async"}):
        server = create_parameter_server("weighted", **options)
        assert [m for m in methods if not hasattr(server, m)] == []
        stats = miniray.get(server.get_stats.remote())
        assert {"version", "num_syncs", "strategy"} <= set(stats)
