"""One process at a time writes to a run directory, and only its user can read it."""

import argparse
import dataclasses
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import miniray
from miniray.cli.runs import find_obstacle
from miniray.doctor import runfile
from miniray.errors import RunLockedError
from miniray.train import BaseTrainer, RunDirectory
from miniray.train.run.lock import create_locked_error, find_holder

RESUME = """
import sys
from miniray.train import RunDirectory
sys.stdin.readline()
try:
    run = RunDirectory.reopen("runs/x")
    run.write_run({})
    print("ok", flush=True)
except Exception as error:
    print(type(error).__name__, error.pid, error.host, flush=True)
sys.stdin.read()
"""


def start(code):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def end(*processes):
    for process in processes:
        process.kill()
        process.communicate()


def test_only_one_of_two_processes_resumes():
    run = RunDirectory.open(name="x")
    run.write_run({})
    run.finish("failed")
    both = [start(RESUME) for _ in range(2)]
    try:
        for process in both:
            process.stdin.write("\n")
            process.stdin.flush()
        answers = [process.stdout.readline().split() for process in both]
        winner = answers.index(["ok"])
        assert answers[1 - winner] == [
            "RunLockedError",
            str(both[winner].pid),
            socket.gethostname(),
        ]
        with pytest.raises(RunLockedError) as caught:
            RunDirectory.open(name="x")
        error = caught.value
        assert (error.pid, error.host) == (both[winner].pid, socket.gethostname())
        assert error.code == "run-locked"
        assert len(run.read_run()["attempts"]) == 1
        both[winner].kill()
        both[winner].wait()
        RunDirectory.reopen("runs/x")  # the lock ended with its holder
    finally:
        end(*both)


def test_lock_is_per_process_and_ends_with_the_run():
    run = RunDirectory.open(name="x")
    run.write_run({})
    assert find_holder(run.path) == {"pid": os.getpid(), "host": socket.gethostname()}
    again = RunDirectory.reopen(run.path)  # as a second trainer of this process does
    again.write_run({})
    again.finish("finished")
    assert find_holder(run.path) is None
    with pytest.raises(RunLockedError):
        run.write_run({})  # the second trainer has continued the run
    assert find_holder(run.path) is None
    run = RunDirectory.reopen(run.path)
    assert find_holder(run.path) is not None
    del run, again
    assert find_holder(RunDirectory("runs/x").path) is None


def test_error_message(golden):
    run = RunDirectory.open(name="x")
    run.lock_file.write_text(json.dumps({"pid": 7, "host": "node3"}))
    process = start(RESUME)
    try:
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline().split() == ["RunLockedError", "7", "node3"]
    finally:
        end(process)
    golden("run_locked.txt", f"{create_locked_error(run.path, {'pid': 7, 'host': 'node3'})}\n")


def test_locked_run_is_not_deleted():
    run = RunDirectory.open(name="x")
    run.write_run({})
    run.finish("finished")
    assert find_obstacle(run.path) == ""
    process = start(
        """
        import sys
        from pathlib import Path
        from miniray.files import FileLock
        lock = FileLock(Path("runs/x/.lock"))
        lock.write(b'{"pid": 7, "host": "node3"}')
        print("ready", flush=True)
        sys.stdin.read()
        """
    )
    try:
        process.stdout.readline()
        assert "node3" in find_obstacle(run.path)
    finally:
        end(process)
    assert find_obstacle(run.path) == ""


@pytest.mark.parametrize("file", [None, "notes.txt"])
def test_only_an_empty_directory_is_discarded(file):
    run = RunDirectory.open(name="x")
    if file:
        (run.path / file).touch()
    run.discard_if_empty()
    assert run.path.exists() == bool(file)
    assert find_holder(run.path) is None


class Counter:
    def get_weights(self):
        return [np.zeros(1)]

    def set_weights(self, weights):
        pass

    def train_epoch(self, epoch):
        return {"loss": 1.0}


class Trainer(BaseTrainer):
    def create_worker(self, worker_id, **kwargs):
        return miniray.remote(Counter).remote()


def test_trainer_rejects_a_run_that_another_process_trains():
    process = start(
        """
        import sys
        import miniray
        from tests.train.test_run_lock import Trainer

        class Waiting(Trainer):
            def on_epoch_end(self, epoch, result):
                self.save_checkpoint()
                print("ready", flush=True)
                sys.stdin.read()

        with Waiting(1, name="shared", backend="inline", progress=False) as trainer:
            trainer.train(epochs=1)
        """
    )
    try:
        assert process.stdout.readline() == "ready\n"
        trainer = Trainer(1, name="shared", backend="inline", progress=False)
        with trainer, pytest.raises(RunLockedError) as caught:
            trainer.train(epochs=1, resume=True)
        assert caught.value.pid == process.pid
        process.send_signal(signal.SIGKILL)
        process.communicate()
        with Trainer(1, name="shared", backend="inline", progress=False) as trainer:
            trainer.train(epochs=2, resume=True)
            epochs = [record["epoch"] for record in trainer.run.read_metrics()]
            assert epochs == [0, 1]
            assert find_holder(trainer.run.path) is None
    finally:
        end(process)


