"""Doctor reports for runs that their trainer stopped."""

import os
import signal

import pytest

import miniray
from miniray.doctor import read_run
from miniray.doctor.diagnose import diagnose
from miniray.doctor.findings import Severity
from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.train import DataParallelTrainer
from tests.time_scale import TIME_SCALE
from tests.train.workers_for_tests import Counter

pytestmark = pytest.mark.usefixtures("_light_workers")


@miniray.remote
class Failing(Counter.__wrapped__):
    def train_epoch(self, epoch, how="raise"):
        if (self.worker_id, epoch) == (1, 1):
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif how == "exit":
                os._exit(3)
            raise ValueError(f"row {17} is bad\nand so is the next")  # the line that is named
        return super().train_epoch(epoch)


LINE = next(
    number
    for number, line in enumerate(open(__file__), start=1)
    if line.endswith("# the line that is named\n")
)


def run(tmp_path, kind, how, **options):
    trainer = DataParallelTrainer(
        2, worker=Failing, run_dir=tmp_path / "run", backend="local", progress=False, **options
    )
    with pytest.raises(kind):
        trainer.train(epochs=3, how=how)
    record = read_run(trainer.run.path)
    return [record.ranks[rank].exit for rank in (0, 1)], diagnose(trainer.run.path)


def check_failed(judgement):
    """Check that rank 1, and no other rank, is reported to have failed."""
    (finding,) = judgement.findings
    assert (finding.severity, finding.ranks) == (Severity.FAILED, (1,))


def test_an_exception_is_named_with_its_line_and_the_others_are_no_causes(tmp_path):
    (other, guilty), judgement = run(tmp_path, ValueError, "raise")
    assert (guilty.kind, guilty.type) == ("exception", "ValueError")
    assert guilty.message == "row 17 is bad (in epoch 2)\nand so is the next"
    assert (os.path.basename(guilty.site.file), guilty.site.line) == ("test_ending.py", LINE)
    assert "ValueError: row 17 is bad" in guilty.traceback
    assert other.by_launcher
    assert guilty.message.splitlines()[0] in judgement.verdict
    check_failed(judgement)
    assert f"test_ending.py:{LINE}" in judgement.verdict


@pytest.mark.parametrize(("how", "verdict"), [("kill", "SIGKILL"), ("exit", "code 3")])
def test_a_death_too_many_is_named_by_how_it_died(tmp_path, how, verdict):
    (other, guilty), judgement = run(tmp_path, ActorDiedError, how, max_failures=1)
    assert (guilty.signal, guilty.code) == (("SIGKILL", None) if how == "kill" else ("", 3))
    assert (guilty.by_launcher, other.by_launcher) == (False, True)
    check_failed(judgement)
    assert verdict in judgement.verdict


def test_one_that_hung_is_said_to_have_given_no_result(tmp_path):
    (_, guilty), judgement = run(
        tmp_path, WorkerTimeoutError, "stop", worker_timeout=5 * TIME_SCALE
    )
    assert guilty.type == "WorkerTimeoutError"
    assert "train_epoch()" in guilty.message
    check_failed(judgement)
    assert "WorkerTimeoutError" in judgement.verdict


def test_an_error_of_the_driver_accuses_no_worker(tmp_path):
    class Trainer(DataParallelTrainer):
        def on_epoch_end(self, epoch, result, **kwargs):
            raise OSError("no space for my notes")

    trainer = Trainer(2, worker=Counter, run_dir=tmp_path / "run", backend="local", progress=False)
    with pytest.raises(OSError, match="no space"):
        trainer.train(epochs=1)
    record = read_run(trainer.run.path)
    assert [rank.exit.by_launcher for rank in record.ranks.values()] == [True, True]
    assert record.run["error"]["message"] == "no space for my notes"
    assert "rank 0" not in diagnose(trainer.run.path).verdict
