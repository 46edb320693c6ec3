"""The Ray engine on several nodes (raylets on this machine), and beside a program's own Ray."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import miniray
from miniray import errors
from tests.conformance.helpers import eventually

pytestmark = pytest.mark.timeout(180)  # starting three raylets on a busy machine takes its time

STORE = 100 * 1024 * 1024


@pytest.fixture(scope="module", autouse=True)
def _import_ray() -> None:
    """Import Ray here, because test processes that collect this file may not run it."""
    global ray
    ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(_import_ray: None) -> Iterator[Any]:
    """Three nodes with one CPU each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "object_store_memory": STORE,
            # A node that refuses five of these is dead; by default that takes 15 seconds.
            "_system_config": {"health_check_period_ms": 500},
        },
    )
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def session(cluster: Any) -> Iterator[None]:
    with miniray.init(address=cluster.address):
        yield
    assert not ray.is_initialized()


@miniray.remote(num_cpus=1)
class Worker:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.weights = np.full(200_000, float(rank))

    def node(self) -> str:
        return miniray.get_runtime_context().node_id

    def get_weights(self) -> np.ndarray:
        return self.weights

    def put_weights(self) -> list[Any]:
        return [miniray.put(self.weights)]

    def sum_of(self, refs: list[Any]) -> float:
        return float(sum(miniray.get(ref).sum() for ref in refs))

    def average(self, workers: list[Any]) -> float:
        weights = miniray.get([worker.get_weights.remote() for worker in workers])
        return float(np.mean(weights))

    def keep(self, other: Any) -> None:
        self.other = other

    def ask_other(self) -> str:
        return miniray.get(self.other.node.remote())

    def fail(self) -> None:
        raise KeyError("lost")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def _workers(count: int) -> list[Any]:
    workers = [Worker.remote(rank) for rank in range(count)]
    miniray.get([worker.node.remote() for worker in workers])
    return workers


