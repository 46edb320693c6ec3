"""Signals that end a training run: a checkpoint, no process left, and the status of the signal."""

import json
import os
import signal

import numpy as np
import pytest

from tests.faults.helpers import GONE, eventually

#: Workers without torch. Epoch 1 says that it has begun, and lasts as long as the test wants.
SCRIPT = """
    import os, signal, sys, time
    import numpy as np
    from miniray.train import DataParallelTrainer

    class Worker:
        def __init__(self, worker_id, folder):
            self.worker_id, self.folder = worker_id, folder
            self.weights = np.zeros(3)

        def train_epoch(self, epoch):
            if epoch == 1:
                open(f"{self.folder}/began-{self.worker_id}", "w").close()
                while not os.path.exists(f"{self.folder}/end"):
                    time.sleep(0.01)
            self.weights = self.weights * 0.5 + self.worker_id + np.sqrt(epoch + 1)
            return {"loss": float(self.weights[0])}

        def get_weights(self):
            return [self.weights]

        def set_weights(self, weights):
            self.weights = np.array(weights[0])

    folder, grace_seconds = sys.argv[1], float(sys.argv[2])
    if len(sys.argv) > 3:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with DataParallelTrainer(
        2, worker=Worker, run_dir=folder + "/run", grace_seconds=grace_seconds, backend="local"
    ) as trainer:
        trainer.train(epochs=3, resume="auto", folder=folder)
        print("weights", trainer.model_weights()[0].tolist())
"""


@pytest.fixture
def run(drivers, tmp_path):
    """Start the script up to the middle of epoch 1."""

    def start(*arguments):
        driver = drivers.start(SCRIPT, tmp_path, *arguments)
        eventually(lambda: all((tmp_path / f"began-{i}").exists() for i in range(2)), 20)
        return driver

    return start


def read_state(tmp_path):
    return json.loads((tmp_path / "run" / "run.json").read_text())


def list_checkpoints(tmp_path):
    return sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*"))


def compute_weights(epochs):
    """Return the weights of a run that isn't interrupted."""
    weights = np.zeros(3)
    for epoch in range(epochs):
        weights = np.mean([weights * 0.5 + i + np.sqrt(epoch + 1) for i in range(2)], axis=0)
    return weights.tolist()


def expect_notice(driver):
    """Wait until the driver has handled the first signal."""
    while "again to stop at once" not in (line := driver.process.stderr.readline()):
        assert line, "the driver has ended"


def test_preempted_run_ends_after_its_epoch_and_resumes(run, drivers, tmp_path):
    driver = run(25)
    os.kill(driver.pid, signal.SIGTERM)
    expect_notice(driver)
    (tmp_path / "end").touch()
    assert driver.process.wait(GONE) == -signal.SIGTERM
    driver.assert_nothing_left()
    state = read_state(tmp_path)
    assert (state["state"], state["step"], state["stop_reason"]) == ("preempted", 2, "SIGTERM")
    assert list_checkpoints(tmp_path) == ["epoch-00000001"]
    resumed, _ = drivers.start(SCRIPT, tmp_path, 25).process.communicate(timeout=40)
    assert resumed == f"weights {compute_weights(3)}\n"
    assert read_state(tmp_path)["state"] == "finished"


@pytest.mark.parametrize(
    ("first", "second"), [(signal.SIGUSR1, signal.SIGTERM), (signal.SIGINT, signal.SIGINT)]
)
def test_second_signal_stops_at_once(run, tmp_path, first, second):
    driver = run(600)
    os.kill(driver.pid, first)
    expect_notice(driver)
    os.kill(driver.pid, second)
    _, errors = driver.process.communicate(timeout=GONE)
    assert driver.process.returncode == -second
    driver.assert_nothing_left()
    is_interrupt = second == signal.SIGINT
    assert read_state(tmp_path)["state"] == ("interrupted" if is_interrupt else "preempted")
    assert errors.count("the run is in") == 1
    assert errors.count("KeyboardInterrupt") == is_interrupt


@pytest.mark.slow
def test_workers_that_do_not_finish_are_stopped_after_grace_seconds(run, tmp_path):
    driver = run(1)
    os.kill(driver.pid, signal.SIGTERM)
    assert driver.process.wait(1 + GONE) == -signal.SIGTERM
    driver.assert_nothing_left()
    state = read_state(tmp_path)
    assert (state["state"], state["step"]) == ("preempted", 1)


def test_handler_of_the_program_is_called_after_the_checkpoint(run, tmp_path):
    driver = run(25, "own handler")
    os.kill(driver.pid, signal.SIGUSR1)
    expect_notice(driver)
    (tmp_path / "end").touch()
    assert driver.process.wait(GONE) == 7
    driver.assert_nothing_left()
    assert read_state(tmp_path)["state"] == "preempted"
    assert list_checkpoints(tmp_path) == ["epoch-00000001"]
