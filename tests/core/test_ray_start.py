"""Arguments for Ray, the choice of a cluster, and the detection of lost nodes, without Ray."""

import socket
import threading

import pytest

from miniray import limits
from miniray.core.engine import InitConfig


@pytest.fixture(scope="module", autouse=True)
def _import_ray():
    """Import Ray here, because test processes that collect this file may not run it."""
    global liveness, ray_engine
    pytest.importorskip("ray")
    from miniray.core import ray as ray_engine
    from miniray.core.ray import liveness


@pytest.mark.parametrize(
    ("config", "cpus"),
    [({}, 3), ({"num_workers": 2}, 3), ({"num_workers": 8}, 8), ({"num_cpus": 1.0}, 1)],
)
def test_ray_has_the_cores_of_this_process(monkeypatch, config, cpus):
    monkeypatch.setattr(limits, "cpu_count", lambda: 3)
    assert ray_engine._init_arguments(InitConfig(**config), None)["num_cpus"] == cpus


@pytest.mark.parametrize(
    ("limit", "asked", "size"),
    [
        (None, None, None),
        (1_000_000_000, None, 300_000_000),
        (100_000_000, None, 75 << 20),  # the least that Ray accepts
        (1_000_000_000, 400_000_000, 400_000_000),
    ],
)
def test_rays_object_store_respects_the_memory_limit(monkeypatch, limit, asked, size):
    monkeypatch.setattr(limits, "memory_limit", lambda: limit)
    arguments = ray_engine._init_arguments(InitConfig(object_store_memory=asked), None)
    assert arguments["object_store_memory"] == size


@pytest.mark.parametrize(
    ("config", "environment", "running", "address"),
    [
        ({}, None, None, None),
        ({}, None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ({"num_workers": 4}, None, "10.0.0.1:6379", "10.0.0.1:6379"),
        ({"num_cpus": 4.0}, None, "10.0.0.1:6379", None),
        ({"object_store_memory": 10**8}, "", "10.0.0.1:6379", None),
        ({}, "10.0.0.2:6379", "10.0.0.1:6379", "10.0.0.2:6379"),
        ({}, "auto", "10.0.0.1:6379", "10.0.0.1:6379"),
        ({"address": "auto"}, "10.0.0.2:6379", None, "auto"),
        ({"address": "ray://head:10001"}, None, "10.0.0.1:6379", "ray://head:10001"),
    ],
)
def test_which_cluster_is_joined(config, environment, running, address):
    chosen = ray_engine.choose_address(InitConfig(**config), environment, lambda: running)
    assert chosen == address


@pytest.mark.parametrize("environment", [None, "10.0.0.2:6379"])
def test_a_running_cluster_has_a_size_already(environment):
    config = InitConfig(address=None if environment else "auto", num_cpus=4.0)
    with pytest.raises(ValueError, match="num_cpus"):
        ray_engine.choose_address(config, environment, lambda: None)


def test_a_cluster_that_has_ended_is_not_joined(tmp_path, monkeypatch):
    """Its address stays in a file after a crash."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_engine.find_cluster() is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert ray_engine.find_cluster() == address
    assert ray_engine.find_cluster() is None


# -- nodes that are gone ---------------------------------------------------------------------------


def node(name, port=1, *, alive=True):
    return {
        "NodeID": name,
        "Alive": alive,
        "NodeManagerAddress": "127.0.0.1",
        "NodeManagerPort": port,
    }


@pytest.mark.parametrize(
    ("views", "limit", "lost", "looks"),
    [
        pytest.param([[node("a"), node("b")]], 60, set(), 1, id="all-answer"),
        pytest.param([[node("a"), node("b", 0, alive=False)]], 60, {"b"}, 1, id="known"),
        pytest.param(
            [
                [node("a"), node("b", 0)],
                [node("a"), node("b", 0)],
                [node("a"), node("b", 0, alive=False)],
            ],
            60,
            {"b"},
            3,
            id="noticed-later",
        ),
        pytest.param([[node("a"), node("b", 0)]], 0, {"b"}, 1, id="never-noticed"),
        pytest.param([[node("a", 0)], [node("a", 1)]], 60, set(), 2, id="back-again"),
    ],
)
def test_lost_nodes_are_waited_for_until_ray_knows_them(views, limit, lost, looks):
    left = list(views)
    found = liveness.wait_for_lost_nodes(
        lambda: left.pop(0), lambda host, port: port != 0, limit=limit, pause=0
    )
    assert found == lost
    assert len(views) - len(left) == looks


def test_a_head_that_stops_listening_is_lost():
    lost = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        watch = liveness.HeadWatch(address, lost.set, timeout=0.1, pause=0.01)
        for _ in range(3):  # it is asked again and again
            server.accept()[0].close()
        assert not lost.is_set()
    assert lost.wait(30)
    watch.close()


def test_a_watch_that_is_closed_reports_nothing():
    lost = threading.Event()
    watch = liveness.HeadWatch("127.0.0.1:1", lost.set, timeout=60, pause=0.01)
    watch.close()
    watch.thread.join(30)
    assert not lost.is_set()


@pytest.mark.parametrize(("variable", "seconds"), [(None, 30.0), ("20", 10.0)])
def test_the_head_is_lost_before_ray_ends_the_process(monkeypatch, variable, seconds):
    monkeypatch.delenv("RAY_gcs_rpc_server_reconnect_timeout_s", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", variable)
    assert liveness.head_timeout() == seconds
