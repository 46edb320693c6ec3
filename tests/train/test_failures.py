"""Workers that die, hang or raise while training."""

import json
import os
import subprocess
import sys
import textwrap

import psutil
import pytest

import miniray
from miniray.errors import ActorDiedError, WorkerTimeoutError
from miniray.train import DataParallelTrainer
from tests.train.workers_for_tests import Counter, Mortal


def make(tmp_path, how, **options):
    class Trainer(DataParallelTrainer):
        def create_worker(self, worker_id, **kwargs):
            marker = str(tmp_path / "died")
            return Mortal.remote(worker_id, victim=1, in_epoch=2, how=how, marker=marker)

    return Trainer(num_workers=3, backend="local", progress=False, **options)


def processes():
    """What this process has started, helpers of earlier tests included."""
    return set(psutil.Process().children(recursive=True))


def events_of(trainer):
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("how", "options"), [("kill", {}), ("stop", {"worker_timeout": 5.0})])
def test_a_lost_worker_is_replaced_and_the_others_do_not_repeat_their_work(tmp_path, how, options):
    with make(tmp_path, how, max_failures=1, **options) as trainer:
        result = trainer.train(epochs=4, batch_size=16)
        seen = miniray.get([w.seen.remote() for w in trainer.workers])
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    # The replacement has only the epochs since; its shard is its predecessor's.
    assert [s["epochs"] for s in seen] == [[0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]
    assert seen[1]["shard"] == (1, 3, 16, None)
    # As if nothing had happened: the mean of 1, 2 and 3 in each of four epochs.
    assert [float(w[0][0]) for w in weights] == [8.0, 8.0, 8.0]
    assert [record["loss"] for record in result.history] == pytest.approx(
        [1 / (e + 1) + 1 for e in range(4)]
    )
    events = events_of(trainer)
    assert [e["event"] for e in events] == ["worker_failed", "worker_replaced"]
    assert (events[0]["worker"], events[0]["epoch"]) == (1, 2)
    assert ("SIGKILL" if how == "kill" else "5 s") in events[0]["reason"]


def test_without_failures_to_spare_the_run_ends_with_one_error_and_no_process(tmp_path):
    before = processes()
    trainer = make(tmp_path, "kill")
    with pytest.raises(ActorDiedError, match=r"worker 1, train_epoch\(\) in epoch 2.*SIGKILL"):
        trainer.train(epochs=4)
    assert not miniray.is_initialized()
    assert processes() <= before
    assert json.loads((trainer.run.path / "run.json").read_text())["state"] == "failed"


def test_a_worker_that_hangs_is_named(tmp_path):
    before = processes()
    trainer = make(tmp_path, "stop", worker_timeout=5.0)
    with pytest.raises(WorkerTimeoutError, match=r"worker 1, train_epoch\(\) in epoch 2"):
        trainer.train(epochs=4)
    assert processes() <= before


def test_exceptions_are_not_failures_to_be_repeated(tmp_path):
    trainer = make(tmp_path, "raise", max_failures=5)
    with pytest.raises(ValueError, match="worker 1 in epoch 2"):
        trainer.train(epochs=4)


def test_a_worker_that_dies_while_syncing_is_replaced(tmp_path):
    marker = str(tmp_path / "died")

    @miniray.remote
    class DiesInSync(Counter.__wrapped__):
        def get_weights(self):
            if self.worker_id == 1 and len(self.epochs) == 2 and not os.path.exists(marker):
                open(marker, "w").close()
                os._exit(7)
            return super().get_weights()

    with DataParallelTrainer(
        3, worker=DiesInSync, backend="local", progress=False, max_failures=1
    ) as trainer:
        result = trainer.train(epochs=3)
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    assert result["synced"]
    assert len({float(w[0][0]) for w in weights}) == 1
    assert "code 7" in events_of(trainer)[0]["reason"]


def test_ctrl_c_ends_everything_and_says_so_in_the_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, threading, time
            import numpy as np
            import miniray
            from miniray.train import DataParallelTrainer

            @miniray.remote
            class Slow:
                def train_epoch(self, epoch):
                    time.sleep(60 if epoch == 1 else 0)
                    return {"loss": 0.0}

                def get_weights(self):
                    return [np.zeros(1)]

                def set_weights(self, weights):
                    pass

            class Trainer(DataParallelTrainer):
                def create_worker(self, worker_id, **kwargs):
                    return Slow.remote()

                def on_epoch_start(self, epoch, **kwargs):
                    if epoch == 1:
                        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

            Trainer(2, progress=False, name="stopped").train(epochs=3)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=40
    )
    assert done.returncode != 0
    assert "KeyboardInterrupt" in done.stderr
    run = json.loads((tmp_path / "runs" / "stopped" / "run.json").read_text())
    assert run["state"] == "interrupted"
