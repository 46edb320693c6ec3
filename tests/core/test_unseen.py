"""A call that fails and whose result nobody asks for: the log says so, once."""

import gc
import os
import signal

import pytest

import miniray
from tests.conformance.helpers import eventually


@pytest.fixture(params=["inline", "local"])
def said(request, caplog):
    """What was logged so far. On Ray, Ray does it."""
    with miniray.init(num_workers=2, backend=request.param):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "miniray"]


@pytest.fixture
def said_local(caplog):
    with miniray.init(num_workers=2, backend="local"):
        yield lambda: [r.getMessage() for r in caplog.records if r.name == "miniray"]


@miniray.remote
class Odd:
    def check(self, number):
        if number % 2 == 0:
            raise ValueError(f"{number} is even")
        return number

    def pid(self):
        return os.getpid()

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)


@miniray.remote
def check(number):
    if number % 2 == 0:
        raise ValueError(f"{number} is even")
    return number


@miniray.remote
class Unborn:
    def __init__(self):
        raise ValueError("no data")

    def ping(self):
        return 1


def once(said, *words):
    """One more is said within moments, with all ``words`` in it."""
    eventually(lambda: len(said()) == 1, 10)
    assert all(word in said()[0] for word in words), said()[0]


def test_a_method(said):
    odd = Odd.remote()
    odd.check.remote(2)
    assert miniray.get(odd.check.remote(3)) == 3
    once(said, "nobody asked", "Odd.check failed", "ValueError: 2 is even", "in check")


def test_a_task_that_was_only_waited_for(said):
    ref = check.remote(4)
    miniray.wait([ref])
    assert not said()
    del ref
    once(said, "check failed", "4 is even")


def test_an_actor_that_could_not_be_made(said):
    actor = Unborn.remote()
    assert miniray.get(check.remote(1)) == 1
    del actor
    gc.collect()
    once(said, "Unborn.__init__ failed", "no data")


def test_whoever_asked_is_not_told_again(said):
    """Nor of the others in the same list, one of two returns, or what failed for an argument."""
    with pytest.raises(ValueError, match="is even"):
        miniray.get([check.remote(number) for number in (0, 2, 4)])
    first, second = check.options(num_returns=2).remote(6)
    miniray.wait([first, second], num_returns=2)
    del second
    with pytest.raises(ValueError, match="6 is even"):
        miniray.get(first)
    argument = check.remote(8)
    ref = check.remote(argument)
    miniray.wait([ref])
    del argument
    with pytest.raises(ValueError, match="8 is even"):
        miniray.get(ref)
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(Unborn.remote().ping.remote())
    del ref, first
    check.remote(10)  # by the time this one is in the log, the others would be
    once(said, "10 is even")


def test_a_process_that_died_in_a_call(said_local):
    odd = Odd.remote()
    odd.die.remote()
    once(said_local, "SIGKILL")


def test_deaths_that_concern_no_call_and_those_on_purpose(said_local):
    idle, killed = Odd.remote(), Odd.remote()
    pid = miniray.get(idle.pid.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(miniray.errors.ActorDiedError):
        miniray.get(idle.pid.remote())
    ref = killed.check.remote(2)
    miniray.cancel(ref)
    miniray.kill(killed)
    killed.check.remote(4)
    check.remote(10)
    once(said_local, "10 is even")
