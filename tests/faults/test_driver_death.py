"""The driver ends in every way there is: within five seconds nothing of its session is left."""

import fcntl
import os
import signal
import subprocess
import time

import pytest

import miniray
from miniray.core.local import driver as local_driver
from tests.faults.helpers import GONE, eventually, is_process, session_directories, shared_names

#: A driver with everything at once: actors that call each other, tasks, large objects, a program
#: started by an actor, and a forked child that holds all of the driver's descriptors.
SCRIPT = """
    import os, signal, subprocess, sys, threading, time
    import numpy as np
    import miniray

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may run the tests, ignores it

    @miniray.remote
    class Worker:
        def __init__(self, other=None):
            self.other = other
            self.kept = np.ones(2_000_000)

        def start_program(self):
            return subprocess.Popen(["sleep", "600"]).pid

        def start_daemon(self):
            # Twice forked and in a session of its own: nobody's child and nobody's group.
            return subprocess.Popen(["setsid", "--fork", "sleep", "600"]).wait()

        def ping(self, *arguments):
            return miniray.get(self.other.ping.remote()) if self.other else 1

        def stubborn(self):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(600)

        def share(self):
            return self.kept

    @miniray.remote
    def busy():
        while True:
            pass

    def main(end):
        miniray.init(num_workers=2)
        first = Worker.remote()
        second = Worker.remote(first)
        miniray.get([first.start_program.remote(), second.start_daemon.remote()])
        array = miniray.put(np.ones(3_000_000))
        miniray.get([second.ping.remote(array), first.share.remote()])
        running = [busy.remote(), first.stubborn.remote(), second.ping.remote(array)]
        if end != "exec" and os.fork() == 0:
            os.setsid()
            os.write(1, f"child {os.getpid()}\\n".encode())
            for fd in (1, 2):
                os.close(fd)
            time.sleep(8)  # ends by itself: it is the user's own process, not ours
            os._exit(0)
        threading.Thread(target=lambda: miniray.get(running), daemon=True).start()
        if end == "swallow":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        os.write(1, b"ready\\n")  # in one piece: the child writes to the same pipe
        sys.stdin.readline()
        if end == "wait":
            miniray.get(running)
        elif end == "loop":
            while True:
                miniray.put(np.ones(1_000_000))
                miniray.wait([second.ping.remote(array)], timeout=0.001)
        elif end == "raise":
            raise ValueError("uncaught")
        elif end == "exit":
            sys.exit(5)
        elif end == "return":
            return
        elif end == "os_exit":
            os._exit(6)
        elif end == "abort":
            os.abort()
        elif end == "exec":
            os.execvp("sleep", ["sleep", "600"])
        elif end == "swallow":
            time.sleep(600)

    main(sys.argv[1])
"""


@pytest.fixture
def run(drivers):
    """Start the script up to the point where everything runs; (driver, the forked child)."""

    def start(end):
        driver = drivers.start(SCRIPT, end, stdin=subprocess.PIPE)
        said = {"child": [0]} if end == "exec" else {}
        while len(said) < 2:
            line = driver.process.stdout.readline()
            assert line, driver.process.stderr.read()
            word, *rest = line.split()
            if word in ("ready", "child"):
                said[word] = rest
        eventually(lambda: len(driver.others()) >= 6 - (end == "exec"), 5)
        driver.process.stdin.close()
        return driver, int(said["child"][0])

    return start


@pytest.mark.parametrize(
    ("end", "status"),
    [("raise", 1), ("exit", 5), ("return", 0), ("os_exit", 6), ("abort", -signal.SIGABRT)],
)
def test_the_driver_ends_by_itself(run, end, status):
    driver, child = run(end)
    assert driver.process.wait(GONE) == status
    driver.assert_nothing_left(but={child})


