"""Cancelling tasks that wait, for an argument or for tasks of their own, on the local engine.

Not among the conformance tests: the first makes Ray 2.60 abort the driver (reference_counter.cc,
"Check failed: submitted_task_ref_count > 0"), and Ray does not promise the second.
"""

import os

import pytest

import miniray
from miniray.errors import TaskCancelledError
from tests.conformance.helpers import Gate, eventually


def test_it_is_cancelled_at_once_and_never_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("MINIRAY_BACKEND", raising=False)
    gate, ran = Gate(tmp_path), Gate(tmp_path, "ran")

    @miniray.remote
    def blocked():
        gate.wait()

    @miniray.remote
    def after(_):
        ran.open()

    miniray.shutdown()
    with miniray.init(backend="local", num_cpus=2):
        first = blocked.remote()
        second = after.remote(first)
        miniray.cancel(second)
        with pytest.raises(TaskCancelledError):
            miniray.get(second, timeout=20)
        gate.open()
        miniray.get(first)
        assert not ran.is_open()


@pytest.mark.parametrize("recursive", [True, False])
def test_tasks_that_a_cancelled_one_has_started(tmp_path, monkeypatch, recursive):
    monkeypatch.delenv("MINIRAY_BACKEND", raising=False)
    gate = Gate(tmp_path)

    @miniray.remote
    def leaf(number):
        (tmp_path / f"began {number}").touch()
        try:
            gate.wait()
        except KeyboardInterrupt:
            (tmp_path / f"cut {number}").touch()
            raise

    @miniray.remote
    def branch(depth, number):
        numbers = (2 * number, 2 * number + 1)
        if depth:
            return miniray.get([branch.remote(depth - 1, n) for n in numbers])
        return miniray.get([leaf.remote(n) for n in numbers])

    def files(kind):
        return sorted(name for name in os.listdir(tmp_path) if name.startswith(kind))

    miniray.shutdown()
    with miniray.init(backend="local", num_cpus=4):
        root = branch.remote(1, 0)
        eventually(lambda: len(files("began")) == 4)
        miniray.cancel(root, recursive=recursive)
        with pytest.raises(TaskCancelledError):
            miniray.get(root, timeout=20)
        if not recursive:
            gate.open()
        eventually(lambda: miniray.available_resources()["CPU"] == 4.0)
        assert files("cut") == ([f"cut {i}" for i in range(4)] if recursive else [])
