"""What the fault tests share: waiting with a limit, looking into /proc, drivers as subprocesses."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid

import psutil
import pytest

import miniray
from tests.conformance.helpers import eventually, is_process

#: Every process that a driver under test starts inherits this variable from it.
MARK = "MINIRAY_TEST_MARK"
#: How long after a death every waiting ``get`` has its error.
SOON = 2.0
#: How long after a driver's death nothing of it is left.
GONE = 5.0


def fails_soon(ref, kind, *words):
    """``get(ref)`` raises ``kind`` within ``SOON`` seconds, with ``words`` in its text."""
    with pytest.raises(kind) as caught:
        miniray.get(ref, timeout=SOON)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return text


def session_directories(folder):
    """Directories of sessions under a test's ``XDG_RUNTIME_DIR``; logs stay and do not count."""
    base = os.path.join(folder, f"miniray-{os.getuid()}")
    try:
        return [name for name in os.listdir(base) if name != "logs"]
    except FileNotFoundError:
        return []


def pids(engine):
    """Live processes of the session, the driver aside: the zygote first, then its children."""
    zygotes = [c for c in psutil.Process().children() if "local.zygote" in _command(c)]
    children = [c for z in zygotes for c in z.children() if is_process(c.pid)]
    return [process.pid for process in zygotes + children]


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


def counts(engine):
    """What the driver's node keeps track of; all zero when nothing is in use."""
    node = engine.node
    return {
        "shared": len(node.shared),
        "borrowed": len(node.borrowed),
        "asked": len(node.asked),
        "awaited": len(node.awaited),
    }


def settles_to(engine, expected):
    """The node's books come back to ``expected``; actors and refs of the test must be gone."""
    gc.collect()
    try:
        eventually(lambda: counts(engine) == expected, 10)
    except AssertionError:
        assert counts(engine) == expected  # shows both
        raise


def used(engine):
    """Bytes in shared memory apart from segments kept warm for the next use."""
    engine.node.store.trim()
    return engine.node.usage.total() - sum(s.size for s in engine.node.store._free)


def shared_names():
    """Names in /dev/shm, but for the semaphores that multiprocessing makes in other programs."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def marked(mark):
    """Live processes whose environment carries ``mark``, by pid, with their command line."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if wanted not in file.read().split(b"\0"):
                    continue
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile
        if is_process(int(name)):  # a zombie is nobody's leak but its parent's
            found[int(name)] = command[:120]
    return found


class Drivers:
    """Scripts run as drivers in subprocesses, with a mark on all their descendants."""

    def __init__(self, runtime_dir, folder):
        self.runtime_dir = runtime_dir
        self.folder = folder
        self._started = []

    def start(self, script, *args, **options):
        """Start ``script`` (dedented source); its output is captured unless ``options`` differ."""
        mark = uuid.uuid4().hex
        path = os.path.join(self.folder, f"driver-{len(self._started)}.py")
        with open(path, "w") as file:
            file.write(textwrap.dedent(script))
        environment = {
            **os.environ,
            MARK: mark,
            "XDG_RUNTIME_DIR": self.runtime_dir,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUNBUFFERED": "1",
        }
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(
            [sys.executable, path, *map(str, args)], env=environment, **settings
        )
        driver = Driver(process, mark, self.runtime_dir)
        self._started.append(driver)
        return driver

    def run(self, script, *args, **options):
        """Run ``script`` to its end; (exit status, stdout, stderr)."""
        driver = self.start(script, *args, **options)
        out, err = driver.process.communicate(timeout=50)
        return driver.process.returncode, out, err

    def close(self):
        for driver in self._started:
            for pid in marked(driver.mark):
                os.kill(pid, signal.SIGKILL)
            driver.process.kill()
            driver.process.wait()
            for pipe in (driver.process.stdout, driver.process.stderr):
                if pipe is not None:
                    pipe.close()


class Driver:
    """One running driver script."""

    def __init__(self, process, mark, runtime_dir):
        self.process = process
        self.mark = mark
        self.runtime_dir = runtime_dir

    def expect(self, word):
        """Read its output up to a line that starts with ``word``; that line's other words."""
        for line in self.process.stdout:
            if line.startswith(word):
                return line.split()[1:]
        raise AssertionError(f"it ended without saying {word!r}: {self.process.stderr.read()}")

    def others(self):
        """Its descendants, itself not counted."""
        return {pid: command for pid, command in marked(self.mark).items() if pid != self.pid}

    @property
    def pid(self):
        return self.process.pid

    def assert_nothing_left(self, but=()):
        """No process and no directory of it, at the latest ``GONE`` seconds from now."""
        deadline = time.monotonic() + GONE
        while time.monotonic() < deadline:
            left = {pid: command for pid, command in marked(self.mark).items() if pid not in but}
            if not left and not session_directories(self.runtime_dir):
                return
            time.sleep(0.02)
        raise AssertionError(f"left: {left}, {session_directories(self.runtime_dir)}")


__all__ = ["GONE", "MARK", "SOON", "Driver", "Drivers", "eventually", "fails_soon", "is_process"]
