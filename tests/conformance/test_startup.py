"""What a worker knows before its object is made: the run's seed, its own seed, what sets it up."""

import os
import random

import numpy as np
import pytest

import miniray
from miniray.core import startup

events = []


def set_up():
    """Named by the environment; runs in the actor's process."""
    events.append("before")
    return lambda made: events.append(f"made {type(made).__name__}")


@miniray.remote
class Worker:
    def __init__(self):
        from tests.conformance import test_startup

        test_startup.events.append("init")

    def events(self):
        from tests.conformance import test_startup

        return test_startup.events

    def run_seed(self):
        return os.environ[startup.RUN_SEED]

    def random(self):
        return random.random()

    def numpy_random(self):
        import numpy

        return numpy.random.random()


@miniray.remote
def run_seed():
    return os.environ[startup.RUN_SEED]


@pytest.mark.slow_on_ray
def test_all_processes_of_a_run_share_one_seed(engine):
    seeds = miniray.get([Worker.remote().run_seed.remote(), run_seed.remote()])
    assert seeds[0] == seeds[1] == os.environ[startup.RUN_SEED]
    assert int(seeds[0]) >= 0


@pytest.mark.slow_on_ray
def test_a_given_run_seed_is_kept(no_engine, monkeypatch):
    monkeypatch.setenv(startup.RUN_SEED, "42")
    miniray.init(backend=no_engine, num_cpus=2)
    assert miniray.get(Worker.remote().run_seed.remote()) == "42"
    miniray.shutdown()
    assert os.environ[startup.RUN_SEED] == "42"


@pytest.mark.slow_on_ray
def test_actors_created_with_a_seed(engine):
    with startup.actors_with(seed=3):
        seeded = Worker.remote()
    assert miniray.get(seeded.random.remote()) == random.Random(3).random()
    rolled = miniray.get(seeded.numpy_random.remote())
    assert rolled == np.random.RandomState(3).random_sample()


def test_an_actor_is_set_up_around_its_making(engine):
    hook = {startup.SET_UP: f"{__name__}:set_up"}
    with startup.actors_with(env=hook):
        worker = Worker.remote()
    assert miniray.get(worker.events.remote())[-3:] == ["before", "init", "made Worker"]


@pytest.mark.slow_on_ray
def test_a_set_up_that_fails_is_the_actors_failure(engine):
    with startup.actors_with(env={startup.SET_UP: "no_such_module:f"}):
        worker = Worker.remote()
    with pytest.raises(miniray.errors.ActorDiedError, match="no_such_module"):
        miniray.get(worker.events.remote())