def _call_for_a_minute(worker: Any) -> None:
    """A process outlives its raylet for a moment and may still answer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        miniray.get(worker.node.remote(), timeout=60)
        time.sleep(0.1)


@pytest.mark.usefixtures("session")
def test_actors_spread_over_the_nodes_that_nodes_lists() -> None:
    workers = _workers(3)
    used = miniray.get([worker.node.remote() for worker in workers])
    alive = [node for node in miniray.nodes() if node["Alive"]]
    assert set(used) == {node["NodeID"] for node in alive}
    assert len(alive) == 3
    assert all(node["Resources"]["CPU"] == 1 for node in alive)
    assert miniray.cluster_resources()["CPU"] == 3


@pytest.mark.usefixtures("session")
def test_a_handle_held_by_an_actor_on_another_node_works() -> None:
    here, there = _workers(2)
    miniray.get(here.keep.remote(there))
    assert miniray.get(here.ask_other.remote()) == miniray.get(there.node.remote())
    assert miniray.get(here.node.remote()) != miniray.get(there.node.remote())


@pytest.mark.usefixtures("session")
def test_refs_travel_between_nodes_nested_and_resolved() -> None:
    first, second = _workers(2)
    refs = miniray.get(second.put_weights.remote())
    assert miniray.get(first.sum_of.remote(refs)) == 200_000
    assert miniray.get(first.sum_of.remote([second.get_weights.remote()])) == 200_000
    assert miniray.get(refs[0]).sum() == 200_000


@pytest.mark.slow
@pytest.mark.usefixtures("session")
def test_one_actor_collects_from_workers_on_all_nodes() -> None:
    workers = _workers(3)
    server = miniray.remote(Worker.__wrapped__).remote()
    assert miniray.get(server.average.remote(workers)) == pytest.approx(1.0)


@pytest.mark.usefixtures("session")
def test_an_error_names_the_actor_on_the_other_node() -> None:
    worker = Worker.options(name="far away").remote()
    with pytest.raises(KeyError) as caught:
        miniray.get(worker.fail.remote())
    assert isinstance(caught.value, errors.TaskError)
    assert caught.value.actor == "far away"
    assert caught.value.pid > 0
    assert 'raise KeyError("lost")' in caught.value.remote_traceback


@pytest.mark.usefixtures("session")
def test_a_request_no_single_node_can_meet_is_refused_at_once() -> None:
    started = time.monotonic()
    with pytest.raises(errors.ActorUnschedulableError, match=r"2 CPU.*1 CPU"):
        Worker.options(num_cpus=2).remote()
    assert time.monotonic() - started < 5


@pytest.mark.usefixtures("session")
def test_a_killed_node_gives_actor_died_and_object_lost(cluster: Any) -> None:
    extra = cluster.add_node(num_cpus=1, object_store_memory=STORE, resources={"extra": 1})
    cluster.wait_for_nodes()
    workers = _workers(4)
    where = miniray.get([worker.node.remote() for worker in workers])
    victim = workers[where.index(extra.node_id)]
    owned = miniray.get(victim.put_weights.remote())[0]

    cluster.remove_node(extra, allow_graceful=False)

    with pytest.raises(errors.ActorDiedError):
        _call_for_a_minute(victim)
    with pytest.raises(errors.ObjectLostError):
        miniray.get(owned, timeout=60)
    alive = {node["NodeID"] for node in miniray.nodes() if node["Alive"]}
    assert extra.node_id not in alive
    assert len(alive) == 3


def test_the_size_of_a_running_cluster_cannot_be_asked_for(cluster: Any) -> None:
    with pytest.raises(ValueError, match="num_cpus"):
        miniray.init(address=cluster.address, num_cpus=4)
    assert not miniray.is_initialized()


@pytest.fixture(scope="class")
def users_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, namespace="users")
    try:
        yield
    finally:
        ray.shutdown()


@pytest.mark.usefixtures("users_ray")
class TestBesideAProgramsOwnRay:
    def test_a_ray_the_program_started_is_used_and_left_running(self) -> None:
        kept = ray.put("kept")
        with miniray.init(backend="ray"):
            worker = Worker.remote(1)
            assert miniray.get(worker.sum_of.remote([miniray.put(np.ones(3))])) == 3
            ray_handle = worker._actor
        assert ray.is_initialized()
        assert ray.get(kept) == "kept"
        # What miniray started is ended all the same.
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(ray_handle.node.remote(), timeout=30)
        with pytest.raises(errors.ActorDiedError, match="shut down"):
            worker.node.remote()

    def test_actors_of_plain_ray_code_can_be_called(self) -> None:
        class Plain:
            def add(self, a: int, b: int = 1) -> int:
                return a + b

            def fail(self) -> None:
                raise KeyError("plain")

        keep = ray.remote(Plain).options(name="plain").remote()
        with miniray.init(backend="ray"):
            actor = miniray.get_actor("plain")
            assert miniray.get(actor.add.remote(1, b=2)) == 3
            with pytest.raises(TypeError):
                actor.add.remote()
            with pytest.raises(KeyError) as caught:
                miniray.get(actor.fail.remote())
            assert isinstance(caught.value, errors.TaskError)
            assert "Plain.fail" in caught.value.function
        assert ray.get(keep.add.remote(1)) == 2

    def test_no_call_runs_after_kill_however_late_ray_gets_to_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kill = ray.kill

        def kill_later(actor: Any, *, no_restart: bool) -> None:
            threading.Timer(0.2, kill, (actor,), {"no_restart": no_restart}).start()

        with miniray.init(backend="ray"):
            worker = Worker.remote()
            miniray.get(worker.node.remote())
            monkeypatch.setattr(ray, "kill", kill_later)
            miniray.kill(worker)
            monkeypatch.undo()
            with pytest.raises(errors.ActorDiedError):
                miniray.get(worker.node.remote())


def functions_of(thread: threading.Thread) -> set[str]:
    """The functions it is in."""
    assert thread.ident is not None
    frame = sys._current_frames()[thread.ident]
    return {f.f_code.co_name for f, _ in traceback.walk_stack(frame)}


def test_shutdown_ends_waits_in_other_threads_and_all_refs() -> None:
    miniray.init(backend="ray", num_cpus=1, object_store_memory=STORE)
    worker = Worker.remote()
    done = worker.node.remote()
    miniray.get(done)
    endless = worker.sleep.remote(60)
    raised: dict[str, BaseException] = {}

    def run(name: str, wait: Callable[[], object]) -> None:
        try:
            wait()
        except BaseException as error:  # which one is the question
            raised[name] = error

    waits = {
        "get_objects": lambda: miniray.get(endless),
        "wait": lambda: miniray.wait([endless]),
    }
    threads = [threading.Thread(target=run, args=wait, daemon=True) for wait in waits.items()]
    for thread, (name, _) in zip(threads, waits.items(), strict=True):
        thread.start()
        # In Ray, not on the way there: a wait that begins while Ray ends is another thing.
        eventually(lambda thread=thread, name=name: name in functions_of(thread))
    miniray.shutdown()
    for thread in threads:
        thread.join(timeout=30)
    assert {name: type(error) for name, error in raised.items()} == dict.fromkeys(
        waits, errors.ObjectLostError
    )
    with pytest.raises(errors.ObjectLostError, match="shut down"):
        miniray.get(done)
    assert not ray.is_initialized()


@pytest.mark.slow  # a Ray by itself, for a window of microseconds
def test_a_get_that_comes_too_late_for_ray_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    miniray.init(backend="ray", num_cpus=1, object_store_memory=STORE)
    ref = miniray.put(1)
    get_objects = ray._private.worker.Worker.get_objects

    def after_the_end(*args: Any, **kwargs: Any) -> Any:
        miniray.shutdown()
        return get_objects(*args, **kwargs)

    monkeypatch.setattr(ray._private.worker.Worker, "get_objects", after_the_end)
    with pytest.raises(errors.ObjectLostError, match="shut down"):
        miniray.get(ref)
