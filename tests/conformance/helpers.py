"""What the conformance tests share. Imported by workers too, so it imports little."""

import os
import time


def needs(engine, *capabilities):
    """Skip the running test on an engine that declares it lacks one of ``capabilities``."""
    import pytest

    for capability in capabilities:
        if not getattr(engine.capabilities, capability):
            pytest.skip(f"the {engine.name} engine has no {capability!r} capability")


def eventually(condition, timeout=20.0):
    """Poll until ``condition()`` is true and return its value; fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {timeout:g} s")
        time.sleep(0.01)


class Gate:
    """Something to wait for across processes: a file that appears when the gate is opened.

    ``announce`` and ``arrived`` tell the other side that somebody waits.
    """

    def __init__(self, folder, name="gate"):
        self.path = os.path.join(str(folder), name)

    def open(self):
        with open(self.path, "w"):
            pass

    def is_open(self):
        return os.path.exists(self.path)

    def wait(self, timeout=30.0):
        eventually(self.is_open, timeout)

    def announce(self):
        with open(self.path + ".waiting", "w"):
            pass

    def arrived(self):
        return os.path.exists(self.path + ".waiting")


def exists(name, namespace=None):
    """Whether an actor of that name is alive."""
    import miniray

    try:
        miniray.get_actor(name, namespace)
    except ValueError:
        return False
    return True


def is_process(pid):
    """Whether a process is there and not a zombie."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