RESUME_TRAINER = """
import sys
from tests.train.test_run_lock import Trainer

class Waiting(Trainer):
    def on_epoch_end(self, epoch, result):
        self.save_checkpoint()
        print("trained", flush=True)
        sys.stdin.readline()

with Waiting(1, name="shared", backend="inline", progress=False) as trainer:
    trainer.train(epochs=2, resume=True)
"""


def test_trainer_whose_run_was_continued_elsewhere_raises():
    """Between two calls of ``train``, a different process may lock and continue the run."""
    with Trainer(1, name="shared", backend="inline", progress=False) as trainer:
        trainer.train(epochs=1)
        trainer.save_checkpoint()
        process = start(RESUME_TRAINER)
        try:
            assert process.stdout.readline() == "trained\n"
            with pytest.raises(RunLockedError) as caught:
                trainer.train(epochs=1)
            assert caught.value.pid == process.pid
            assert trainer.run.status() == "running"  # that of the other process
            process.communicate("\n")
            assert trainer.run.status() == "finished"
        finally:
            end(process)


def test_trainer_after_a_different_process_continued_the_run():
    with Trainer(1, name="shared", backend="inline", progress=False) as trainer:
        trainer.train(epochs=1)
        trainer.save_checkpoint()
        process = start(RESUME_TRAINER)
        process.communicate("\n")
        with pytest.raises(RunLockedError) as caught:
            trainer.train(epochs=1)
        assert (caught.value.pid, caught.value.host) == (process.pid, socket.gethostname())
        assert [record["epoch"] for record in trainer.run.read_metrics()] == [0, 1]
        trainer.train(epochs=3, resume=True)
        assert [record["epoch"] for record in trainer.run.read_metrics()] == [0, 1, 2]
        assert trainer.run.status() == "finished"


@pytest.mark.parametrize("options", [{"name": "x"}, {"run_dir": "deep/er/x"}, {}])
def test_run_directory_is_private(options):
    run = RunDirectory.open(**options)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(run.path.parent.stat().st_mode) != 0o700


# -- secrets ---------------------------------------------------------------------------------------

SECRET = [
    "api_token",
    "hf_token",
    "secretKey",
    "OPENAI_API_KEY",
    "password",
    "db-password",
    "APIKey",
]
PLAIN = ["max_new_tokens", "tokenizer", "monkey", "keyboard", "secretary", "token_count", "name"]


def test_secrets_are_masked_in_run_json():
    config = {
        **dict.fromkeys([*SECRET, *PLAIN], "hunter2"),
        "nested": [{"hf_token": "hunter2", "n": 1}],
        "token": 3,
        "secret": None,
    }
    run = RunDirectory.open(name="x")
    run.write_run(config)
    found = run.read_run()["config"]
    assert {name for name in [*SECRET, *PLAIN] if found[name] == runfile.MASK} == set(SECRET)
    assert found["nested"] == [{"hf_token": runfile.MASK, "n": 1}]
    assert (found["token"], found["secret"]) == (3, None)
    assert config["api_token"] == "hunter2"  # the caller's object is unchanged


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float
    api_key: str


def test_secrets_inside_arguments_of_train_are_masked():
    loop = {"lr": 1}
    loop["self"] = loop
    kwargs = {
        "service": {"auth_token": "hunter2", "more": ({"password": "hunter2"},)},
        "settings": Settings(0.5, "hunter2"),
        "args": argparse.Namespace(hf_token="hunter2", epochs=3),
        "kind": Settings,
        "loop": loop,
    }
    with Trainer(1, name="x", backend="inline", progress=False, loggers="csv") as trainer:
        trainer.train(epochs=1, **kwargs)
        run = trainer.run.path
    assert kwargs["settings"].api_key == kwargs["args"].hf_token == "hunter2"
    found = json.loads((run / "run.json").read_text())["config"]["kwargs"]
    assert found["settings"] == repr(Settings(0.5, runfile.MASK))
    assert "epochs=3" in found["args"]
    for path in run.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        (["train.py", "--api-key", "hunter2", "--lr", "1"], ["--api-key", runfile.MASK]),
        (["train.py", "--hf_token=hunter2"], [f"--hf_token={runfile.MASK}"]),
        (["train.py", "model.api_key=hunter2"], [f"model.api_key={runfile.MASK}"]),
        (["train.py", "--max-new-tokens", "5", "--tokenizer=x"], ["5", "--tokenizer=x"]),
        (["train.py", "--password", "--lr", "1"], ["--password", "--lr"]),
    ],
)
def test_secrets_are_masked_in_commands(arguments, masked):
    found = runfile.mask_arguments(arguments)
    assert "hunter2" not in " ".join(found)
    assert set(masked) <= set(found)
    assert runfile.mask_command(" ".join(arguments)) == " ".join(found)


def test_secrets_of_old_runs_are_masked_in_the_report():
    from miniray.report import write_report

    run = RunDirectory.open(name="x")
    run.write_run({"lr": 1})
    run.finish("finished")
    info = json.loads(run.run_file.read_text())
    info["config"] = {"api_token": "hunter2", "deep": {"password": "hunter2"}}
    info["command"] = "python train.py --api-key hunter2"
    run.run_file.write_text(json.dumps(info))
    page = write_report(run.path).read_text()
    assert page.count(runfile.MASK) == 3
    assert "hunter2" not in page
