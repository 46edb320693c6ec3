"""Workers that die, hang or raise while training."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

import miniray
from miniray.errors import ActorDiedError, GetTimeoutError, WorkerTimeoutError
from miniray.ps import Strategy
from miniray.train import DataParallelTrainer, LRSchedule
from tests.time_scale import TIME_SCALE, with_real_limits
from tests.train.workers_for_tests import Counter, Mortal

pytestmark = pytest.mark.usefixtures("_light_workers")


def make(tmp_path, how, **options):
    class Trainer(DataParallelTrainer):
        def create_worker(self, worker_id, **kwargs):
            marker = str(tmp_path / "died")
            return Mortal.remote(worker_id, victim=1, in_epoch=2, how=how, marker=marker)

    return Trainer(num_workers=3, backend="local", **{"progress": False, **options})


@pytest.fixture(scope="module", autouse=True)
def _mother_is_there(_mother):
    """Or the first engine that starts here would leave a process more than there was."""
    _mother.start()


def processes():
    """Return the children of this process, including helpers of earlier tests."""
    return set(psutil.Process().children(recursive=True))


def events_of(trainer):
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("kill", {}),
        ("stop", {"worker_timeout": 5 * TIME_SCALE}),
        pytest.param("stop", {"worker_timeout": 5.0}, marks=pytest.mark.slow),
    ],
)
def test_a_lost_worker_is_replaced_and_the_others_do_not_repeat_their_work(tmp_path, how, options):
    schedule = LRSchedule(lambda epoch: 10 - epoch)
    with make(tmp_path, how, max_failures=1, callbacks=[schedule], **options) as trainer:
        result = trainer.train(epochs=4, batch_size=16)
        seen = miniray.get([w.seen.remote() for w in trainer.workers])
        weights = miniray.get([w.get_weights.remote() for w in trainer.workers])
    # The replacement has only the epochs since; its shard is its predecessor's.
    assert [s["epochs"] for s in seen] == [[0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]
    assert seen[1]["shard"] == (1, 3, 16, None)
    # So is its learning rate, from its first epoch on.
    assert [s["lrs"] for s in seen] == [[10, 9, 8, 7], [8, 7], [10, 9, 8, 7]]
    # As if nothing had happened: the mean of 1, 2 and 3 in each of four epochs.
    assert [float(w[0][0]) for w in weights] == [8.0, 8.0, 8.0]
    assert [record["loss"] for record in result.history] == pytest.approx(
        [1 / (e + 1) + 1 for e in range(4)]
    )
    events = events_of(trainer)
    assert [e["event"] for e in events] == ["worker_failed", "worker_replaced"]
    assert (events[0]["worker"], events[0]["epoch"]) == (1, 2)
    assert ("SIGKILL" if how == "kill" else f"{options['worker_timeout']:g} s") in events[0][
        "reason"
    ]


def test_a_replacement_is_said_aloud(tmp_path, capfd):
    with make(tmp_path, "kill", max_failures=1, progress=True) as trainer:
        trainer.train(epochs=3, batch_size=16)
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "SIGKILL" in line]
    assert line.startswith("worker 1 ")


def test_without_failures_to_spare_the_run_ends_with_one_error_and_no_process(tmp_path):
    before = processes()
    trainer = make(tmp_path, "kill")
    with pytest.raises(ActorDiedError, match=r"train_epoch\(\)") as e:
        trainer.train(epochs=4)
    error = e.value
    assert (error.worker, error.epoch, error.signal, error.exit_code) == (1, 2, "SIGKILL", None)
    assert (error.host, error.in_init) == (socket.gethostname(), False)
    recorded = json.loads((trainer.run.path / "run.json").read_text())["error"]
    assert recorded["type"] == "ActorDiedError"
    assert {name: recorded[name] for name in ("code", "worker", "signal", "pid")} == {
        "code": "actor-died", "worker": 1, "signal": "SIGKILL", "pid": error.pid
    }  # fmt: skip
    assert not miniray.is_initialized()
    assert processes() <= before
    assert json.loads((trainer.run.path / "run.json").read_text())["state"] == "failed"


def test_a_worker_that_hangs_is_named(tmp_path):
    before = processes()
    trainer = make(tmp_path, "stop", worker_timeout=5 * TIME_SCALE)
    with pytest.raises(WorkerTimeoutError, match=r"train_epoch\(\)") as caught:
        trainer.train(epochs=4)
    assert (caught.value.worker, caught.value.epoch) == (1, 2)
    assert processes() <= before


def test_exceptions_are_not_failures_to_be_repeated(tmp_path):
    trainer = make(tmp_path, "raise", max_failures=5)
    with pytest.raises(ValueError) as caught:
        trainer.train(epochs=4)
    assert (caught.value.worker, caught.value.epoch) == (1, 2)


@pytest.mark.parametrize("in_epoch", [None, 1])  # at once, or where it replaces another one
def test_neither_are_exceptions_while_a_worker_is_made(tmp_path, in_epoch):
    marker = tmp_path / "died"

    @miniray.remote
    class Unmade(Counter.__wrapped__):
        def __init__(self, worker_id):
            if worker_id == 1 and (in_epoch is None or marker.exists()):
                raise LookupError("no model")
            super().__init__(worker_id)

        def train_epoch(self, epoch):
            if self.worker_id == 1 and epoch == in_epoch:
                marker.touch()
                os._exit(3)
            return super().train_epoch(epoch)

    trainer = DataParallelTrainer(
        2, worker=Unmade, backend="local", progress=False, max_failures=5, name="unmade"
    )
    with pytest.raises(ActorDiedError, match=r"(?s)Unmade.__init__ .*no model") as info:
        trainer.train(epochs=3)
    assert (info.value.worker, info.value.in_init) == (1, True)
    events = trainer.run.read_events()
    assert [e["event"] for e in events] == ([] if in_epoch is None else ["worker_failed"])


@miniray.remote
class DiesInSync(Counter.__wrapped__):
    """The worker with the highest id dies in its call number ``at`` of ``method``, once."""

    def __init__(self, worker_id, method, at, marker, victim):
        super().__init__(worker_id, start=0)
        self.plan = (method, marker) if worker_id == victim else None
        self.left = at

    def _maybe_die(self, method):
        if self.plan is not None and self.plan[0] == method:
            self.left -= 1
            if self.left == 0 and not os.path.exists(self.plan[1]):
                open(self.plan[1], "w").close()
                os._exit(7)

    def get_weights(self):
        self._maybe_die("get_weights")
        return super().get_weights()

    def set_weights(self, weights):
        self._maybe_die("set_weights")
        super().set_weights(weights)


@pytest.mark.parametrize(
    ("method", "at", "workers", "strategy", "expected"),
    [
        # In every case the last worker is lost in the second of three epochs' syncs.
        #
        # Collecting: 2 after the first epoch; 3, 4 and a copy of the first's 3 are combined.
        ("get_weights", 3, 3, {}, [10 / 3, 10 / 3 + 2]),
        # Distributing: velocity 2, weights 2; velocity 3, weights 5, which the survivors have. All
        # workers get them, with the earlier velocity: then it is 1 + 2 and the weights are 8.
        ("set_weights", 3, 3, {"sync_strategy": "momentum", "momentum": 0.5}, [5, 8]),
        # No worker survives: the epoch's work is lost, the weights are the server's 1.
        ("set_weights", 2, 1, {}, [1, 2]),
    ],
)
def test_after_a_worker_died_in_a_sync_all_have_the_same_weights(
    tmp_path, method, at, workers, strategy, expected
):
    kept = []

    class Trainer(DataParallelTrainer):
        def create_worker(self, worker_id, **kwargs):
            marker = str(tmp_path / "died")
            return DiesInSync.remote(worker_id, method, at, marker, victim=workers - 1)

        def on_epoch_end(self, epoch, result, **kwargs):
            held = miniray.get([w.get_weights.remote() for w in self.workers])
            server = miniray.get(self.param_server.get_weights.remote())
            kept.append([float(w[0][0]) for w in (*held, server)])

    with Trainer(workers, max_failures=1, backend="local", progress=False, **strategy) as trainer:
        result = trainer.train(epochs=3)
    assert [record["synced"] for record in result.history] == [True] * 3
    for weights, value in zip(kept[1:], expected, strict=True):
        assert weights == pytest.approx([value] * (workers + 1))
    assert "code 7" in events_of(trainer)[0]["reason"]


class Stopped(Strategy):
    """The server that combines with it stops for good."""

    def combine(self, global_weights, worker_weights, weights):
        psutil.Process().suspend()


@with_real_limits
def test_a_parameter_server_that_hangs_is_named(scale):
    options = {"worker_timeout": 2.5 * scale, "backend": "local", "progress": False}
    trainer = DataParallelTrainer(2, worker=Counter, sync_strategy=Stopped(), **options)
    with pytest.raises(GetTimeoutError, match=f"{5 * scale:g} s"):
        trainer.train(epochs=1)


@miniray.remote
class SlowInSync(Counter.__wrapped__):
    """The second worker's second ``set_weights``, the first of a sync, takes its time."""

    def set_weights(self, weights):
        super().set_weights(weights)
        self.lr = (self.lr or 0) + 1
        if (self.worker_id, self.lr) == (1, 2):
            time.sleep(3.4)


def test_a_sync_that_is_late_because_a_worker_was_slow_is_waited_for():
    with DataParallelTrainer(
        2, worker=SlowInSync, worker_timeout=3.0, backend="local", progress=False
    ) as trainer:
        result = trainer.train(epochs=1)
        held = miniray.get([w.get_weights.remote() for w in trainer.workers])
    assert result["synced"]
    assert [float(w[0][0]) for w in held] == [1.5, 1.5]  # of 1 and 2
    assert trainer.run.read_events() == []


def test_ctrl_c_ends_everything_and_says_so_in_the_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, threading, time
            import numpy as np
            import miniray
            from miniray.train import DataParallelTrainer, LRSchedule

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

            Trainer(2, progress=False, name="stopped", grace_seconds=1).train(epochs=3)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=40
    )
    assert done.returncode != 0
    # The traceback shows only user code. The run directory records what miniray was doing.
    lines = done.stderr.strip().splitlines()
    assert lines[-1] == "KeyboardInterrupt"
    assert [line.split('"')[1] for line in lines if "File" in line] == [str(script)]
    run = json.loads((tmp_path / "runs" / "stopped" / "run.json").read_text())
    assert run["state"] == "interrupted"
    assert "waiting.py" in run["error"]["traceback"]