@pytest.mark.parametrize("end", ["wait", "loop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_the_driver_gets_a_signal(run, end, number):
    driver, child = run(end)
    os.kill(driver.pid, number)
    assert driver.process.wait(GONE) == -number
    driver.assert_nothing_left(but={child})


def test_ctrl_c_twice(run):
    driver, child = run("wait")
    os.kill(driver.pid, signal.SIGINT)
    time.sleep(0.02)  # no condition to wait for: into the middle of the shutdown
    os.kill(driver.pid, signal.SIGINT)
    driver.process.wait(GONE)
    driver.assert_nothing_left(but={child})


def test_ctrl_c_in_the_terminal_reaches_only_the_driver(drivers):
    """The terminal signals its whole foreground group; workers must not print their own stacks."""
    driver = drivers.start(
        """
        import time, miniray

        @miniray.remote
        class Worker:
            def sleep(self):
                time.sleep(600)

        worker = Worker.remote()
        ref = worker.sleep.remote()
        miniray.wait([ref], timeout=0.2)
        print("ready", flush=True)
        miniray.get(ref)
        """,
        start_new_session=True,
    )
    driver.expect("ready")
    os.killpg(driver.pid, signal.SIGINT)
    _, errors = driver.process.communicate(timeout=GONE)
    assert errors.count("KeyboardInterrupt") == 1
    driver.assert_nothing_left()


def test_a_handler_that_exits_on_sigterm(run):
    driver, child = run("swallow")
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.process.wait(GONE) == 7
    driver.assert_nothing_left(but={child})


def test_the_driver_becomes_another_program(run):
    driver, _ = run("exec")
    eventually(lambda: not driver.others(), GONE)
    assert is_process(driver.pid)


def test_a_stopped_worker_does_not_hold_up_the_end(drivers):
    driver = drivers.start(
        """
        import os, signal, miniray

        @miniray.remote
        class Worker:
            def pid(self):
                return os.getpid()

        workers = [Worker.remote() for _ in range(2)]
        for pid in miniray.get([w.pid.remote() for w in workers]):
            os.kill(pid, signal.SIGSTOP)
        print("ready", flush=True)
        """
    )
    driver.expect("ready")
    assert driver.process.wait(GONE) == 0
    driver.assert_nothing_left()


def test_a_stopped_zygote_does_not_hold_up_the_end(drivers):
    driver = drivers.start(
        """
        import os, signal, miniray
        from miniray.core import session

        @miniray.remote
        class Worker:
            def parent(self):
                return os.getppid()

        worker = Worker.remote()
        os.kill(miniray.get(worker.parent.remote()), signal.SIGSTOP)
        print("ready", flush=True)
        """
    )
    driver.expect("ready")
    assert driver.process.wait(2 * GONE) == 0
    driver.assert_nothing_left()


def test_everything_killed_at_once(drivers):
    """Nobody is left to remove the sockets; the next session does it."""
    script = """
        import time, miniray

        @miniray.remote
        class Worker:
            def ping(self):
                return 1

        workers = [Worker.remote() for _ in range(3)]
        miniray.get([w.ping.remote() for w in workers])
        print("ready", flush=True)
        time.sleep(600)
    """
    driver = drivers.start(script)
    driver.expect("ready")
    everything = [driver.pid, *driver.others()]
    for pid in everything:  # stopped first, so that none of them has time to clean up
        os.kill(pid, signal.SIGSTOP)
    for pid in everything:
        os.kill(pid, signal.SIGKILL)
    driver.process.wait(GONE)
    eventually(lambda: not driver.others(), GONE)
    (left,) = session_directories(driver.runtime_dir)
    second = drivers.start(script)
    second.expect("ready")
    assert left not in session_directories(driver.runtime_dir)
    second.process.kill()
    second.process.wait()
    second.assert_nothing_left()


def test_a_killed_driver_leaves_no_shared_memory(drivers):
    """Neither names in /dev/shm nor nameless memory: what was in use before is in use after."""

    def shared_memory():
        with open("/proc/meminfo") as file:
            (line,) = (line for line in file if line.startswith("Shmem:"))
        return int(line.split()[1]) * 1024

    names = shared_names()
    before = shared_memory()
    driver = drivers.start(
        """
        import time, numpy as np, miniray

        @miniray.remote
        class Worker:
            def keep(self, array):
                self.array = array
                return array * 2

        refs = [miniray.put(np.ones(25_000_000)) for _ in range(2)]
        results = miniray.get([Worker.remote().keep.remote(ref) for ref in refs])
        print("ready", flush=True)
        time.sleep(600)
        """
    )
    driver.expect("ready")
    assert shared_memory() - before > 600_000_000
    assert shared_names() <= names
    driver.process.kill()
    driver.process.wait()
    driver.assert_nothing_left()
    eventually(lambda: shared_memory() - before < 100_000_000, GONE)


def test_many_sessions_start_at_once(drivers):
    """Each sweeps what dead ones left; none must take another that is just starting for dead."""
    script = """
        import miniray
        for _ in range(10):
            miniray.init(num_workers=1)
            assert miniray.get(miniray.remote(abs).remote(-1)) == 1
            miniray.shutdown()
    """
    running = [drivers.start(script) for _ in range(6)]
    for driver in running:
        _, errors = driver.process.communicate(timeout=50)
        assert driver.process.returncode == 0, errors
        driver.assert_nothing_left()


def test_a_session_is_not_swept_while_it_starts(own_directory, monkeypatch):
    """Somebody sweeps in the very moment between making the lock file and taking the lock."""
    take = fcntl.flock

    def sweep_first(fd, how):
        monkeypatch.setattr(fcntl, "flock", take)
        local_driver._sweep(os.path.join(own_directory, f"miniray-{os.getuid()}"))
        take(fd, how)

    monkeypatch.setattr(fcntl, "flock", sweep_first)
    miniray.init(num_workers=1)
    assert miniray.get(miniray.remote(abs).remote(-1)) == 1


def test_a_driver_whose_parent_vanishes(drivers):
    """A shell that dies does not take the driver along: it goes on, and cleans up at its end."""
    driver = drivers.start(
        """
        import os, sys, time, miniray
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.01)
        assert miniray.get(miniray.remote(abs).remote(-1)) == 1
        print("done", flush=True)
        """,
        stderr=subprocess.STDOUT,
    )
    driver.expect("done")
    driver.assert_nothing_left()
