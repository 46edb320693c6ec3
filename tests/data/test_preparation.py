"""Filters and cache builds that take longer than the hang timeout count as progress."""

import json
import subprocess
import sys
import time

import pytest

pytest.importorskip("pyarrow")

from miniray.data import ArrowDataset, ParquetDataset
from miniray.data.observers import preparation_hooks
from miniray.doctor.diagnose import examine
from miniray.doctor.findings import Severity
from miniray.doctor.layout import PREPARING
from miniray.doctor.model import Phase
from tests.doctor import records

HANG_TIMEOUT = 1.5  # seconds; the filters below take twice as long


def create_slow_filter(seconds, rows):
    def keep(row):
        time.sleep(seconds / rows)
        return True

    return keep


@pytest.fixture
def reports():
    found = []
    preparation_hooks.append(found.append)
    yield found
    preparation_hooks.remove(found.append)


def test_filter_reports_progress_and_its_end(parquet_folder, reports):
    dataset = ParquetDataset(parquet_folder, filter=lambda row: True)
    assert reports == []
    dataset.prepare()
    assert reports[0] is True
    assert reports[-1] is False
    assert reports.count(False) == 1
    assert reports.count(True) > 1
    del reports[:]
    dataset.prepare()
    assert reports == []


def test_cache_build_reports_progress_and_its_end(parquet_folder, reports):
    ParquetDataset(parquet_folder, shuffle="global", seed=1).prepare()
    assert reports.count(False) == 1
    assert reports.count(True) > 1
    assert reports[-1] is False


def test_end_is_reported_after_an_error(parquet_folder, reports):
    def fail(row):
        raise KeyError("x")

    with pytest.raises(ValueError, match="KeyError"):
        ParquetDataset(parquet_folder, filter=fail).prepare()
    assert reports[-1] is False


SCRIPT = """
import json, os, sys, time
import pyarrow as pa
from miniray import doctor
from miniray.data import ArrowDataset
from miniray.doctor import recorder
from miniray.doctor.reader import BoxReader

phases = set()

def keep(row):
    time.sleep({seconds} / 100)
    phases.add(BoxReader(recorder.current().box.path).record().phase.name)
    return True

doctor.attach()
rank = int(os.environ["RANK"])
if rank == 0:
    ArrowDataset({{"x": range(100)}}, filter=keep).prepare()
    after = BoxReader(recorder.current().box.path).record().phase.name
    print(json.dumps([sorted(phases), after]), flush=True)
doctor.barrier("data is ready", timeout=100)
"""


def test_launcher_waits_for_a_filter_that_sleeps(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(seconds=2 * HANG_TIMEOUT))
    options = ["--nproc", "2", "--run-dir", "run", "--hang-timeout", str(HANG_TIMEOUT)]
    done = subprocess.run(
        [sys.executable, "-m", "miniray", "run", *options, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "doctor.txt").exists()
    phases, after = json.loads(done.stdout[done.stdout.index("[[") :])
    assert phases == [PREPARING]
    assert after != PREPARING


def test_doctor_waits_as_long_as_there_is_progress():
    def prepares(ago):
        phase = Phase(PREPARING, records.at(5), records.NOW - ago)
        waits = records.calling(0, records.call(1, is_open=True))
        run = records.run(waits, records.rank(1, phase=phase, events=(), event_count=0))
        return examine(run).findings

    assert prepares(ago=records.LIMIT / 2) == ()
    (finding,) = prepares(ago=records.LIMIT * 2)
    assert (finding.ranks, finding.severity) == ((1,), Severity.STUCK)
    assert PREPARING in "\n".join(finding.evidence)


def test_trainer_waits_for_a_filter_that_sleeps(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from miniray.train import DDPTrainer
    from tests.train.ddp_for_tests import Looper

    class Preparing(Looper):
        def train_epoch(self, epoch):
            keep = create_slow_filter(2 * HANG_TIMEOUT, 100)
            ArrowDataset({"x": range(100)}, filter=keep).prepare()
            return super().train_epoch(epoch)

    monkeypatch.chdir(tmp_path)
    with DDPTrainer(2, worker=Preparing, progress=False, hang_timeout=HANG_TIMEOUT) as trainer:
        assert trainer.train(epochs=1).epochs == 1
