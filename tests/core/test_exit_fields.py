"""Errors about processes that ended say how, in fields."""

import os
import signal
import socket

import pytest

import miniray
from miniray.errors import ActorDiedError, WorkerCrashedError


@pytest.fixture(scope="module", autouse=True)
def _engine():
    with miniray.init(num_workers=1, backend="local"):
        yield


def end(how):
    if how == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


@miniray.remote
class Mortal:
    def pid(self):
        return os.getpid()

    def end(self, how):
        end(how)


@miniray.remote(max_retries=0)
def crash(how):
    end(how)


@pytest.mark.parametrize(("how", "ending"), [("exit", (3, None)), ("kill", (None, "SIGKILL"))])
def test_fields_of_a_process_that_ended(how, ending):
    actor = Mortal.remote()
    pid = miniray.get(actor.pid.remote())
    with pytest.raises(ActorDiedError) as died:
        miniray.get(actor.end.remote(how))
    with pytest.raises(WorkerCrashedError) as crashed:
        miniray.get(crash.remote(how))
    for error in (died.value, crashed.value):
        assert (error.exit_code, error.signal) == ending
        assert error.host == socket.gethostname()
    assert died.value.pid == pid
    assert died.value.in_init is False
    assert isinstance(crashed.value.pid, int)


def test_restarted_actor_reports_the_end_of_its_process():
    actor = Mortal.options(max_restarts=1).remote()
    pid = miniray.get(actor.pid.remote())
    with pytest.raises(ActorDiedError) as died:
        miniray.get(actor.end.remote("exit"))
    assert (died.value.exit_code, died.value.pid) == (3, pid)
    assert miniray.get(actor.pid.remote()) != pid


def test_actor_that_could_not_be_made_has_no_exit():
    @miniray.remote
    class Unmade:
        def __init__(self):
            raise ValueError

        def use(self):
            pass

    with pytest.raises(ActorDiedError) as died:
        miniray.get(Unmade.remote().use.remote())
    assert died.value.in_init is True
    assert (died.value.exit_code, died.value.signal) == (None, None)
