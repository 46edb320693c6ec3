"""A rank or the driver is killed in each phase, for each kind of trainer: no bit changes."""

import os
import pickle
import signal

import pytest

import miniray
from tests.train.kills_for_tests import (
    DRIVER,
    KINDS,
    PHASES,
    SNAPSHOT_EVERY,
    STEPS,
    check_equal,
    check_recovery,
    train_undisturbed,
)

pytestmark = pytest.mark.timeout(240)  # processes start slowly on a machine that is busy

#: All phases in two kinds of trainers, and half of them in each kind.
SELECTED = {
    ("ddp", 3): (("data", 1), ("evaluation", 1), ("snapshot", 2), ("backward", 1)),
    ("full", 2): (("forward", 5), ("epoch end", 1), ("checkpoint", 0), ("optimizer", 1)),
    ("pipeline", 4): (("evaluation", 1), ("backward", 1), ("checkpoint", 0), ("forward", 1)),
    ("tensor", 2): (("data", 1), ("snapshot", 2), ("epoch end", 1), ("optimizer", 1)),
}
#: Every phase once, in an order in which each is reached soon after the restart from the last kill.
ALL = (
    *(("data", 1), ("evaluation", 1), ("forward", 1), ("snapshot", 2)),
    *(("epoch end", 1), ("backward", 1), ("checkpoint", 0), ("optimizer", 1)),
)


@pytest.fixture(autouse=True, scope="module")
def engine():
    """One engine for all: its first worker loads torch for the others."""
    with miniray.init(backend="local", num_workers=4):
        yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """As everywhere, but the engine keeps running."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("kind", "world_size", "places"),
    [
        *((kind, n, places) for (kind, n), places in SELECTED.items()),
        *(pytest.param(kind, 3, ALL, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_kills_in_several_phases_of_one_run(kind, world_size, places, tmp_path):
    restarts = check_recovery(kind, world_size, places, tmp_path)
    assert max(event.get("lost_steps") or 0 for event in restarts) <= SNAPSHOT_EVERY


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_kill_in_each_phase(kind, world_size, phase, tmp_path):
    """In the second epoch, after a first that was trained in the same processes."""
    steps = STEPS + 3 if phase in PHASES[:4] else None
    step = {"snapshot": STEPS + 4, "evaluation": STEPS + 4, "checkpoint": 0}.get(phase, steps)
    (restart,) = check_recovery(kind, world_size, ((phase, step or 2 * STEPS),), tmp_path)
    assert (restart.get("lost_steps") or 0) <= SNAPSHOT_EVERY


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_kills_before_a_new_snapshot(kind, tmp_path):
    """The second one hits the ranks that have just restarted."""
    first, second = check_recovery(kind, 2, (("forward", 5), ("backward", 1)), tmp_path)
    assert first["resumed_at_step"] == second["resumed_at_step"] == 4


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("ddp", 2),
        *(pytest.param(kind, n, marks=pytest.mark.slow) for kind in KINDS[1:] for n in (2, 4)),
    ],
)
def test_killed_driver_resumes_inside_the_epoch(kind, world_size, tmp_path, run_script):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nfrom tests.train.kills_for_tests import main\nmain(*sys.argv[1:])"
    )
    arguments = ("outcome", kind, world_size, f"{DRIVER}:{STEPS + 6}")
    options = {"cwd": tmp_path, "env": dict(os.environ), "timeout": 120}
    killed = run_script(script, *arguments, **options)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_script(script, *arguments, **options)
    assert resumed.returncode == 0, resumed.stderr
    found = pickle.loads((tmp_path / "outcome").read_bytes())
    check_equal(found, train_undisturbed(kind, world_size, tmp_path))
