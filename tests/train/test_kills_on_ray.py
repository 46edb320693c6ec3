"""The kills of ``test_kills`` on Ray: without shared memory, ranks restart from the last pause."""

import pytest

import miniray
from tests.train.kills_for_tests import ACTION_EVERY, KINDS, PHASES, STEPS, check_recovery

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def engine():
    pytest.importorskip("ray")
    with miniray.init(backend="ray", num_workers=4):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "snapshot"])
@pytest.mark.parametrize("kind", KINDS)
def test_kill_in_each_phase(kind, phase, tmp_path):
    steps = STEPS + 2 if phase in ("data", "forward", "backward", "optimizer") else ACTION_EVERY
    step = 0 if phase == "checkpoint" else steps
    (restart,) = check_recovery(kind, 2, ((phase, step),), tmp_path)
    assert restart["resumed_at_step"] % ACTION_EVERY == 0
    assert (restart.get("lost_steps") or 0) <= ACTION_EVERY


@pytest.mark.parametrize("kind", KINDS)
def test_two_kills_before_a_new_pause(kind, tmp_path):
    places = (("forward", ACTION_EVERY + 2), ("backward", 1))
    first, second = check_recovery(kind, 2, places, tmp_path)
    assert first["resumed_at_step"] == second["resumed_at_step"] == ACTION_EVERY
