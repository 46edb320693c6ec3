"""Workers that raise, die, hang or have NaN: named, and the server stays as it was."""

import socket

import numpy as np
import pytest

import miniray
from miniray.errors import (
    ActorDiedError,
    NonFiniteWeightsError,
    SyncError,
    TaskError,
    WorkerLostError,
)
from miniray.ps import create_parameter_server
from miniray.ps.collect import failure
from tests.ps.helpers import call, error_text, weights_of, workers

NAN, INF = float("nan"), float("inf")


def prepared(strategy="momentum", **options):
    """A server after one sync, with its state, and three workers at 1, 2 and 3."""
    server = create_parameter_server(strategy, **options)
    handles = workers(*([np.full(4, v)] for v in (1.0, 2.0, 3.0)))
    call(server, "set_weights", [np.zeros(4)])
    call(server, "sync_from_workers", handles)
    return server, handles


def unchanged(server, handles, error):
    """Sync, expect ``error``, and check that the server is unchanged. Return the error."""
    before = call(server, "get_state")
    syncs = call(server, "get_stats")["num_syncs"]
    with pytest.raises(error) as caught:
        call(server, "sync_from_workers", handles)
    after = call(server, "get_state")
    assert after["version"] == before["version"]
    assert np.array_equal(after["weights"][0], before["weights"][0])
    for name, arrays in before["buffers"].items():
        assert np.array_equal(after["buffers"][name][0], arrays[0])
    stats = call(server, "get_stats")
    assert (stats["num_syncs"], stats["failed_syncs"]) == (syncs, 1)
    assert "worker" in stats["last_error"]
    return caught.value


@pytest.mark.parametrize("method", ["get_weights", "set_weights"])
def test_an_exception_in_a_worker(engine, method):
    server, handles = prepared()
    call(handles[1], "fail_in", method)
    error = unchanged(server, handles, SyncError)
    assert not isinstance(error, ActorDiedError)
    assert (error.workers, error.worker) == ((1,), 1)
    assert error.cause.pid == call(handles[1], "pid")
    assert error.phase == {"get_weights": "collect", "set_weights": "distribute"}[method]
    assert "does not work" in str(error)  # the worker's own traceback
    call(handles[1], "fail_in", "nothing")
    assert call(server, "sync_from_workers", handles)["synced"]
    assert call(server, "get_stats")["last_error"] is None


@pytest.mark.parametrize("method", ["get_weights", "set_weights"])
def test_a_worker_that_dies(local, method):
    server, handles = prepared()
    pids = [call(handle, "pid") for handle in handles]
    call(handles[2], "fail_in", method, "die")
    error = unchanged(server, handles, SyncError)
    assert error.workers == (2,)
    assert isinstance(error, WorkerLostError)
    assert (error.worker, error.signal, error.exit_code) == (2, "SIGKILL", None)
    assert (error.host, error.in_init, error.cause.pid) == (socket.gethostname(), False, pids[2])
    assert call(server, "sync_from_workers", handles[:2])["synced"]


def test_a_worker_that_died_before(local):
    server, handles = prepared()
    miniray.kill(handles[0])
    assert unchanged(server, handles, ActorDiedError).workers == (0,)


def test_death_is_noticed_although_another_worker_is_slow(local):
    server, handles = prepared()
    call(handles[0], "fail_in", "get_weights", "50")
    call(handles[1], "fail_in", "get_weights", "die")
    with pytest.raises(SyncError) as caught:
        miniray.get(server.sync_from_workers.remote(handles), timeout=20)
    assert caught.value.workers == (1,)


def test_two_workers_that_fail_are_both_named(engine):
    server, handles = prepared()
    for i in (0, 2):
        call(handles[i], "fail_in", "set_weights")
    error = unchanged(server, handles, SyncError)
    assert error.workers == (0, 2)
    assert error.phase == "distribute"


def test_sync_error_lists_how_each_worker_died(golden):
    text = "Worker (pid 7) was killed by SIGKILL\nIts last output:\n    half way"
    death = ActorDiedError(text, pid=7, signal="SIGKILL", exit_code=None, host="node-1")
    error = failure({0: ValueError("bad"), 2: death}, "get_weights", "collect")
    assert isinstance(error, WorkerLostError)
    assert (error.workers, error.phase) == ((0, 2), "collect")
    assert (error.worker, error.pid, error.signal, error.host) == (2, 7, "SIGKILL", "node-1")
    golden("workers_lost.txt", error_text(error))


