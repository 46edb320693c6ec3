"""Cancelling a task that waits for its argument, on the local engine.

Not among the conformance tests: it makes Ray 2.60 abort the driver (reference_counter.cc, "Check
failed: submitted_task_ref_count > 0"), so it cannot even be tried there.
"""

import pytest

import miniray
from miniray.errors import TaskCancelledError
from tests.conformance.helpers import Gate


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
