"""How actors and tasks end: last handle, kill, crash, restart, retry."""

import asyncio
import atexit
import os
import signal
import socket
import sys
import time

import pytest

import miniray
from miniray.errors import ActorDiedError, WorkerCrashedError
from tests.conformance.helpers import Gate, eventually, exists, is_process, needs


@miniray.remote
class Writer:
    def __init__(self, log, left):
        self.file = open(log, "w")  # nobody closes it
        atexit.register(left.touch)

    def write(self, text):
        self.file.write(text)


@miniray.remote
class AsyncWriter:
    def __init__(self, log, left):
        self.waiting = asyncio.get_running_loop().create_task(self.wait(log, left))
        self.text = ""

    async def wait(self, log, left):
        try:
            await asyncio.sleep(3600)
        finally:
            log.write_text(self.text)
            left.touch()

    async def write(self, text):
        self.text = text


@miniray.remote
class Actor:
    def __init__(self, fail_with=None):
        if fail_with is not None:
            raise ValueError(fail_with)
        self.calls = 0

    def call(self):
        self.calls += 1
        return self.calls

    def pid(self):
        return os.getpid()

    def crash(self, code=3):
        os._exit(code)

    def signal_self(self, number):
        os.kill(os.getpid(), number)
        time.sleep(30)

    def exit(self, code=0):
        sys.exit(code)

    def crash_until(self, path, attempts):
        return count_up_to(path, attempts)

    def block(self, gate):
        gate.announce()
        gate.wait()
        return "unblocked"

    def reconstructed(self):
        return miniray.get_runtime_context().was_current_actor_reconstructed


def count_up_to(path, attempts):
    """Crash in each of the first ``attempts`` runs; the number of this run after that."""
    with open(path, "a") as file:
        file.write("x")
    run = os.path.getsize(path)
    if run <= attempts:
        os._exit(1)
    return run


@miniray.remote
def crash_until(path, attempts):
    return count_up_to(path, attempts)


def dead(actor):
    """Whether calls fail; those of a restarting actor do so for a while."""
    try:
        miniray.get(actor.call.remote())
    except ActorDiedError:
        return True
    return False


def restarted(actor):
    """Whether the actor is up again; calls fail from the crash until then."""
    try:
        return miniray.get(actor.reconstructed.remote())
    except ActorDiedError:
        return False


# -- the end of an actor ---------------------------------------------------------------------------


@pytest.mark.slow_on_ray
def test_an_actor_ends_with_its_last_handle(engine):
    needs(engine, "processes")
    actor = Actor.remote()
    pid = miniray.get(actor.pid.remote())
    copy = miniray.get(miniray.put([actor]))
    del actor
    assert is_process(pid)
    assert miniray.get(copy[0].call.remote()) == 1
    del copy
    eventually(lambda: not is_process(pid))


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_an_actor_that_ends_tidies_up(engine, tmp_path, kind):
    """As any program: what it wrote is flushed, exit handlers and ``finally`` run."""
    needs(engine, "processes")
    log, left = tmp_path / "log", tmp_path / "left"
    writer = (AsyncWriter if kind == "async" else Writer).remote(log, left)
    miniray.get(writer.write.remote("hello"))
    del writer
    eventually(lambda: left.exists() and log.read_text() == "hello")


@pytest.mark.slow_on_ray
def test_calls_made_before_the_last_handle_went_are_done(engine):
    @miniray.remote
    def last_words():
        return "heard"

    @miniray.remote
    class Brief:
        def say(self, words):
            return words

    assert miniray.get(Brief.remote().say.remote(last_words.remote())) == "heard"


def test_a_failed_init_is_told_at_every_call(engine):
    actor = Actor.remote("bad config")
    for _ in range(2):
        with pytest.raises(ActorDiedError, match="bad config") as caught:
            miniray.get(actor.call.remote())
    assert "ValueError" in str(caught.value)
    assert "__init__" in str(caught.value)
    assert caught.value.in_init is True
    assert (caught.value.exit_code, caught.value.signal) == (None, None)


@pytest.mark.slow_on_ray
def test_a_failed_init_frees_the_name(engine, unique):
    actor = Actor.options(name=unique).remote("no")
    with pytest.raises(ActorDiedError):
        miniray.get(actor.call.remote())
    del actor  # Ray keeps the name of a dead actor that somebody still holds
    eventually(lambda: not exists(unique))


def test_calls_after_kill_fail(engine):
    actor = Actor.remote()
    assert miniray.get(actor.call.remote()) == 1
    miniray.kill(actor)
    for _ in range(2):
        with pytest.raises(ActorDiedError):
            miniray.get(actor.call.remote())


@pytest.mark.slow_on_ray
def test_kill_of_a_killed_actor_changes_nothing(engine):
    actor, other = Actor.remote(), Actor.remote()
    miniray.get([actor.call.remote(), other.call.remote()])
    miniray.kill(actor)
    miniray.kill(actor)
    with pytest.raises(ActorDiedError):
        miniray.get(actor.call.remote())
    assert miniray.get(other.call.remote()) == 2


@pytest.mark.slow_on_ray
def test_results_from_before_the_kill_remain(engine):
    actor = Actor.remote()
    ref = actor.call.remote()
    miniray.get(ref)
    miniray.kill(actor)
    assert miniray.get(ref) == 1


