"""What comes back after a death, how often, and with which state: restarts and retries."""

import os
import signal

import pytest

import miniray
from miniray.errors import ActorDiedError, WorkerCrashedError
from tests.faults.helpers import SOON, eventually, fails_soon, is_process, pids


@miniray.remote
class Phoenix:
    """Counts its lives in a file, and dies as long as that says fewer than ``until``."""

    def __init__(self, path=None):
        self.state = 0
        self.path = path
        if path is not None:
            with open(path, "a") as file:
                file.write("x")

    def pid(self):
        return os.getpid()

    def lives(self):
        return os.path.getsize(self.path)

    def add(self):
        self.state += 1
        return self.state

    def die_until(self, lives):
        if self.lives() < lives:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.lives()

    def leave(self, code):
        raise SystemExit(code)

    def vanish(self):
        os._exit(0)

    def total(self, array):
        return float(array.sum())


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "lives")


def crash(engine, actor):
    """Kill the actor's process from outside while it is idle, and wait until that is known."""
    pid = miniray.get(actor.pid.remote(), timeout=SOON)
    proc = actor._actor.client.proc
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: proc in engine.node.dead, SOON)
    return pid


def test_a_restarted_actor_has_a_new_state(engine):
    actor = Phoenix.options(max_restarts=1).remote()
    miniray.get([actor.add.remote() for _ in range(3)])
    crash(engine, actor)
    assert miniray.get(actor.add.remote(), timeout=SOON) == 1


def test_restarts_are_counted(engine, path):
    actor = Phoenix.options(max_restarts=2).remote(path)
    for _ in range(3):
        crash(engine, actor)
    fails_soon(actor.pid.remote(), ActorDiedError, "SIGKILL")
    assert os.path.getsize(path) == 3


def test_restarts_without_limit(engine, path):
    actor = Phoenix.options(max_restarts=-1, max_task_retries=-1).remote(path)
    assert miniray.get(actor.die_until.remote(8), timeout=20) == 8


def test_a_call_in_flight_fails_without_retries(engine, path):
    actor = Phoenix.options(max_restarts=1).remote(path)
    fails_soon(actor.die_until.remote(2), ActorDiedError, "SIGKILL", "restarted")
    assert miniray.get(actor.die_until.remote(2), timeout=SOON) == 2


def test_a_call_in_flight_is_retried(engine, path):
    actor = Phoenix.options(max_restarts=3, max_task_retries=3).remote(path)
    assert miniray.get(actor.die_until.remote(4), timeout=10) == 4


def test_retries_are_counted(engine, path):
    actor = Phoenix.options(max_restarts=5, max_task_retries=2).remote(path)
    fails_soon(actor.die_until.remote(99), ActorDiedError, "SIGKILL")
    assert miniray.get(actor.lives.remote(), timeout=SOON) == 4


def test_retried_calls_keep_their_order(engine, path):
    actor = Phoenix.options(max_restarts=1, max_task_retries=1).remote(path)
    refs = [actor.die_until.remote(2), *(actor.add.remote() for _ in range(50))]
    assert miniray.get(refs, timeout=10) == [2, *range(1, 51)]


def test_a_retried_call_has_its_large_argument_again(engine, path):
    import numpy as np

    array = miniray.put(np.ones(1_000_000))
    actor = Phoenix.options(max_restarts=1, max_task_retries=1).remote(path)
    refs = [actor.die_until.remote(2), actor.total.remote(array)]
    del array
    assert miniray.get(refs, timeout=10) == [2, 1_000_000]


def test_the_constructor_gets_its_arguments_again(engine):
    import numpy as np

    @miniray.remote(max_restarts=1, max_task_retries=-1)
    class Holder:
        def __init__(self, array, boxed):
            self.total = float(array.sum() + miniray.get(boxed[0]))

        def get(self):
            return self.total, os.getpid()

    holder = Holder.remote(miniray.put(np.ones(1_000_000)), [miniray.put(5)])
    total, pid = miniray.get(holder.get.remote())
    os.kill(pid, signal.SIGKILL)
    again, other = miniray.get(holder.get.remote(), timeout=SOON)
    while other == pid:  # answered before it died
        again, other = miniray.get(holder.get.remote(), timeout=SOON)
    assert total == again == 1_000_005


def test_kill_may_allow_a_restart(engine):
    actor = Phoenix.options(max_restarts=1, max_task_retries=1).remote()
    first = miniray.get(actor.pid.remote())
    miniray.kill(actor, no_restart=False)
    eventually(lambda: first not in pids(engine), SOON)
    assert miniray.get(actor.pid.remote(), timeout=SOON) != first
    miniray.kill(actor)
    eventually(lambda: len(pids(engine)) == 1, SOON)
    fails_soon(actor.pid.remote(), ActorDiedError, "kill")


