"""Faults injected in real processes of the local engine. Each test starts its own engine."""

import gc
import shutil
import tempfile
import threading

import psutil
import pytest

import miniray
from miniray.core import session
from tests.faults.helpers import Drivers, session_directories


@pytest.fixture(autouse=True)
def own_directory(monkeypatch):
    """Sockets and logs of this test's sessions in a place of their own, to see what is left."""
    # Not tmp_path: the path of a Unix socket has room for about a hundred characters.
    folder = tempfile.mkdtemp(prefix="mr-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
    monkeypatch.delenv("MINIRAY_BACKEND", raising=False)
    # Other tests have loaded torch in this process; to load it in each zygote proves nothing.
    monkeypatch.setattr("miniray.core.local.spawner.PRELOAD", ("numpy",))
    yield folder
    miniray.shutdown()
    left = session_directories(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"shutdown left {left}"


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch):
    """An exception in one of the engine's threads fails the test: it would be a hang elsewhere."""
    failures = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    yield
    texts = [str(f.exc_value) for f in failures]
    assert not failures, f"{failures[0].thread}: {texts}"


@pytest.fixture
def engine(own_directory):
    """A running engine of two task workers."""
    miniray.init(num_workers=2, num_cpus=4)
    yield session.engine()
    miniray.shutdown()
    gc.collect()


@pytest.fixture
def drivers(own_directory, tmp_path):
    """Runs scripts as drivers; kills what a failed test left of them."""
    group = Drivers(own_directory, tmp_path)
    yield group
    group.close()


@pytest.fixture(scope="session", autouse=True)
def no_zombies():
    """Every process of every test was waited for."""
    yield
    left = psutil.Process().children()
    assert not [child for child in left if child.status() == psutil.STATUS_ZOMBIE]
    assert not [child for child in left if "zygote" in " ".join(child.cmdline())]