@pytest.mark.slow_on_ray
def test_kill_ends_the_process(engine):
    needs(engine, "processes")
    actor = Actor.remote()
    pid = miniray.get(actor.pid.remote())
    miniray.kill(actor)
    eventually(lambda: not is_process(pid))


def test_kill_fails_the_call_in_flight(engine, tmp_path):
    needs(engine, "concurrent", "processes")
    gate = Gate(tmp_path)
    actor = Actor.remote()
    ref = actor.block.remote(gate)
    eventually(gate.arrived)
    miniray.kill(actor)
    with pytest.raises(ActorDiedError):
        miniray.get(ref)


def _get_ray_address():
    import ray

    return ray.util.get_node_ip_address()


def test_sys_exit_ends_the_actor(engine):
    actor = Actor.remote()
    pid = miniray.get(actor.pid.remote())
    with pytest.raises(ActorDiedError):
        miniray.get(actor.exit.remote(3))
    with pytest.raises(ActorDiedError) as caught:
        miniray.get(actor.call.remote())
    if engine.capabilities.processes:
        error = caught.value
        assert (error.pid, error.exit_code, error.signal, error.in_init) == (pid, 3, None, False)
        assert error.host == (_get_ray_address() if engine.name == "ray" else socket.gethostname())


@pytest.mark.slow_on_ray
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV], ids=["SIGKILL", "SIGSEGV"])
def test_a_signal_ends_the_actor(engine, number):
    needs(engine, "processes")
    actor = Actor.remote()
    with pytest.raises(ActorDiedError):
        miniray.get(actor.signal_self.remote(number))


def test_a_crash_fails_the_calls_queued_behind_it(engine):
    needs(engine, "processes")
    actor = Actor.remote()
    refs = [actor.crash.remote(), actor.call.remote(), actor.call.remote()]
    for ref in refs:
        with pytest.raises(ActorDiedError):
            miniray.get(ref)


@pytest.mark.slow_on_ray
def test_a_crash_is_seen_by_another_actor_that_waits(engine):
    needs(engine, "processes")

    @miniray.remote
    class Caller:
        def call(self, actor):
            try:
                miniray.get(actor.crash.remote())
            except ActorDiedError:
                return "noticed"

    assert miniray.get(Caller.remote().call.remote(Actor.remote())) == "noticed"


# -- restart and retry -----------------------------------------------------------------------------


def test_without_max_restarts_a_crash_is_final(engine):
    needs(engine, "processes")
    actor = Actor.remote()
    with pytest.raises(ActorDiedError):
        miniray.get(actor.crash.remote())
    assert dead(actor)


@pytest.mark.slow_on_ray
def test_an_actor_restarts_as_often_as_allowed(engine):
    needs(engine, "processes")
    actor = Actor.options(max_restarts=1).remote()
    assert miniray.get([actor.call.remote(), actor.call.remote()]) == [1, 2]
    with pytest.raises(ActorDiedError):
        miniray.get(actor.crash.remote())
    eventually(lambda: restarted(actor))
    assert miniray.get(actor.call.remote()) == 1  # its state is gone
    with pytest.raises(ActorDiedError):
        miniray.get(actor.crash.remote())
    assert dead(actor)


@pytest.mark.slow_on_ray
def test_kill_with_restart_starts_over(engine):
    actor = Actor.options(max_restarts=1).remote()
    assert miniray.get([actor.call.remote(), actor.call.remote()]) == [1, 2]
    miniray.kill(actor, no_restart=False)
    eventually(lambda: restarted(actor))
    assert miniray.get(actor.call.remote()) == 1
    miniray.kill(actor, no_restart=False)
    eventually(lambda: dead(actor))


@pytest.mark.slow_on_ray
def test_kill_without_restart_ignores_max_restarts(engine):
    actor = Actor.options(max_restarts=5).remote()
    miniray.get(actor.call.remote())
    miniray.kill(actor)
    with pytest.raises(ActorDiedError):
        miniray.get(actor.call.remote())


@pytest.mark.slow_on_ray
def test_max_task_retries_runs_the_call_again(engine, tmp_path):
    needs(engine, "processes")
    actor = Actor.options(max_restarts=3, max_task_retries=3).remote()
    assert miniray.get(actor.crash_until.remote(str(tmp_path / "runs"), 2)) == 3


@pytest.mark.slow_on_ray
def test_a_crashed_task_is_retried(engine, tmp_path):
    needs(engine, "processes")
    assert miniray.get(crash_until.remote(str(tmp_path / "runs"), 2)) == 3


def test_max_retries_limits_the_retries(engine, tmp_path):
    needs(engine, "processes")
    path = tmp_path / "runs"
    with pytest.raises(WorkerCrashedError):
        miniray.get(crash_until.options(max_retries=1).remote(str(path), 10))
    assert path.stat().st_size == 2


@pytest.mark.slow_on_ray
def test_an_exception_is_not_retried(engine, tmp_path):
    path = tmp_path / "runs"

    @miniray.remote(max_retries=3)
    def fail():
        with open(path, "a") as file:
            file.write("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        miniray.get(fail.remote())
    assert path.stat().st_size == 1