def test_worker_that_raises_another_actors_death_is_not_lost():
    """The worker is alive, and the exit code isn't that of its process."""
    death = ActorDiedError("the actor exited", pid=8, exit_code=3)
    raised = TaskError.capture(death, "Worker.get_weights", "Worker", 7).as_cause_type()
    error = failure({1: raised}, "get_weights", "collect")
    assert not isinstance(error, WorkerLostError)
    assert (error.worker, error.pid, error.exit_code) == (1, 7, None)


@pytest.mark.parametrize("strategy", ["average", "momentum", "median", "trimmed_mean"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_weights_that_are_not_finite(engine, strategy, bad):
    server, handles = prepared(strategy)
    call(handles[1], "set_weights", [np.array([1, 2, bad, 4])])
    error = unchanged(server, handles, NonFiniteWeightsError)
    assert (error.workers, error.entry) == ((1,), "[0]")


@pytest.mark.parametrize("strategy", ["average", "median"])
def test_skipping_a_worker(engine, strategy):
    server, handles = prepared(strategy, on_nonfinite="skip")
    for i, value in enumerate((1.0, NAN, 5.0)):
        call(handles[i], "set_weights", [np.full(4, value)])
    report = call(server, "sync_from_workers", handles)
    assert (report["skipped"], report["num_workers"]) == ([1], 2)
    assert [w[0].tolist() for w in weights_of(handles)] == [[3] * 4] * 3  # it, too, gets them
    assert call(server, "get_stats")["skipped"] == {1: 1}
    for handle in handles:
        call(handle, "set_weights", [np.full(4, NAN)])
    assert unchanged(server, handles, NonFiniteWeightsError).workers == (0, 1, 2)


def test_krum_finds_nan(engine):
    server = create_parameter_server("krum", on_nonfinite="skip")
    values = [[np.full(3, v)] for v in (1.0, 1.5, 2.0, 2.5, 3.0, NAN)]
    assert call(server, "sync_from_workers", workers(*values))["skipped"] == [5]


def test_nan_in_a_scalar_and_in_a_large_entry(engine, golden):
    big = np.zeros(1_500_000, np.float32)
    broken = big.copy()
    broken[-1] = NAN
    handles = workers({"s": 1.0, "w": big}, {"s": NAN, "w": big}, {"s": 1.0, "w": broken})
    server = create_parameter_server()
    with pytest.raises(NonFiniteWeightsError) as caught:
        call(server, "sync_from_workers", handles)
    assert (caught.value.workers, caught.value.entry) == ((1, 2), "['s']")
    golden("nonfinite_workers.txt", error_text(caught.value))


def test_huge_numbers_are_finite(engine):
    """Their squares are not, and neither is their sum: halves of it are."""
    handles = workers([np.full(3, 1e30, np.float32)], [np.full(3, 3e30, np.float32)])
    call(create_parameter_server(), "sync_from_workers", handles)
    assert weights_of(handles)[0][0].tolist() == pytest.approx([2e30] * 3, rel=1e-6)


def test_overflow_of_the_mean_names_no_worker(engine, golden):
    handles = workers(*([np.full(3, 3e38, np.float32)] for _ in range(4)))
    with pytest.raises(NonFiniteWeightsError) as caught:
        call(create_parameter_server(), "sync_from_workers", handles)
    assert (caught.value.workers, caught.value.entry) == ((), "[0]")
    golden("mean_overflow.txt", error_text(caught.value))


@pytest.mark.parametrize(
    "start", [[np.zeros(3, np.float16)], {"w": np.zeros(3, np.float16), "n": 1}]
)
def test_what_fits_the_type_computed_in_but_not_that_of_the_weights_is_one_too(engine, start):
    """80,000 is no float16."""
    far = workers(*[_filled(start, 40_000)] * 2)
    server = create_parameter_server("momentum", lr=2)
    call(server, "set_weights", start)
    for _ in range(2):  # the second time they are known by their place
        with pytest.raises(NonFiniteWeightsError) as caught:
            call(server, "sync_from_workers", far)
        assert caught.value.workers == ()
    kept = call(server, "get_weights")
    assert (kept["w"] if isinstance(kept, dict) else kept[0]).tolist() == [0, 0, 0]


def _filled(weights, value):
    if isinstance(weights, dict):
        return {"w": np.full_like(weights["w"], value), "n": 1}
    return [np.full_like(weights[0], value)]


def test_a_bad_push_is_dropped(engine):
    server = create_parameter_server()
    call(server, "push_weights", "a", [np.array([1.0])])
    call(server, "push_weights", "b", [np.array([NAN])])
    with pytest.raises(NonFiniteWeightsError) as caught:
        call(server, "pull_weights")
    assert caught.value.workers == ("b",)
    call(server, "push_weights", "a", [np.array([5.0])])
    assert call(server, "pull_weights")[0].tolist() == [5]
