"""The server's methods, on both embedded engines."""

import subprocess
import sys

import numpy as np
import pytest

import miniray
from miniray.ps import ParameterServer, create_parameter_server
from tests.ps.helpers import Worker, call, error_text, weights_of, workers


def test_a_sync_gives_all_workers_the_mean(engine):
    server = ParameterServer.remote(strategy="average")
    handles = workers(
        *({"w": np.full((2, 3), v), "b": [np.array([v, 0.0])]} for v in (1.0, 3.0, 8.0))
    )
    report = call(server, "sync_from_workers", handles)
    for weights in weights_of(handles):
        assert np.array_equal(weights["w"], np.full((2, 3), 4.0))
        assert weights["b"][0].tolist() == [4, 0]
    assert report["synced"] is True
    assert (report["version"], report["num_workers"], report["skipped"]) == (1, 3, [])
    assert report["bytes"] == 2 * 3 * (6 + 2) * 8
    assert set(report["seconds"]) == {"collect", "combine", "distribute"}


def test_large_weights_of_many_pieces(engine):
    torch = pytest.importorskip("torch")
    make = [torch.Generator().manual_seed(i) for i in range(3)]
    weights = [[torch.randn(n, generator=g) for n in (300_001, 7, 1_200_000)] for g in make]
    handles = workers(*weights)
    server = ParameterServer.remote()
    call(server, "sync_from_workers", handles)
    for i, got in enumerate(weights_of(handles)[2]):
        want = (weights[0][i] + weights[1][i] + weights[2][i]) / 3
        assert got.dtype == torch.float32
        assert torch.equal(got, want)


def test_what_the_workers_get_stays_theirs(engine):
    """A worker may keep what it was given: the next sync must not change it."""
    server = ParameterServer.remote()
    handles = workers([np.zeros(200_000)], [np.ones(200_000)])
    call(server, "sync_from_workers", handles)
    kept = weights_of(handles)[0][0]
    for value in (2.0, 3.0):
        call(handles[1], "set_weights", [np.full(200_000, value)])
        call(server, "sync_from_workers", handles)
    assert (kept == 0.5).all()


def test_stats(engine):
    server = ParameterServer.remote(strategy="average")
    before = call(server, "get_stats")
    assert (before["version"], before["num_syncs"], before["strategy"]) == (0, 0, "average")
    assert (before["last_error"], before["last_change_norm"]) == (None, None)
    handles = workers([np.array([0.0, 0])], [np.array([6.0, 8])])
    call(server, "sync_from_workers", handles)  # mean (3, 4), both 5 away
    after = call(server, "get_stats")
    assert after["divergence"] == {"max": 5, "mean": 5}
    assert after["last_change_norm"] is None  # from nothing
    call(handles[0], "set_weights", [np.array([9.0, 12])])
    call(server, "sync_from_workers", handles)  # mean (6, 8): moved by (3, 4)
    after = call(server, "get_stats")
    assert after["last_change_norm"] == 5
    assert (after["version"], after["num_syncs"], after["failed_syncs"]) == (2, 2, 0)
    assert (after["bytes"], after["last_bytes"]) == (2 * 64, 64)
    for phase in ("collect", "combine", "distribute"):
        assert after["seconds"][phase] >= after["last_seconds"][phase] > 0


def test_worker_weights(engine, golden):
    server = create_parameter_server("weighted")
    handles = workers([np.array([0.0])], [np.array([8.0])], [np.array([100.0])])
    call(server, "set_worker_weight", 1, np.int64(3))
    call(server, "set_worker_weight", 2, np.float32(0))
    assert call(server, "sync_from_workers", handles)["num_workers"] == 3
    assert [w[0].tolist() for w in weights_of(handles)] == [[6], [6], [6]]
    with pytest.raises(ValueError, match="worker 1"):
        call(server, "set_worker_weight", 1, -1)
    for i in (0, 1):
        call(server, "set_worker_weight", i, 0)
    with pytest.raises(ValueError, match="workers") as caught:
        call(server, "sync_from_workers", handles)
    golden("no_worker_weight.txt", error_text(caught.value))


def test_worker_weights_need_a_strategy_that_uses_them(engine):
    server = create_parameter_server("average")
    with pytest.raises(ValueError, match="average"):
        call(server, "set_worker_weight", 0, 2)


def test_set_and_get(engine):
    server = ParameterServer.remote()
    with pytest.raises(ValueError, match="set_weights"):
        call(server, "get_weights")
    assert call(server, "set_weights", [np.arange(3.0)]) == 1
    assert call(server, "get_weights")[0].tolist() == [0, 1, 2]
    assert call(server, "pull_weights")[0].tolist() == [0, 1, 2]
    with pytest.raises(TypeError):
        call(server, "set_weights", "abc")


def test_push_and_pull(engine):
    server = ParameterServer.remote()
    call(server, "push_weights", "a", [np.array([9.0])])
    call(server, "push_weights", "a", [np.array([1.0])])
    call(server, "push_weights", "b", [np.array([3.0])])
    assert call(server, "pull_weights")[0].tolist() == [2]
    stats = call(server, "get_stats")
    assert (stats["version"], stats["num_pushes"], stats["num_syncs"]) == (1, 3, 1)
    assert call(server, "pull_weights")[0].tolist() == [2]
    assert call(server, "get_stats")["version"] == 1


def test_a_round_of_pushes(engine):
    server = create_parameter_server(num_workers=2)
    call(server, "set_weights", [np.array([7.0])])
    assert call(server, "push_weights", 0, [np.array([1.0])]) == 1
    assert call(server, "pull_weights")[0].tolist() == [7]  # the round is not complete
    assert call(server, "push_weights", 1, [np.array([3.0])]) == 2
    assert call(server, "pull_weights")[0].tolist() == [2]


def test_a_sync_that_nobody_waits_for(engine):
    server = ParameterServer.remote()
    handles = workers([np.array([1.0])], [np.array([3.0])])
    server.sync_from_workers.remote(handles)
    assert call(server, "get_stats")["num_syncs"] == 1
    assert weights_of(handles)[0][0].tolist() == [2]


def test_a_server_with_a_name(engine):
    server = ParameterServer.options(name=f"ps-{engine}").remote("median")
    assert call(miniray.get_actor(f"ps-{engine}"), "get_stats")["strategy"] == "median"
    del server


def test_wrong_workers_are_refused(engine, golden):
    server = ParameterServer.remote()

    @miniray.remote
    class Halfway:
        def get_weights(self):
            return [np.zeros(1)]

    texts = []
    for wrong, error in (
        ([], ValueError),
        ("abc", TypeError),
        ([Worker.remote([np.zeros(1)]), 3], TypeError),
    ):
        with pytest.raises(error) as caught:
            call(server, "sync_from_workers", wrong)
        texts.append(error_text(caught.value))
    golden("wrong_workers.txt", "".join(texts))
    with pytest.raises(TypeError, match="set_weights"):
        call(server, "sync_from_workers", [Halfway.remote()])
    assert "set_weights" in call(server, "get_stats")["last_error"]


def test_without_torch():
    """Where torch is not installed, a server of numpy weights works."""
    code = """
import sys
sys.modules["torch"] = None  # an import raises
import numpy as np, miniray, miniray.ps
miniray.init(backend="inline")

@miniray.remote
class Plain:
    def get_weights(self):
        return [np.ones(200_000), 1]
    def set_weights(self, weights):
        self.weights = weights

server = miniray.ps.create_parameter_server("momentum")
workers = [Plain.remote(), Plain.remote()]
print(miniray.get(server.sync_from_workers.remote(workers))["synced"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
