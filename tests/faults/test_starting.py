"""Processes that cannot be started, or start in odd places: the others run on, and it is said."""

import errno
import os
import resource
import signal

import pytest

import miniray
from miniray.core import startup
from miniray.errors import ActorDiedError, WorkerCrashedError
from tests.faults.helpers import SOON, eventually, fails_soon
from tests.faults.workers import Counter, double

#: A module for the zygote after which it can fork only as often as a file says.
NO_FORK = """
import errno, os

fork = os.fork

def limited():
    with open({path!r}) as file:
        left = int(file.read())
    if not left:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    with open({path!r}, "w") as file:
        file.write(str(left - 1))
    return fork()

os.fork = limited
"""


@pytest.fixture
def forks(tmp_path, monkeypatch):
    """Sets how many more processes the zygote of this test can start."""
    path = tmp_path / "left"
    (tmp_path / "no_fork.py").write_text(NO_FORK.format(path=str(path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    path.write_text("1000")
    return lambda count: path.write_text(str(count))


def test_a_system_without_room_for_processes(forks, engine):
    old = Counter.options(runtime_env={"env_vars": {startup.PRELOAD: "no_fork"}}).remote()
    assert miniray.get(old.add.remote(), timeout=30) == 1
    forks(0)
    new = Counter.remote()
    reason = os.strerror(errno.EAGAIN)
    for ref, kind in ((new.add.remote(), ActorDiedError), (double.remote(1), WorkerCrashedError)):
        with pytest.raises(kind, match=reason) as caught:
            miniray.get(ref, timeout=SOON)
        assert not caught.value.pid
    assert miniray.get(old.add.remote(), timeout=SOON) == 2
    forks(1000)
    assert miniray.get(Counter.remote().add.remote(), timeout=30) == 1
    assert miniray.get(double.remote(1), timeout=30) == 2


def dead_for_good(actor):
    """Return the error of its death, or None while it restarts and calls can't be sent."""
    with pytest.raises((ActorDiedError, OSError)) as caught:
        miniray.get(actor.add.remote(), timeout=SOON)
    if isinstance(caught.value, ActorDiedError):
        return caught.value
    assert caught.value.errno == errno.EMFILE
    return None


def test_descriptors_run_out_at_a_restart(engine):
    """In the I/O thread, where an error would be the end of everything."""
    other = Counter.remote()
    miniray.get(other.pid.remote(), timeout=30)
    before = set(os.listdir("/proc/self/fd"))
    fragile = Counter.options(max_restarts=5).remote()
    pid = miniray.get(fragile.pid.remote(), timeout=30)
    # Below all that the actor has here: what its death sets free cannot be taken again.
    lowest = min(int(fd) for fd in os.listdir("/proc/self/fd") if fd not in before)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        with pytest.raises(OSError) as full:
            while True:
                kept.append(os.open(os.devnull, os.O_RDONLY))
        assert full.value.errno == errno.EMFILE
        os.kill(pid, signal.SIGSTOP)
        sent = fragile.add.remote()  # while there is a connection
        os.kill(pid, signal.SIGKILL)
        fails_soon(sent, ActorDiedError)
        error = eventually(lambda: dead_for_good(fragile))
        assert not error.pid
        assert os.strerror(errno.EMFILE) in str(error)
        assert miniray.get(other.add.remote(), timeout=SOON) == 1
    finally:
        for fd in kept:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert miniray.get(other.add.remote(), timeout=SOON) == 2
    assert miniray.get(double.remote(1), timeout=30) == 2


@pytest.mark.parametrize("name", ["x" * 300, "模型" * 60, "a/b\n\0c"], ids=["long", "wide", "odd"])
def test_any_name_will_do(engine, name):
    actor = Counter.options(name=name).remote()
    assert miniray.get(actor.add.remote(), timeout=30) == 1
    assert miniray.get_actor(name) == actor


def test_a_driver_whose_directory_is_gone(drivers, tmp_path):
    status, out, err = drivers.run(
        """
        import os, sys, miniray
        os.mkdir(sys.argv[1])
        os.chdir(sys.argv[1])
        os.rmdir(sys.argv[1])

        @miniray.remote
        def double(x):
            return 2 * x

        print("got", miniray.get(double.remote(4), timeout=30))
        """,
        tmp_path / "gone",
    )
    assert status == 0, err
    assert "got 8" in out


def test_a_driver_without_a_terminal(drivers, tmp_path):
    """As a daemon runs: none of the three standard descriptors is open."""
    status, _, _ = drivers.run(
        """
        import os, sys
        os.closerange(0, 3)
        import miniray

        @miniray.remote
        def double(x):
            print("doubling")
            return 2 * x

        with open(sys.argv[1], "w") as file:
            file.write(str(miniray.get(double.remote(4), timeout=30)))
        """,
        tmp_path / "got",
    )
    assert status == 0
    assert (tmp_path / "got").read_text() == "8"


@pytest.mark.parametrize("how", ["close", "none", "replace"])
def test_a_worker_without_an_output(engine, how):
    """User code may do with ``sys.stdout`` what it likes."""

    @miniray.remote
    class Silent:
        def close(self):
            import sys

            sys.stdout.close()

        def none(self):
            import sys

            sys.stdout = sys.stderr = None

        def replace(self):
            import sys

            with open(os.devnull, "w") as sys.stdout:
                print("nobody hears this")

        def ping(self):
            return "pong"

    silent = Silent.remote()
    miniray.get(getattr(silent, how).remote(), timeout=30)
    assert miniray.get(silent.ping.remote(), timeout=30) == "pong"