class AsyncPhoenix(Phoenix.__wrapped__):
    async def leave(self, code):
        super().leave(code)


LIVES = pytest.mark.parametrize(
    "actor_class",
    [Phoenix, Phoenix.options(max_concurrency=2), miniray.remote(AsyncPhoenix)],
    ids=["plain", "threads", "async"],
)


@LIVES
def test_leaving_on_purpose_is_final(engine, actor_class):
    actor = actor_class.options(max_restarts=5).remote()
    fails_soon(actor.leave.remote(0), ActorDiedError, "exited with code 0", "sys.exit()")
    fails_soon(actor.pid.remote(), ActorDiedError)


@LIVES
def test_exit_without_a_word_is_a_crash_whatever_its_code(engine, actor_class):
    actor = actor_class.options(max_restarts=1).remote()
    fails_soon(actor.vanish.remote(), ActorDiedError, "exited with code 0", "being restarted")
    assert miniray.get(actor.add.remote(), timeout=5 * SOON) == 1


def test_a_failing_constructor_is_not_tried_for_ever(engine, path):
    @miniray.remote(max_restarts=2)
    class Doomed:
        def __init__(self, path):
            with open(path, "a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)

        def ping(self):
            return 1

    ref = Doomed.remote(path).ping.remote()
    fails_soon(ref, ActorDiedError, "SIGKILL")
    eventually(lambda: os.path.getsize(path) <= 3, SOON)


@miniray.remote
def die_until(path, times):
    with open(path, "a") as file:
        file.write("x")
    if os.path.getsize(path) < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.path.getsize(path)


def test_a_task_is_retried_three_times_by_default(engine, path):
    assert miniray.get(die_until.remote(path, 4), timeout=10) == 4


def test_a_task_is_retried_as_often_as_said(engine, path):
    fails_soon(die_until.options(max_retries=1).remote(path, 99), WorkerCrashedError, "SIGKILL")
    assert os.path.getsize(path) == 2


def test_tasks_that_only_waited_lose_no_retry(engine, path):
    """Short tasks are sent in bundles; those behind the one that died did not run."""
    short = miniray.remote(abs).options(max_retries=0)
    miniray.get([short.remote(-1) for _ in range(200)])  # it is known to be short now
    killer = die_until.options(max_retries=0).remote(path, 99)
    refs = [short.remote(-i) for i in range(200)]
    fails_soon(killer, WorkerCrashedError)
    assert miniray.get(refs, timeout=10) == list(range(200))


def test_the_zygote_killed(engine):
    """All workers go with it; the engine makes another one when it needs it."""
    plain = Phoenix.options(name="plain").remote()
    restarted = Phoenix.options(max_restarts=1, max_task_retries=1).remote()
    old = [miniray.get(plain.pid.remote()), miniray.get(restarted.pid.remote())]
    zygote = pids(engine)[0]
    os.kill(zygote, signal.SIGKILL)
    eventually(lambda: not any(map(is_process, old)), SOON)
    fails_soon(plain.pid.remote(), ActorDiedError, "SIGKILL")
    assert miniray.get(restarted.pid.remote(), timeout=SOON) not in old
    assert miniray.get(die_until.remote("/dev/null", 0), timeout=SOON) == 0
    assert miniray.get(Phoenix.options(name="plain").remote().add.remote(), timeout=SOON) == 1


def test_the_zygote_killed_again_and_again(engine):
    for _ in range(5):
        actor = Phoenix.remote()
        pid = miniray.get(actor.pid.remote())  # it is there, and not still to be started
        refs = [actor.add.remote() for _ in range(10)]
        os.kill(pids(engine)[0], signal.SIGKILL)
        assert miniray.wait(refs, num_returns=10, timeout=5)[1] == []
        eventually(lambda pid=pid: not is_process(pid), SOON)
        fails_soon(actor.add.remote(), ActorDiedError)


def test_what_workers_started_ends_when_the_zygote_is_killed(engine):
    @miniray.remote
    class Parent:
        def start(self):
            import subprocess

            return subprocess.Popen(["sleep", "600"]).pid

    actor = Parent.remote()
    child = miniray.get(actor.start.remote())
    os.kill(pids(engine)[0], signal.SIGKILL)
    eventually(lambda: not is_process(child), SOON)
