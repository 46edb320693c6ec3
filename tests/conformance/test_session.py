"""init and shutdown. Each test starts an engine of its own, so there are few of them."""

import pytest

import miniray
from miniray.errors import MinirayError


@miniray.remote
def add(a, b):
    return a + b


@miniray.remote
class Counter:
    def __init__(self):
        self.n = 0

    def add(self):
        self.n += 1
        return self.n


def test_a_session_from_start_to_end(no_engine):
    assert not miniray.is_initialized()
    session = miniray.init(backend=no_engine, num_cpus=2, namespace="conformance")
    assert session.backend == no_engine
    assert miniray.is_initialized()
    assert miniray.cluster_resources()["CPU"] == 2
    assert miniray.get_runtime_context().namespace == "conformance"
    with pytest.raises(RuntimeError, match="already running"):
        miniray.init(backend=no_engine)
    assert miniray.init(backend=no_engine, ignore_reinit_error=True).engine is session.engine

    counter, ref = Counter.remote(), add.remote(1, 2)
    assert miniray.get([ref, counter.add.remote()]) == [3, 1]
    miniray.shutdown()
    assert not miniray.is_initialized()
    with pytest.raises(MinirayError):
        miniray.get(ref)
    with pytest.raises(MinirayError):
        miniray.get(counter.add.remote())
    miniray.shutdown()  # once more does nothing


@pytest.mark.slow_on_ray
def test_with_ends_the_session_and_another_may_follow(no_engine):
    with miniray.init(backend=no_engine, num_cpus=2):
        first = Counter.options(name="same").remote()
        assert miniray.get([first.add.remote(), first.add.remote()]) == [1, 2]
        assert miniray.get(add.remote(1, 1)) == 2
    assert not miniray.is_initialized()
    with miniray.init(backend=no_engine, num_cpus=2):
        again = Counter.options(name="same").remote()  # the name went with the session
        assert miniray.get(again.add.remote()) == 1
        assert miniray.get(add.remote(2, 2)) == 4  # the same function, exported anew


@pytest.mark.slow_on_ray
def test_refs_and_handles_of_an_earlier_session_are_refused(no_engine):
    """Their ids may be somebody else's by now."""
    with miniray.init(backend=no_engine, num_cpus=2):
        ref, counter = miniray.put(1), Counter.remote()
        assert miniray.get(counter.add.remote()) == 1
    with miniray.init(backend=no_engine, num_cpus=2):
        own = Counter.remote()
        for refused in (
            lambda: miniray.get(ref),
            lambda: miniray.get([ref]),
            lambda: counter.add.remote(),
        ):
            with pytest.raises(MinirayError, match="session"):
                refused()
        if no_engine == "local":
            for refused in (
                lambda: add.remote(ref, 1),
                lambda: add.remote([ref], [1]),
                lambda: add.remote([counter], [1]),
                lambda: miniray.kill(counter),
            ):
                with pytest.raises(MinirayError, match="session"):
                    refused()
        assert miniray.get(own.add.remote()) == 1


@pytest.mark.slow_on_ray
def test_first_use_starts_the_engine_of_the_environment(no_engine, monkeypatch):
    monkeypatch.setenv("MINIRAY_BACKEND", no_engine)
    assert miniray.get(add.remote(20, 22)) == 42
    assert miniray.is_initialized()
    assert miniray.init(ignore_reinit_error=True).backend == no_engine


def test_bad_arguments_start_nothing(no_engine):
    for bad in (
        {"num_workers": 0},
        {"num_cpus": -1},
        {"num_gpus": "all"},
        {"object_store_memory": 0},
        {"object_store_memory": float("inf")},
        {"num_workers": 1.5},
        {"num_cpus": float("nan")},
        {"num_gpus": 0.5},
        {"namespace": 5},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            miniray.init(backend=no_engine, **bad)
    with pytest.raises(ValueError, match="inline, local, ray"):
        miniray.init(backend="dask")
    assert not miniray.is_initialized()
