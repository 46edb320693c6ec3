"""Asynchronous mode: what a push does, and who waits for whom."""

import threading

import numpy as np
import pytest

import miniray
from miniray.errors import CapabilityError, NonFiniteWeightsError, WeightsMismatchError
from miniray.ps import create_parameter_server
from tests.conformance.helpers import eventually
from tests.ps.helpers import call, error_text, weights_of, workers


def server_at(value, **options):
    server = create_parameter_server(options.pop("strategy", "average"), mode="async", **options)
    call(server, "set_weights", {"w": np.full(3, value), "n": 10})
    return server


def push(server, worker, value, n=10):
    return call(server, "push_weights", worker, {"w": np.full(3, float(value)), "n": n})


def pulled(server):
    return call(server, "pull_weights")["w"].tolist()[0]


def test_a_push_moves_the_weights_by_the_workers_share(engine):
    server = server_at(0.0, num_workers=4)
    assert push(server, 0, 8, n=20) == 2
    assert pulled(server) == 2  # 0 + (8 − 0)/4
    assert call(server, "get_weights")["n"] == 13  # 12.5, halves up
    push(server, 1, 10)
    assert pulled(server) == 4  # 2 + (10 − 2)/4


def test_the_first_push_is_taken_as_it_is(engine):
    server = create_parameter_server(mode="async", num_workers=4)
    push(server, 2, 8)
    assert pulled(server) == 8


def test_shares_follow_the_worker_weights(engine):
    server = server_at(0.0, num_workers=2)
    call(server, "set_worker_weight", 0, 3)
    push(server, 0, 8)
    assert pulled(server) == 6  # 3 of 4
    call(server, "set_worker_weight", 0, 0)
    push(server, 0, 100)  # counts for nothing
    assert pulled(server) == 6


def test_workers_that_were_not_announced_count_from_their_first_push(engine):
    server = server_at(0.0)
    push(server, "a", 4)
    assert pulled(server) == 4  # the only one known
    push(server, "b", 8)
    assert pulled(server) == 6


def test_stale_pushes_count_less(engine):
    server = server_at(0.0, num_workers=2, staleness_power=1)
    push(server, 0, 8)
    assert pulled(server) == 4  # its first: not stale
    push(server, 1, 4)
    push(server, 1, 4)
    push(server, 0, 16)  # two pushes since its last: 1/2 · 1/3
    assert pulled(server) == pytest.approx(4 + 12 / 6)


def test_momentum_goes_on(engine):
    server = server_at(0.0, strategy="momentum", momentum=0.5, num_workers=2)
    push(server, 0, 8)
    assert pulled(server) == 4  # d = 4
    push(server, 1, 4)
    assert pulled(server) == 6  # d = 0, v = 2


def test_what_does_not_fit_changes_nothing(engine):
    server = server_at(1.0)
    with pytest.raises(WeightsMismatchError) as mismatch:
        call(server, "push_weights", "a", {"w": np.zeros(2), "n": 1})
    assert (mismatch.value.worker, mismatch.value.entry) == ("a", "['w']")
    with pytest.raises(NonFiniteWeightsError) as nonfinite:
        call(server, "push_weights", "a", {"w": np.array([1, np.nan, 1]), "n": 1})
    assert (nonfinite.value.workers, nonfinite.value.entry) == (("a",), "['w']")
    assert pulled(server) == 1
    stats = call(server, "get_stats")
    assert (stats["version"], stats["failed_syncs"]) == (1, 2)


def test_skipping_nan(engine):
    server = server_at(1.0, on_nonfinite="skip")
    push(server, "a", float("nan"))
    assert pulled(server) == 1
    stats = call(server, "get_stats")
    assert (stats["skipped"], stats["clocks"], stats["version"]) == ({"a": 1}, {"a": 1}, 1)


def test_weights_pulled_before_are_not_changed_by_a_push(engine):
    server = server_at(1.0)
    before = call(server, "pull_weights")["w"]
    push(server, "a", 5)
    assert before.tolist() == [1, 1, 1]


def test_a_sync_works_too(engine):
    server = create_parameter_server(mode="async")
    handles = workers([np.array([1.0])], [np.array([3.0])])
    assert call(server, "sync_from_workers", handles)["synced"]
    assert weights_of(handles)[0][0].tolist() == [2]
    call(server, "push_weights", 0, [np.array([4.0])])
    assert call(server, "get_weights")[0].tolist() == [4]


# -- bounded staleness -----------------------------------------------------------------------------


def test_a_fast_worker_waits_for_the_slowest(local):
    server = server_at(0.0, num_workers=2, max_staleness=1)
    push(server, 0, 1)
    ahead = server.push_weights.remote(0, {"w": np.ones(3), "n": 1})
    eventually(lambda: call(server, "get_stats")["waiting"] == 1)
    assert call(server, "get_stats")["clocks"] == {0: 2, 1: 0}
    assert pulled(server) > 0.5  # it took effect, and others are served meanwhile
    assert miniray.wait([ahead], timeout=0.2) == ([], [ahead])
    push(server, 1, 1)
    miniray.get(ahead, timeout=20)
    assert call(server, "get_stats")["waiting"] == 0


def test_nobody_waits_for_a_worker_that_was_taken_out(local):
    server = server_at(0.0, num_workers=2, max_staleness=0)
    ahead = server.push_weights.remote(0, {"w": np.ones(3), "n": 1})
    eventually(lambda: call(server, "get_stats")["waiting"] == 1)
    call(server, "set_worker_weight", 1, 0)
    miniray.get(ahead, timeout=20)


def test_many_workers_stay_within_the_bound(local):
    server = server_at(0.0, num_workers=3, max_staleness=2)
    spread = []

    def work(worker):
        for _ in range(20):
            push(server, worker, worker)
            clocks = call(server, "get_stats")["clocks"].values()
            spread.append(max(clocks) - min(clocks))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(spread) <= 3  # a push of one that is at the bound takes effect before it waits
    assert call(server, "get_stats")["num_pushes"] == 60


def test_waiting_in_one_thread_is_refused():
    miniray.shutdown()
    with miniray.init(backend="inline"):
        server = server_at(0.0, num_workers=2, max_staleness=0)
        with pytest.raises(CapabilityError):
            push(server, 0, 1)


def test_push_that_overflows_changes_nothing(engine, golden):
    server = create_parameter_server("momentum", mode="async", lr=1e200)
    call(server, "set_weights", {"w": np.zeros(3), "n": 10})
    with pytest.raises(NonFiniteWeightsError) as caught:
        push(server, "a", 1e200)
    assert (caught.value.workers, caught.value.entry) == ((), "['w']")
    golden("push_overflow.txt", error_text(caught.value))
    assert call(server, "get_weights")["w"].tolist() == [0, 0, 0]
    assert call(server, "get_state")["buffers"]["momentum"][0].tolist() == [0, 0, 0]
