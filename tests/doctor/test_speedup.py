"""Speed-up, efficiency and the expected bands; the measuring itself on two tiny runs."""

import json
import os
import subprocess
import sys

import pytest

from miniray.doctor import speedup
from miniray.doctor.speedup import Measured, compare, of_records
from miniray.errors import MinirayError
from tests.doctor.records import rank, steps


def measured(nproc, rate, data=0.1, backward=0.3):
    return Measured(nproc, rate, 50, data, 1 - data - backward, backward, 0.0)


def test_the_bands_of_the_debugging_guide():
    assert [speedup.band(n) for n in (2, 4, 8)] == [(1.8, 1.9), (3.5, 3.8), (7.0, 7.5)]
    assert speedup.band(16) == (14.0, pytest.approx(15.2))


def test_speed_up_and_efficiency_by_hand(golden):
    found = compare([measured(4, 370.0), measured(1, 100.0), measured(2, 150.0)], 1, 8)
    assert [row.speedup for row in found.rows] == pytest.approx([1.0, 1.5, 3.7])
    assert [row.efficiency for row in found.rows] == pytest.approx([1.0, 0.75, 0.925])
    assert [row.verdict for row in found.rows] == ["baseline", "below", "as expected"]
    assert found.exit_code == 1
    golden("speedup/table.txt", found.text() + "\n")


def test_a_baseline_of_two_ranks():
    """From 2 to 8 ranks one may expect 7.0/1.9 to 7.5/1.8 times as much, of 2."""
    found = compare([measured(2, 100.0), measured(8, 380.0)], 1, 8)
    assert found.rows[1].speedup == pytest.approx(7.6)
    assert (found.rows[1].low, found.rows[1].high) == pytest.approx((14 / 1.9, 15 / 1.8))


@pytest.mark.parametrize(
    ("last", "cores", "reason"),
    [
        (measured(4, 150.0), 2, "cores"),
        (measured(4, 150.0, data=0.6), 8, "data"),
        (measured(4, 150.0, backward=0.7), 8, "gradients"),
        (measured(4, 150.0), 8, "compute"),
    ],
)
def test_why_it_falls_short(last, cores, reason, golden):
    found = compare([measured(1, 100.0), last], 1, cores)
    assert found.exit_code == 1
    golden(f"speedup/{reason}.txt", found.text() + "\n")


def test_rates_add_up_over_ranks_without_the_warm_up():
    # 3 warm-up steps of 9 s do not count; then 8 samples in 0.1 s (99 ms and a backward of 1 ms).
    times = [9.0] * 3 + [0.099] * 10
    records = {n: rank(n, history=steps(times)) for n in range(2)}
    found = of_records(2, records)
    assert found.rate == pytest.approx(2 * 8 / 0.1)
    assert found.steps == 10
    assert found.backward == pytest.approx(0.01)


def test_too_few_steps_are_refused():
    with pytest.raises(MinirayError, match=r"rank 0 .*4 .*8 .*doctor\.step"):
        of_records(1, {0: rank(0, 1, history=steps([0.1] * 4), step=4)})


SCRIPT = """
import os, time
from miniray import doctor

assert os.environ["OMP_NUM_THREADS"] == "1", os.environ["OMP_NUM_THREADS"]
for _ in range(12):
    time.sleep(0.02)
    doctor.step(batch_size=4)
"""


@pytest.mark.timeout(120)
def test_a_script_is_measured_with_equal_threads(tmp_path):
    script = tmp_path / "sleep.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "miniray", "doctor", "speedup", script, "--nproc", "1,2", "--json"],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.stdout, done.stderr
    one, two = json.loads(done.stdout)["rows"]
    assert (one["verdict"], one["nproc"], two["nproc"]) == ("baseline", 1, 2)
    assert (one["steps"], two["steps"]) == (9, 9)  # 12, of which 3 warm up
    assert two["speedup"] == pytest.approx(two["rate"] / one["rate"])
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2)


def test_a_script_that_fails_is_shown(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no data here')")
    done = subprocess.run(
        [sys.executable, "-m", "miniray", "doctor", "speedup", str(script), "--nproc", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    assert "1 rank" in done.stderr
    assert "ValueError: no data here" in done.stderr
